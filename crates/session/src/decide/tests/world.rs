//! Everything outside the decision, in memory: a store, a provider, supervisors, an usher, people. It
//! asserts at every step what must hold always.

mod outside;

use std::collections::{BTreeMap, BTreeSet};

use harvest_proto::bridge::PromptProgress;

use crate::decide::*;

/// Which answers of the world are good.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Luck {
    Good,
    Bad,
}

#[derive(Default)]
pub(super) struct Sandbox {
    epoch: u64,
    alive: bool,
    left: bool,
    linked: bool,
    booted: bool,
    pub(super) seen: Vec<(PromptId, PromptProgress)>,
    asks: Option<String>,
    outbox: Vec<Input>,
    unsaved_turn: bool,
    worked: bool,
    pub(super) still: bool,
}

/// Everything outside the decision.
pub(super) struct World {
    pub(super) state: State,
    kept: String,
    pub(super) clocks: Clocks,
    pub(super) now: i64,
    pub(super) prompts: BTreeMap<PromptId, PromptStatus>,
    pub(super) order: Vec<PromptId>,
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    pub(super) pending: Vec<Action>,
    snapshots: BTreeSet<SnapshotId>,
    pub(super) runs: BTreeMap<PromptId, u32>,
    pub(super) newest: Option<SnapshotId>,
    requests: u32,
    unknown: bool,
    /// Commands run beside the agent.
    pub(super) busy: bool,
    /// The server knows of them: a new one only hears it from the supervisor.
    told: bool,
    /// There is no place for anybody.
    pub(super) full: bool,
    /// The session has a place.
    place: bool,
    tickets: u64,
    /// The snapshots of turns.
    pub(super) turns: BTreeMap<u32, SnapshotId>,
    numbers: BTreeMap<TurnId, u32>,
}

impl World {
    pub(super) fn new() -> Self {
        let state = State::new(None, false);
        let mut world = Self {
            kept: serde_json::to_string(&state).unwrap(),
            state,
            clocks: Clocks::default(),
            now: 1_000_000,
            prompts: BTreeMap::new(),
            order: Vec::new(),
            sandboxes: BTreeMap::new(),
            pending: Vec::new(),
            snapshots: BTreeSet::new(),
            runs: BTreeMap::new(),
            newest: None,
            requests: 0,
            unknown: false,
            busy: false,
            told: true,
            full: false,
            place: false,
            tickets: 0,
            turns: BTreeMap::new(),
            numbers: BTreeMap::new(),
        };
        world.crash();
        world
    }

    pub(super) fn input(&mut self, input: Input) {
        let state = self.state.clone();
        let rests = |action: &&Action| {
            matches!(
                action,
                Action::Freeze { .. } | Action::EndKept { kind: SnapshotKind::Pause, .. }
            )
        };
        let before = self.pending.iter().filter(rests).count();
        self.step(|moment| decide(state.clone(), input.clone(), moment), state.waiting.is_some());
        if self.busy && matches!(input, Input::Tick | Input::PlaceNeeded) {
            let after = self.pending.iter().filter(rests).count();
            assert!(after <= before, "what runs beside the agent is activity: {:?}", self.pending);
        }
    }

    /// As the driver does: only who would have to wait otherwise asks for a place.
    fn step(&mut self, judge: impl Fn(&Moment<'_>) -> Step, waited: bool) {
        let clocks = self.clocks.clone();
        let mut moment = moment(self.now, &clocks, self.busy && self.told);
        let mut step = judge(&moment);
        if step.state.waiting.is_some() && !waited {
            self.tickets += 1;
            moment.ticket = self.tickets;
            if self.full {
                moment.room = Room::Full { limit: Limit::Sandboxes, position: 1 };
            } else {
                moment.room = Room::Free;
                self.place = true;
            }
            step = judge(&moment);
        }
        self.commit(step);
    }

    /// The place that is waited for becomes free.
    pub(super) fn give_place(&mut self) {
        if let Some(waiting) = self.state.waiting {
            self.place = true;
            self.input(Input::PlaceGiven { ticket: waiting.ticket });
        }
    }

    /// Another session, and nothing else yet.
    pub(super) fn begin(&mut self, state: State) {
        self.kept = serde_json::to_string(&state).unwrap();
        (self.state, self.place) = (state, false);
        self.crash();
    }

    /// The server dies and comes back: only the store and the sandboxes are left.
    pub(super) fn crash(&mut self) {
        self.pending.clear();
        self.told = false;
        for sandbox in self.sandboxes.values_mut() {
            sandbox.linked = false;
        }
        let state: State = serde_json::from_str(&self.kept).unwrap();
        let queue = self
            .order
            .iter()
            .filter(|prompt| self.prompts[*prompt] == PromptStatus::Queued)
            .cloned()
            .collect();
        let queue: Vec<PromptId> = queue;
        let waited = state.waiting.is_some();
        self.step(|moment| restart(state.clone(), queue.clone(), moment), waited);
    }

    fn commit(&mut self, step: Step) {
        if self.state.ceding {
            let asked = self.state.machine == Machine::Absent;
            self.place &= asked || step.state.machine != Machine::Absent;
        }
        self.state = step.state;
        self.kept = serde_json::to_string(&self.state).unwrap();
        self.assert_sound();
        for action in step.actions {
            match action {
                Action::Prompt { prompt, from, to } => {
                    assert_eq!(self.prompts[&prompt], from, "a prompt is marked from what it was");
                    assert!(
                        matches!(from, PromptStatus::Queued | PromptStatus::Dispatched),
                        "final is final"
                    );
                    self.prompts.insert(prompt, to);
                    let dispatched =
                        self.prompts.values().filter(|s| **s == PromptStatus::Dispatched).count();
                    assert!(dispatched <= 1, "one prompt at a time");
                }
                Action::Order { queue, .. } => {
                    self.order.retain(|prompt| !queue.contains(prompt));
                    self.order.splice(0..0, queue);
                }
                Action::TurnBegun { turn, number, .. } => {
                    assert!(
                        self.numbers.values().all(|other| *other < number),
                        "numbers of turns rise"
                    );
                    self.numbers.insert(turn, number);
                }
                Action::SnapshotTaken { snapshot, turn: Some(turn), .. } => {
                    self.turns.insert(self.numbers[&turn], snapshot);
                }
                Action::Restored { snapshot, .. } => {
                    assert!(
                        self.sandboxes.values().all(|other| !other.left || !other.worked),
                        "the present state is kept before another takes its place"
                    );
                    assert!(self.snapshots.contains(&snapshot));
                    self.newest = Some(snapshot);
                }
                Action::TurnOver { .. }
                | Action::SnapshotTaken { .. }
                | Action::SandboxOver { .. }
                | Action::Show { .. }
                | Action::Wait { .. }
                | Action::Review => {}
                Action::Start { sandbox, epoch, from } => {
                    assert!(self.place, "nothing starts without a place");
                    assert!(!self.unknown, "nothing starts while a save is unknown");
                    assert!(
                        self.sandboxes.values().all(|other| !other.left || !other.worked),
                        "work is kept before another sandbox starts"
                    );
                    assert_eq!(from, self.newest, "the newest state is what it starts from");
                    assert!(
                        self.sandboxes.values().all(|other| other.epoch < epoch),
                        "epochs rise"
                    );
                    self.pending.push(Action::Start { sandbox, epoch, from });
                }
                wish @ (Action::Freeze { .. } | Action::Thaw { .. }) => {
                    // Only the last wish counts.
                    self.pending.retain(|action| {
                        !matches!(action, Action::Freeze { .. } | Action::Thaw { .. })
                    });
                    self.pending.push(wish);
                }
                effect => {
                    if let Action::Capture { sandbox, .. } = &effect {
                        let linked =
                            matches!(self.state.machine, Machine::Ready { link: Link::Up, .. });
                        assert!(
                            linked,
                            "what a turn changed can be asked for before its state is kept"
                        );
                        let same = |action: &Action| matches!(action, Action::Capture { sandbox: of, .. } if of == sandbox);
                        assert!(!self.pending.iter().any(same), "a state is kept once at a time");
                    }
                    // Whoever ends a sandbox stops speaking with it first.
                    if let Action::EndKept { sandbox, .. } | Action::End { sandbox } = &effect {
                        self.pending.retain(|action| {
                            !over_the_bridge(action)
                                && !matches!(action, Action::Freeze { .. } | Action::Thaw { .. })
                        });
                        if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
                            sandbox.linked = false;
                        }
                    }
                    self.pending.push(effect);
                }
            }
        }
    }

    /// What holds in every state.
    fn assert_sound(&mut self) {
        let clock = self.state.next_clock(&self.clocks);
        let waits = match &self.state.machine {
            Machine::Starting { .. } | Machine::Booting { .. } => true,
            Machine::Ready { work, .. } => matches!(work, Work::Idle { .. } | Work::Turn(_)),
            _ => false,
        };
        assert!(!waits || clock.is_some(), "every wait has a clock: {:?}", self.state);
        if let Machine::Ready { link, work: Work::Saving(Save { later: true, .. }), .. } =
            &self.state.machine
        {
            assert!(
                *link != Link::Up && clock.is_some(),
                "a save waits for the bridge alone: {:?}",
                self.state
            );
        }
        let read: State = serde_json::from_str(&self.kept).unwrap();
        let queue = self.state.queue.clone();
        assert_eq!(State { queue, ..read }, self.state, "what is kept is what is");
        assert_known_to_the_last_version(&self.kept);
        let alive = self.sandboxes.values().filter(|sandbox| sandbox.alive).count();
        assert!(alive <= 1, "never two machines");
        self.place |= self.state.machine != Machine::Absent;
        self.place &= self.state.machine != Machine::Absent || self.state.waiting.is_some();
    }

    pub(super) fn current(&mut self) -> Option<&mut Sandbox> {
        let id = self.state.sandbox()?.clone();
        self.sandboxes.get_mut(&id).filter(|sandbox| sandbox.alive)
    }

    pub(super) fn drop_link(&mut self) {
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked) else { return };
        sandbox.linked = false;
        let epoch = sandbox.epoch;
        self.pending.retain(|action| !over_the_bridge(action));
        let id = self.state.sandbox().cloned().unwrap();
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
        if self.state.rest == Rest::Archived {
            return;
        }
        let prompt = PromptId::random();
        self.prompts.insert(prompt.clone(), PromptStatus::Queued);
        self.order.push(prompt.clone());
        self.input(Input::Queued { prompt, now });
    }

    pub(super) fn ask(&mut self) {
        self.requests += 1;
        let request = format!("r{}", self.requests);
        if let Some(sandbox) = self.current().filter(|sandbox| sandbox.asks.is_none())
            && sandbox.seen.last().is_some_and(|(_, how)| *how == PromptProgress::Running)
        {
            sandbox.asks = Some(request.clone());
            sandbox.outbox.push(Input::RequestOpened { request });
        }
    }

    pub(super) fn happen(&mut self, what: u8, which: usize) {
        let luck = if which.is_multiple_of(7) { Luck::Bad } else { Luck::Good };
        match what % 52 {
            0..=13 if !self.pending.is_empty() => self.carry_out(which % self.pending.len(), luck),
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
                && !matches!(self.state.machine, Machine::Held { .. }) =>
            {
                self.input(Input::Archive);
            }
            36 => {
                if let Some(prompt) = self.state.queue.get(which % 3).cloned() {
                    self.input(Input::Cancelled { prompt });
                }
            }
            37 => {
                if let Some(prompt) = self.state.queue.get(which % 3).cloned() {
                    self.input(Input::Moved {
                        prompt,
                        position: u32::try_from(which % 4).unwrap(),
                    });
                }
            }
            38..=40 => self.tick(i64::try_from(which % 100).unwrap() * 10_000),
            41 | 42 => self.restore(which),
            43 => self.full = !self.full,
            44 | 45 => self.give_place(),
            46 => self.input(Input::PlaceNeeded),
            47 => {
                self.input(Input::Suspend);
                if which.is_multiple_of(2) {
                    self.crash();
                }
            }
            48 => self.input(Input::Touched),
            49 => self.busy = !self.busy,
            // Nobody renewed the freeze.
            50 => self.current().into_iter().for_each(|sandbox| sandbox.still = false),
            _ => {}
        }
    }

    pub(super) fn tick(&mut self, millis: i64) {
        self.now += millis;
        self.input(Input::Tick);
        let now = Timestamp::from_millis(self.now);
        let clock = self.state.next_clock(&self.clocks);
        assert!(
            self.busy || clock.is_none_or(|at| at > now),
            "a clock strikes once: {:?}",
            self.state
        );
    }

    pub(super) fn restore(&mut self, which: usize) {
        let turn = self.turns.iter().nth(which % self.turns.len().max(1));
        let Some((turn, snapshot)) = turn.map(|(turn, snapshot)| (*turn, snapshot.clone())) else {
            return;
        };
        if self.state.rest != Rest::Archived && !matches!(self.state.machine, Machine::Held { .. })
        {
            self.input(Input::Restore { snapshot, turn });
        }
    }

    pub(super) fn calm_step(&mut self) -> bool {
        if self.state.waiting.is_some() {
            self.give_place();
            return true;
        }
        if !self.pending.is_empty() {
            self.carry_out(0, Luck::Good);
            return true;
        }
        if self.current().is_some_and(|sandbox| sandbox.linked && !sandbox.outbox.is_empty()) {
            self.deliver();
            return true;
        }
        self.end_turn(TurnOutcome::Completed);
        self.current().is_some_and(|sandbox| !sandbox.outbox.is_empty())
    }

    /// Nothing more goes wrong, and a person resumes what is held: twice, because what went wrong
    /// before may only be heard now.
    pub(super) fn settle(&mut self) {
        self.busy = false;
        for _ in 0..3 {
            if self.state.rest != Rest::Archived {
                self.input(Input::Resume);
            }
            while self.calm_step() {}
        }
        for (prompt, status) in &self.prompts {
            assert!(
                !matches!(status, PromptStatus::Queued | PromptStatus::Dispatched),
                "{prompt} ends: it is {status:?} in {:#?}",
                self.state
            );
        }
    }
}

pub(super) fn over_the_bridge(action: &Action) -> bool {
    matches!(
        action,
        Action::Boot { .. }
            | Action::Prepare
            | Action::Send { .. }
            | Action::StopTurn { .. }
            | Action::Answer { .. }
    )
}

fn moment(now: i64, clocks: &Clocks, busy: bool) -> Moment<'_> {
    Moment {
        now: Timestamp::from_millis(now),
        clocks,
        busy,
        room: Room::Full { limit: Limit::Closed, position: 0 },
        ticket: 0,
        sandbox: SandboxId::random(),
        turn: TurnId::random(),
        snapshot: SnapshotId::random(),
    }
}

/// A server of the last version reads the state, too: it passes over fields it does not know, but not
/// over variants.
fn assert_known_to_the_last_version(kept: &str) {
    let kept: serde_json::Value = serde_json::from_str(kept).unwrap();
    let variant = |value: &serde_json::Value| match value {
        serde_json::Value::String(name) => name.clone(),
        value => value.as_object().unwrap().keys().next().unwrap().clone(),
    };
    let machine = variant(&kept["machine"]);
    assert!(
        ["absent", "starting", "booting", "ready", "ending", "held"].contains(&&machine[..]),
        "{machine}"
    );
    if machine == "ready" {
        let work = variant(&kept["machine"]["ready"]["work"]);
        assert!(["idle", "turn", "saving", "unsaved"].contains(&&work[..]), "{work}");
    }
    let rest = variant(&kept["rest"]);
    assert!(["open", "paused", "failed", "archived"].contains(&&rest[..]), "{rest}");
}
