//! The promises of the decision, first by example, then against a world that crashes, loses
//! connections and fails at any moment.

use std::collections::{BTreeMap, BTreeSet};

use harvest_proto::bridge::PromptProgress;
use proptest::prelude::*;

use super::*;

/// Which answers of the world are good.
#[derive(Clone, Copy, PartialEq)]
enum Luck {
    Good,
    Bad,
}

#[derive(Default)]
struct Sandbox {
    epoch: u64,
    alive: bool,
    left: bool,
    linked: bool,
    booted: bool,
    seen: Vec<(PromptId, PromptProgress)>,
    asks: Option<String>,
    outbox: Vec<Input>,
    unsaved_turn: bool,
    worked: bool,
}

/// Everything outside the decision: a store, a provider, supervisors, people.
struct World {
    state: State,
    kept: String,
    clocks: Clocks,
    now: i64,
    prompts: BTreeMap<PromptId, PromptStatus>,
    order: Vec<PromptId>,
    sandboxes: BTreeMap<SandboxId, Sandbox>,
    pending: Vec<Action>,
    snapshots: BTreeSet<SnapshotId>,
    runs: BTreeMap<PromptId, u32>,
    newest: Option<SnapshotId>,
    requests: u32,
    unknown: bool,
}

impl World {
    fn new() -> Self {
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
        };
        world.crash();
        world
    }

    fn input(&mut self, input: Input) {
        let clocks = self.clocks.clone();
        let step = decide(self.state.clone(), input, &moment(self.now, &clocks));
        self.commit(step);
    }

    /// The server dies and comes back: only the store and the sandboxes are left.
    fn crash(&mut self) {
        self.pending.clear();
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
        let clocks = self.clocks.clone();
        let step = restart(state, queue, &moment(self.now, &clocks));
        self.commit(step);
    }

    fn commit(&mut self, step: Step) {
        self.state = step.state;
        self.kept = serde_json::to_string(&self.state).unwrap();
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
                Action::TurnBegun { .. }
                | Action::TurnOver { .. }
                | Action::SnapshotTaken { .. }
                | Action::SandboxOver { .. }
                | Action::Show { .. }
                | Action::Review => {}
                Action::Start { sandbox, epoch, from } => {
                    assert!(!self.unknown, "nothing starts while a save is unknown");
                    assert!(
                        self.sandboxes.values().all(|other| !other.left || !other.worked),
                        "work is kept before another sandbox starts"
                    );
                    assert_eq!(from, self.newest, "the newest state is what it starts from");
                    assert!(self.sandboxes.values().all(|other| other.epoch < epoch), "epochs rise");
                    self.pending.push(Action::Start { sandbox, epoch, from });
                }
                effect => {
                    // Whoever ends a sandbox stops speaking with it first.
                    if let Action::EndKept { sandbox, .. } | Action::End { sandbox } = &effect {
                        self.pending.retain(|action| !over_the_bridge(action));
                        if let Some(sandbox) = self.sandboxes.get_mut(sandbox) {
                            sandbox.linked = false;
                        }
                    }
                    self.pending.push(effect);
                }
            }
        }
    }

    fn current(&mut self) -> Option<&mut Sandbox> {
        let id = self.state.sandbox()?.clone();
        self.sandboxes.get_mut(&id).filter(|sandbox| sandbox.alive)
    }

    fn carry_out(&mut self, mut index: usize, luck: Luck) {
        if over_the_bridge(&self.pending[index]) {
            // One connection: what was said first is heard first.
            index = self.pending.iter().position(over_the_bridge).unwrap();
        }
        let action = self.pending.remove(index);
        let epoch = self.state.epoch;
        match action {
            Action::Start { sandbox, epoch, .. } => self.start(sandbox, epoch, luck),
            Action::Find { sandbox } => {
                // The answer is about the sandbox that was asked for, however late it comes.
                let epoch = self.sandboxes[&sandbox].epoch;
                let found = match self.sandboxes.get(&sandbox) {
                    Some(sandbox) if sandbox.alive => Input::FoundRunning { epoch },
                    Some(sandbox) if sandbox.left => Input::SandboxEnded { epoch, reason: "killed".into() },
                    _ => Input::FoundGone { epoch },
                };
                self.input(found);
            }
            Action::Connect { sandbox, epoch } => self.connect(&sandbox, epoch),
            Action::Boot { .. } => {
                if let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked && !sandbox.booted) {
                    sandbox.booted = true;
                    let epoch = sandbox.epoch;
                    let end = match luck {
                        Luck::Good => Input::BootReady { epoch },
                        Luck::Bad => Input::BootFailed { epoch, detail: "setup.sh".into() },
                    };
                    sandbox.outbox.push(end);
                }
            }
            Action::Prepare => {
                if self.current().is_some_and(|sandbox| sandbox.linked) {
                    self.input(Input::Prepared { epoch });
                }
            }
            Action::Send { prompt, .. } => self.send(prompt, luck),
            Action::StopTurn { .. } => {
                if luck == Luck::Good {
                    self.end_turn(TurnOutcome::Stopped);
                }
            }
            Action::Answer { request, .. } => {
                if let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked)
                    && sandbox.asks.as_ref() == Some(&request)
                {
                    sandbox.asks = None;
                    sandbox.outbox.push(Input::RequestClosed { request, answered: true });
                }
            }
            Action::Capture { sandbox, snapshot } => self.capture(&sandbox, snapshot, luck),
            Action::EndKept { sandbox, snapshot, .. } => self.end_kept(&sandbox, snapshot, luck),
            Action::End { sandbox } => {
                if let Some(sandbox) = self.sandboxes.get_mut(&sandbox) {
                    assert!(!sandbox.worked, "work is never thrown away");
                    (sandbox.alive, sandbox.left) = (false, false);
                }
                self.input(Input::Discarded { epoch });
            }
            other => unreachable!("{other:?} is kept, not carried out"),
        }
    }

    fn start(&mut self, id: SandboxId, epoch: u64, luck: Luck) {
        if luck == Luck::Bad {
            return self.input(Input::StartFailed { epoch, detail: "no".into(), permanent: false });
        }
        let sandbox = Sandbox { epoch, alive: true, left: true, ..Sandbox::default() };
        self.sandboxes.insert(id, sandbox);
        self.input(Input::Started { epoch, start: BootStart::Fresh });
    }

    fn connect(&mut self, id: &SandboxId, epoch: u64) {
        let Some(sandbox) = self.sandboxes.get_mut(id) else { return };
        if !sandbox.alive {
            return self.input(Input::SandboxEnded { epoch, reason: "killed".into() });
        }
        sandbox.linked = true;
        let status = Status { prompts: sandbox.seen.clone(), ..Status::default() };
        self.input(Input::LinkUp { epoch, status });
    }

    fn send(&mut self, prompt: PromptId, luck: Luck) {
        let dispatched = self.prompts[&prompt] == PromptStatus::Dispatched;
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked) else { return };
        if luck == Luck::Bad {
            // The connection broke before the supervisor read it.
            return self.drop_link();
        }
        if !sandbox.seen.iter().any(|(seen, _)| *seen == prompt) {
            assert!(dispatched, "only a dispatched prompt is sent");
            assert!(
                sandbox.seen.iter().all(|(_, how)| *how == PromptProgress::Ended),
                "a prompt is never sent while another runs"
            );
            assert!(!sandbox.unsaved_turn, "the last turn is kept before the next prompt is sent");
            sandbox.worked = true;
            sandbox.seen.push((prompt.clone(), PromptProgress::Running));
            *self.runs.entry(prompt.clone()).or_default() += 1;
            assert_eq!(self.runs[&prompt], 1, "a prompt never runs twice");
        }
        self.input(Input::Accepted { prompt });
    }

    fn end_turn(&mut self, outcome: TurnOutcome) {
        let Some(sandbox) = self.current() else { return };
        let Some((prompt, how)) = sandbox.seen.last_mut().filter(|(_, how)| *how == PromptProgress::Running)
        else {
            return;
        };
        *how = PromptProgress::Ended;
        let prompt = prompt.clone();
        if let Some(request) = sandbox.asks.take() {
            sandbox.outbox.push(Input::RequestClosed { request, answered: false });
        }
        sandbox.outbox.push(Input::TurnEnded { prompt, outcome });
        sandbox.unsaved_turn = true;
    }

    fn capture(&mut self, id: &SandboxId, snapshot: SnapshotId, luck: Luck) {
        match self.sandboxes.get_mut(id) {
            Some(sandbox) if sandbox.alive && luck == Luck::Good => {
                sandbox.unsaved_turn = false;
                self.snapshots.insert(snapshot.clone());
                self.newest = Some(snapshot.clone());
                self.input(Input::Saved { snapshot, millis: 1 });
            }
            _ => self.input(Input::SaveFailed { snapshot, detail: "disk full".into() }),
        }
    }

    fn end_kept(&mut self, id: &SandboxId, snapshot: SnapshotId, luck: Luck) {
        let sandbox = self.sandboxes.get_mut(id).unwrap();
        sandbox.alive = false;
        if luck == Luck::Bad {
            self.unknown = true;
            return self.input(Input::KeepFailed { snapshot, detail: "timeout".into(), gone: false });
        }
        assert!(sandbox.left || self.snapshots.contains(&snapshot), "a disk is kept under one id");
        (sandbox.left, sandbox.worked) = (false, false);
        self.unknown = false;
        self.snapshots.insert(snapshot.clone());
        self.newest = Some(snapshot.clone());
        self.input(Input::Kept { snapshot, millis: 1 });
    }

    fn drop_link(&mut self) {
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked) else { return };
        sandbox.linked = false;
        let epoch = sandbox.epoch;
        self.pending.retain(|action| !over_the_bridge(action));
        let id = self.state.sandbox().cloned().unwrap();
        self.input(Input::LinkLost { epoch });
        self.pending.push(Action::Connect { sandbox: id, epoch });
    }

    fn kill(&mut self) {
        let Some(sandbox) = self.current() else { return };
        (sandbox.alive, sandbox.linked) = (false, false);
        let epoch = sandbox.epoch;
        self.input(Input::SandboxEnded { epoch, reason: "killed".into() });
    }

    fn deliver(&mut self) {
        let Some(sandbox) = self.current().filter(|sandbox| sandbox.linked && !sandbox.outbox.is_empty())
        else {
            return;
        };
        let event = sandbox.outbox.remove(0);
        self.input(event);
    }

    fn prompt(&mut self, now: bool) {
        if self.state.rest == Rest::Archived {
            return;
        }
        let prompt = PromptId::random();
        self.prompts.insert(prompt.clone(), PromptStatus::Queued);
        self.order.push(prompt.clone());
        self.input(Input::Queued { prompt, now });
    }

    fn ask(&mut self) {
        self.requests += 1;
        let request = format!("r{}", self.requests);
        if let Some(sandbox) = self.current().filter(|sandbox| sandbox.asks.is_none())
            && sandbox.seen.last().is_some_and(|(_, how)| *how == PromptProgress::Running)
        {
            sandbox.asks = Some(request.clone());
            sandbox.outbox.push(Input::RequestOpened { request });
        }
    }

    fn happen(&mut self, what: u8, which: usize) {
        let luck = if which.is_multiple_of(7) { Luck::Bad } else { Luck::Good };
        match what % 40 {
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
            35 if which.is_multiple_of(5) && !matches!(self.state.machine, Machine::Held { .. }) => {
                self.input(Input::Archive);
            }
            36 => {
                if let Some(prompt) = self.state.queue.get(which % 3).cloned() {
                    self.input(Input::Cancelled { prompt });
                }
            }
            37 => {
                if let Some(prompt) = self.state.queue.get(which % 3).cloned() {
                    self.input(Input::Moved { prompt, position: u32::try_from(which % 4).unwrap() });
                }
            }
            38 | 39 => {
                self.now += i64::try_from(which % 100).unwrap() * 10_000;
                self.input(Input::Tick);
            }
            _ => {}
        }
    }

    fn calm_step(&mut self) -> bool {
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
    fn settle(&mut self) {
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

fn over_the_bridge(action: &Action) -> bool {
    matches!(
        action,
        Action::Boot { .. }
            | Action::Prepare
            | Action::Send { .. }
            | Action::StopTurn { .. }
            | Action::Answer { .. }
    )
}

fn moment(now: i64, clocks: &Clocks) -> Moment<'_> {
    Moment {
        now: Timestamp::from_millis(now),
        clocks,
        busy: false,
        sandbox: SandboxId::random(),
        turn: TurnId::random(),
        snapshot: SnapshotId::random(),
    }
}

/// Lets everything that is under way happen, without a mishap.
fn run(world: &mut World) {
    for _ in 0..200 {
        if !world.pending.is_empty() {
            world.carry_out(0, Luck::Good);
        } else {
            world.deliver();
        }
    }
}

fn ready() -> World {
    let mut world = World::new();
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Idle);
    world
}

#[test]
fn a_second_prompt_waits_for_the_first_turn_to_end_and_be_kept() {
    let mut world = ready();
    world.prompt(false);
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.runs.len(), 1);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    assert!(matches!(world.pending[..], [Action::Capture { .. }]));
    run(&mut world);
    assert_eq!(world.runs.len(), 2);
}

#[test]
fn a_prompt_that_never_arrived_is_sent_again_with_its_id() {
    let mut world = ready();
    world.prompt(false);
    let [Action::Send { prompt, .. }] = &world.pending[..] else { panic!("{:?}", world.pending) };
    let prompt = prompt.clone();
    world.crash();
    run(&mut world);
    assert_eq!(world.runs.keys().collect::<Vec<_>>(), [&prompt]);
}

#[test]
fn a_dead_sandbox_interrupts_its_prompt_once_and_the_next_starts_from_what_it_left() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.kill();
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Paused);
    assert_eq!(world.state.shown.reason, "sandbox_lost");
    assert_eq!(world.prompts.values().collect::<Vec<_>>(), [&PromptStatus::Interrupted]);
    world.prompt(false);
    assert!(
        matches!(&world.pending[..], [Action::Start { from: Some(from), .. }] if world.newest.as_ref() == Some(from))
    );
}

#[test]
fn a_save_whose_outcome_is_unknown_holds_the_session_until_somebody_resumes_it() {
    let mut world = ready();
    world.input(Input::Pause);
    world.carry_out(0, Luck::Bad);
    assert_eq!(world.state.shown.reason, "save_unknown");
    world.prompt(false);
    assert!(world.pending.is_empty());
    world.input(Input::Resume);
    run(&mut world);
    assert_eq!(world.runs.len(), 1);
}

#[test]
fn a_failed_snapshot_holds_the_next_prompt_until_it_is_taken() {
    let mut world = ready();
    world.prompt(false);
    world.prompt(false);
    run(&mut world);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    world.carry_out(0, Luck::Bad);
    assert_eq!(world.state.shown.reason, "save_unknown");
    assert_eq!(world.runs.len(), 1);
    world.input(Input::Resume);
    run(&mut world);
    assert_eq!(world.runs.len(), 2);
}

#[test]
fn a_stop_that_is_not_confirmed_kills_the_sandbox_and_keeps_its_disk() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.input(Input::Stop);
    world.carry_out(0, Luck::Bad);
    world.now += 61_000;
    world.input(Input::Tick);
    assert!(matches!(world.pending[..], [Action::EndKept { kind: SnapshotKind::Recovered, .. }]));
    assert_eq!(world.prompts.values().collect::<Vec<_>>(), [&PromptStatus::Stopped]);
}

#[test]
fn a_prompt_stopped_before_it_was_seen_never_runs() {
    let mut world = ready();
    world.prompt(false);
    world.input(Input::Stop);
    world.crash();
    run(&mut world);
    assert!(world.runs.is_empty());
    assert_eq!(world.prompts.values().collect::<Vec<_>>(), [&PromptStatus::Stopped]);
}

#[test]
fn a_prompt_sent_while_the_agent_asks_is_the_answer() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.ask();
    world.deliver();
    assert_eq!(world.state.shown.state, SessionState::NeedsInput);
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Running);
    assert_eq!(world.runs.len(), 1, "the answer is not a turn");
    assert_eq!(world.prompts.values().filter(|s| **s == PromptStatus::Completed).count(), 1);
}

#[test]
fn an_idle_session_is_paused_and_a_prompt_wakes_it() {
    let mut world = ready();
    world.now += 600_000;
    world.input(Input::Tick);
    run(&mut world);
    assert_eq!((world.state.shown.state, world.state.shown.reason.as_str()), (SessionState::Paused, "idle"));
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Running);
    assert_eq!(world.state.epoch, 2);
}

#[test]
fn three_failed_starts_wait_for_a_person() {
    let mut world = World::new();
    world.prompt(false);
    for _ in 0..3 {
        world.carry_out(0, Luck::Bad);
        world.carry_out(0, Luck::Good);
    }
    assert_eq!(world.state.shown.reason, "start_failed");
    assert!(world.pending.is_empty());
    world.input(Input::Resume);
    run(&mut world);
    assert_eq!(world.runs.len(), 1);
}

#[test]
fn a_turn_known_to_have_ended_goes_on_until_its_own_event_says_how() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.drop_link();
    world.end_turn(TurnOutcome::Failed);
    world.carry_out(0, Luck::Good);
    let prompt = world.order[0].clone();
    assert!(matches!(world.current().unwrap().seen[..], [(_, PromptProgress::Ended)]));
    assert!(world.state.turn().is_some(), "nobody knows the outcome yet: {:?}", world.state.machine);
    assert!(world.pending.is_empty(), "nothing is kept before the event: {:?}", world.pending);
    world.deliver();
    assert_eq!(world.prompts[&prompt], PromptStatus::Failed);
    assert!(matches!(world.pending[..], [Action::Capture { .. }]));
}

fn boot_badly(world: &mut World, takes_millis: i64) {
    while !matches!(world.pending[..], [Action::Boot { .. }]) {
        world.carry_out(0, Luck::Good);
    }
    world.now += takes_millis;
    world.carry_out(0, Luck::Bad);
    world.deliver();
    while matches!(world.state.machine, Machine::Ending { .. }) {
        world.carry_out(0, Luck::Good);
    }
}

#[test]
fn a_boot_that_fails_fast_is_tried_three_times() {
    let mut world = World::new();
    for _ in 0..2 {
        boot_badly(&mut world, 1000);
        assert!(matches!(world.state.machine, Machine::Starting { .. }), "{:?}", world.state);
    }
    boot_badly(&mut world, 1000);
    assert_eq!(world.state.shown, Shown { state: SessionState::Failed, reason: "boot_failed".into() });
    world.input(Input::Resume);
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Idle);
}

#[test]
fn a_boot_that_fails_slowly_is_not_tried_for_ever() {
    let mut world = World::new();
    let slow = world.clocks.breaker / 3;
    boot_badly(&mut world, i64::try_from(slow.as_millis()).unwrap());
    assert_eq!(world.state.shown, Shown { state: SessionState::Failed, reason: "boot_failed".into() });
}

#[test]
fn words_about_an_older_sandbox_are_not_heard() {
    let mut world = ready();
    world.input(Input::Pause);
    run(&mut world);
    world.input(Input::Resume);
    run(&mut world);
    let before = world.state.clone();
    world.input(Input::SandboxEnded { epoch: 1, reason: "killed".into() });
    world.input(Input::LinkLost { epoch: 1 });
    world.input(Input::BootFailed { epoch: 1, detail: "late".into() });
    assert_eq!(world.state, before);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_every_prompt_ends_once_and_no_work_is_lost(
        story in proptest::collection::vec((any::<u8>(), any::<u16>()), 0..120),
    ) {
        let mut world = World::new();
        for (what, which) in story {
            world.happen(what, usize::from(which));
        }
        world.settle();
    }
}
