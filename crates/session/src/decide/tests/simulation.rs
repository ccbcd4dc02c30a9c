//! Everything outside the decision, simulated in memory: a store, a provider, supervisors,
//! admission and users. Asserts the invariants after every decision.

mod effects;

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
};

use harvest_proto::bridge::PromptProgress;

use super::syncs::random_sync;
use crate::decide::*;

/// Whether an effect succeeds.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum EffectOutcome {
    Success,
    Failure,
}

#[derive(Default)]
pub(super) struct Sandbox {
    epoch: u64,
    alive: bool,
    disk_left: bool,
    linked: bool,
    booted: bool,
    pub(super) seen: Vec<(PromptId, PromptProgress)>,
    question: Option<String>,
    outbox: Vec<Input>,
    unsaved_turn: bool,
    has_work: bool,
    pub(super) frozen: bool,
}

pub(super) struct Simulation {
    pub(super) state: State,
    stored: String,
    pub(super) timeouts: Timeouts,
    pub(super) now: i64,
    pub(super) prompts: BTreeMap<PromptId, PromptStatus>,
    pub(super) order: Vec<PromptId>,
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    pub(super) pending: Vec<Action>,
    snapshots: BTreeSet<SnapshotId>,
    pub(super) runs: BTreeMap<PromptId, u32>,
    pub(super) newest: Option<SnapshotId>,
    requests: u32,
    /// What only a person can solve, as reported so far.
    pub(super) reports: Vec<EventBody>,
    unknown: bool,
    /// Commands run beside the agent.
    pub(super) busy: bool,
    /// The server knows of them: after a restart it learns of them with the status of the bridge.
    busy_known: bool,
    /// No slot is free.
    pub(super) full: bool,
    has_slot: bool,
    sequences: u64,
    /// The snapshots by turn number.
    pub(super) turns: BTreeMap<u32, SnapshotId>,
    numbers: BTreeMap<TurnId, u32>,
}

impl Simulation {
    pub(super) fn new() -> Self {
        let state = State::new(None, false);
        let mut sim = Self {
            stored: serde_json::to_string(&state).unwrap(),
            state,
            timeouts: Timeouts::default(),
            now: 1_000_000,
            prompts: BTreeMap::new(),
            order: Vec::new(),
            sandboxes: BTreeMap::new(),
            pending: Vec::new(),
            snapshots: BTreeSet::new(),
            runs: BTreeMap::new(),
            newest: None,
            requests: 0,
            reports: Vec::new(),
            unknown: false,
            busy: false,
            busy_known: true,
            full: false,
            has_slot: false,
            sequences: 0,
            turns: BTreeMap::new(),
            numbers: BTreeMap::new(),
        };
        sim.crash();
        sim
    }

    pub(super) fn input(&mut self, input: Input) {
        let state = self.state.clone();
        let idles = |action: &&Action| {
            matches!(
                action,
                Action::Freeze { .. } | Action::StopAndSave { kind: SnapshotKind::Pause, .. }
            )
        };
        let before = self.pending.iter().filter(idles).count();
        self.decide_and_commit(|context| decide(state.clone(), input.clone(), context));
        // The retry of a save stops nothing more.
        let stopped = matches!(state.sandbox, SandboxState::SaveUnknown { .. });
        if self.busy && !stopped && matches!(input, Input::Tick | Input::SlotReleaseRequested) {
            let after = self.pending.iter().filter(idles).count();
            assert!(after <= before, "commands beside the agent are activity: {:?}", self.pending);
        }
    }

    /// Decides as the driver does; a slot is granted unless the server is full.
    fn decide_and_commit(&mut self, decide_with: impl FnOnce(&StepContext<'_>) -> Decision) {
        let (claims, full, sequence) = (Cell::new(0), self.full, self.sequences + 1);
        let claim_slot = || {
            claims.set(claims.get() + 1);
            let queued = SlotClaim::Queued { limit: Limit::Sandboxes(1), position: 1 };
            (if full { queued } else { SlotClaim::Granted }, sequence)
        };
        let decision = decide_with(&StepContext {
            now: Timestamp::from_millis(self.now),
            timeouts: &self.timeouts,
            busy: self.busy && self.busy_known,
            claim_slot: &claim_slot,
            sandbox: SandboxId::random(),
            turn: TurnId::random(),
            snapshot: SnapshotId::random(),
        });
        assert!(claims.get() <= 1, "one decision claims one slot");
        self.sequences += claims.get();
        self.has_slot |= claims.get() > 0 && !full;
        self.commit(decision);
    }

    pub(super) fn grant_slot(&mut self) {
        if let Some(waiting) = self.state.waiting {
            self.has_slot = true;
            self.input(Input::SlotGranted { sequence: waiting.sequence });
        }
    }

    /// Replaces the session with a stored one.
    pub(super) fn begin(&mut self, state: State) {
        self.stored = serde_json::to_string(&state).unwrap();
        (self.state, self.has_slot) = (state, false);
        self.crash();
    }

    /// The server crashes and restarts: only the store and the sandboxes are left.
    pub(super) fn crash(&mut self) {
        self.pending.clear();
        self.busy_known = false;
        for sandbox in self.sandboxes.values_mut() {
            sandbox.linked = false;
        }
        let state: State = serde_json::from_str(&self.stored).unwrap();
        let queue = self
            .order
            .iter()
            .filter(|prompt| self.prompts[*prompt] == PromptStatus::Queued)
            .cloned()
            .collect();
        let queue: Vec<PromptId> = queue;
        self.decide_and_commit(|context| restart(state, queue, context));
    }

    fn commit(&mut self, decision: Decision) {
        if self.state.yielding_slot {
            let question = self.state.sandbox == SandboxState::Absent;
            self.has_slot &= question || decision.state.sandbox != SandboxState::Absent;
        }
        self.state = decision.state;
        self.stored = serde_json::to_string(&self.state).unwrap();
        self.assert_invariants();
        for action in decision.actions {
            match action {
                Action::SetPromptStatus { prompt, from, to } => {
                    assert_eq!(
                        self.prompts[&prompt], from,
                        "the prompt had the status it is changed from"
                    );
                    assert!(
                        matches!(from, PromptStatus::Queued | PromptStatus::Dispatched),
                        "final statuses do not change"
                    );
                    self.prompts.insert(prompt, to);
                    let dispatched =
                        self.prompts.values().filter(|s| **s == PromptStatus::Dispatched).count();
                    assert!(dispatched <= 1, "one prompt at a time");
                }
                Action::ReorderQueue { queue, .. } => {
                    self.order.retain(|prompt| !queue.contains(prompt));
                    self.order.splice(0..0, queue);
                }
                Action::TurnStarted { turn, number, .. } => {
                    assert!(
                        self.numbers.values().all(|other| *other < number),
                        "turn numbers increase"
                    );
                    self.numbers.insert(turn, number);
                }
                Action::SnapshotTaken { snapshot, turn: Some(turn), .. } => {
                    self.turns.insert(self.numbers[&turn], snapshot);
                }
                Action::Restored { snapshot, .. } => {
                    assert!(
                        self.sandboxes.values().all(|other| !other.disk_left || !other.has_work),
                        "the current disk is saved before another snapshot replaces it"
                    );
                    assert!(snapshot.iter().all(|snapshot| self.snapshots.contains(snapshot)));
                    self.newest = snapshot;
                }
                Action::TurnEnded { prompt, .. } => {
                    let running = |sandbox: &Sandbox| {
                        sandbox.alive
                            && sandbox.seen.contains(&(prompt.clone(), PromptProgress::Running))
                    };
                    assert!(
                        !self.sandboxes.values().any(running),
                        "the processes of a turn are gone when its end is stored"
                    );
                }
                Action::SyncBlocked { report } => self.reports.push(*report),
                Action::SnapshotTaken { .. }
                | Action::SandboxEnded { .. }
                | Action::SetPublicState { .. }
                | Action::ReportPosition { .. }
                | Action::Review => {}
                Action::Start { sandbox, epoch, from } => {
                    assert!(self.has_slot, "nothing starts without a slot");
                    assert!(!self.unknown, "nothing starts while a save is unknown");
                    assert!(
                        self.sandboxes.values().all(|other| !other.disk_left || !other.has_work),
                        "work is saved before another sandbox starts"
                    );
                    assert_eq!(from, self.newest, "a sandbox starts from the newest snapshot");
                    assert!(
                        self.sandboxes.values().all(|other| other.epoch < epoch),
                        "epochs increase"
                    );
                    self.pending.push(Action::Start { sandbox, epoch, from });
                }
                request if uses_freezer(&request) => {
                    // The freezer keeps only the last request.
                    self.pending.retain(|action| !uses_freezer(action));
                    self.pending.push(request);
                }
                effect => {
                    if let Action::Capture { sandbox, .. } = &effect {
                        let linked = matches!(
                            self.state.sandbox,
                            SandboxState::Ready { link: LinkState::Up, .. }
                        );
                        assert!(linked, "a capture needs the bridge to read the diff");
                        let captures = |action: &Action| match action {
                            Action::Capture { sandbox: other, .. } => other == sandbox,
                            _ => false,
                        };
                        assert!(!self.pending.iter().any(captures), "one capture at a time");
                    }
                    // The driver disconnects from a sandbox before it stops it.
                    if let Action::StopAndSave { sandbox, .. }
                    | Action::StopAndDiscard { sandbox } = &effect
                    {
                        self.pending.retain(|action| !uses_bridge(action) && !uses_freezer(action));
                        if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
                            sandbox.linked = false;
                        }
                    }
                    self.pending.push(effect);
                }
            }
        }
    }

    fn assert_invariants(&mut self) {
        let deadline = self.state.next_deadline(&self.timeouts);
        let needs_deadline = match &self.state.sandbox {
            SandboxState::Starting { .. } | SandboxState::Booting { .. } => true,
            SandboxState::Ready { activity, .. } => {
                matches!(activity, Activity::Idle { .. } | Activity::Turn(_))
            }
            _ => false,
        };
        assert!(
            !needs_deadline || deadline.is_some(),
            "every wait has a timeout: {:?}",
            self.state
        );
        if let SandboxState::Ready {
            link,
            activity: Activity::Saving(TurnSave { deferred: true, .. }),
            ..
        } = &self.state.sandbox
        {
            assert!(
                *link != LinkState::Up && deadline.is_some(),
                "a deferred save waits only for the bridge: {:?}",
                self.state
            );
        }
        let read: State = serde_json::from_str(&self.stored).unwrap();
        let (queue, suspending) = (self.state.queue.clone(), self.state.suspending);
        assert_eq!(
            State { queue, suspending, ..read },
            self.state,
            "the stored state is the current state"
        );
        let alive = self.sandboxes.values().filter(|sandbox| sandbox.alive).count();
        assert!(alive <= 1, "never two sandboxes");
        self.has_slot |= self.state.sandbox != SandboxState::Absent;
        self.has_slot &= self.state.sandbox != SandboxState::Absent || self.state.waiting.is_some();
    }

    pub(super) fn current(&mut self) -> Option<&mut Sandbox> {
        let id = self.state.sandbox_id()?.clone();
        self.sandboxes.get_mut(&id).filter(|sandbox| sandbox.alive)
    }

    pub(super) fn drop_link(&mut self) {
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked) else { return };
        sandbox.linked = false;
        let epoch = sandbox.epoch;
        self.pending.retain(|action| !uses_bridge(action));
        let id = self.state.sandbox_id().cloned().unwrap();
        self.input(Input::LinkLost { epoch });
        self.pending.push(Action::Connect { sandbox: id, epoch });
    }

    pub(super) fn kill(&mut self) {
        let Some(sandbox) = self.current() else { return };
        (sandbox.alive, sandbox.linked) = (false, false);
        let epoch = sandbox.epoch;
        self.input(Input::SandboxEnded { epoch, reason: "killed".into() });
    }

    pub(super) fn deliver(&mut self) {
        let Some(sandbox) =
            self.current().filter(|sandbox| sandbox.linked && !sandbox.outbox.is_empty())
        else {
            return;
        };
        let event = sandbox.outbox.remove(0);
        self.input(event);
    }

    pub(super) fn prompt(&mut self, now: bool) {
        if self.state.mode == Mode::Archived {
            return;
        }
        let prompt = PromptId::random();
        self.prompts.insert(prompt.clone(), PromptStatus::Queued);
        self.order.push(prompt.clone());
        self.input(Input::PromptQueued { prompt, now });
    }

    pub(super) fn ask(&mut self) {
        self.requests += 1;
        let request = format!("r{}", self.requests);
        if let Some(sandbox) = self.current().filter(|sandbox| sandbox.question.is_none())
            && sandbox.seen.last().is_some_and(|(_, how)| *how == PromptProgress::Running)
        {
            sandbox.question = Some(request.clone());
            sandbox.outbox.push(Input::RequestOpened { request });
        }
    }

    pub(super) fn random_event(&mut self, what: u8, which: usize) {
        let outcome =
            if which.is_multiple_of(7) { EffectOutcome::Failure } else { EffectOutcome::Success };
        match what % 53 {
            0..=13 if !self.pending.is_empty() => self.execute(which % self.pending.len(), outcome),
            14..=18 => self.deliver(),
            19..=21 => self.prompt(false),
            22 => self.prompt(true),
            23..=25 => self.end_turn(TurnOutcome::Completed),
            26 => self.ask(),
            27 => self.kill(),
            28 => self.drop_link(),
            29 | 30 => self.crash(),
            31 => self.input(Input::Stop),
            32 => self.input(Input::Pause),
            33 => self.input(Input::Resume),
            34 => self.input(Input::Terminate),
            35 if which.is_multiple_of(5)
                && !matches!(self.state.sandbox, SandboxState::SaveUnknown { .. }) =>
            {
                self.input(Input::Archive);
            }
            36 => {
                if let Some(prompt) = self.state.queue.get(which % 3).cloned() {
                    self.input(Input::PromptCancelled { prompt });
                }
            }
            37 => {
                if let Some(prompt) = self.state.queue.get(which % 3).cloned() {
                    self.input(Input::PromptMoved {
                        prompt,
                        position: u32::try_from(which % 4).unwrap(),
                    });
                }
            }
            38..=40 => self.tick(i64::try_from(which % 100).unwrap() * 10_000),
            41 | 42 => self.restore(which),
            43 => self.full = !self.full,
            44 | 45 => self.grant_slot(),
            46 => self.input(Input::SlotReleaseRequested),
            47 => {
                self.input(Input::Suspend);
                if which.is_multiple_of(2) {
                    self.crash();
                }
            }
            48 => self.input(Input::Touched),
            49 => self.busy = !self.busy,
            // The freeze expires.
            50 => self.current().into_iter().for_each(|sandbox| sandbox.frozen = false),
            51 => self.input(Input::Blocked),
            52 => self.input(random_sync(which)),
            _ => {}
        }
    }

    pub(super) fn tick(&mut self, millis: i64) {
        self.now += millis;
        self.input(Input::Tick);
        let now = Timestamp::from_millis(self.now);
        let deadline = self.state.next_deadline(&self.timeouts);
        assert!(
            self.busy || deadline.is_none_or(|at| at > now),
            "an expired timeout does not expire again: {:?}",
            self.state
        );
    }

    pub(super) fn restore(&mut self, which: usize) {
        let start = [(0, None)].into_iter();
        let turns = self.turns.iter().map(|(turn, snapshot)| (*turn, Some(snapshot.clone())));
        let Some((turn, snapshot)) = start.chain(turns).nth(which % (self.turns.len() + 1)) else {
            return;
        };
        if self.state.mode != Mode::Archived
            && !matches!(self.state.sandbox, SandboxState::SaveUnknown { .. })
        {
            self.input(Input::Restore { snapshot, turn: Some(turn) });
        }
    }

    pub(super) fn quiet_step(&mut self) -> bool {
        if self.state.waiting.is_some() {
            self.grant_slot();
            return true;
        }
        if !self.pending.is_empty() {
            self.execute(0, EffectOutcome::Success);
            return true;
        }
        if self.current().is_some_and(|sandbox| sandbox.linked && !sandbox.outbox.is_empty()) {
            self.deliver();
            return true;
        }
        self.end_turn(TurnOutcome::Completed);
        self.current().is_some_and(|sandbox| !sandbox.outbox.is_empty())
    }

    /// Runs without further failures; a user resumes the session after each one. Three times:
    /// earlier failures may only be delivered now.
    pub(super) fn settle(&mut self) {
        self.busy = false;
        if self.state.suspending {
            self.crash();
        }
        for _ in 0..3 {
            if self.state.mode != Mode::Archived {
                self.input(Input::Resume);
            }
            while self.quiet_step() {}
        }
        for (prompt, status) in &self.prompts {
            assert!(
                !matches!(status, PromptStatus::Queued | PromptStatus::Dispatched),
                "prompt {prompt} has not ended: {status:?} in {:#?}",
                self.state
            );
        }
    }
}

fn uses_freezer(action: &Action) -> bool {
    matches!(action, Action::Freeze { .. } | Action::Thaw { .. } | Action::HandOver { .. })
}

pub(super) fn uses_bridge(action: &Action) -> bool {
    matches!(
        action,
        Action::Boot { .. }
            | Action::Prepare
            | Action::SendPrompt { .. }
            | Action::StopTurn { .. }
            | Action::Answer { .. }
    )
}
