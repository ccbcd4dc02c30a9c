//! Examples: frozen sandboxes, and sessions that wait for a slot.

use super::{
    examples::{ready, run},
    simulation::{EffectOutcome, Simulation},
};
use crate::decide::*;

pub(super) fn frozen() -> Simulation {
    let mut sim = ready();
    sim.tick(120_000);
    run(&mut sim);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Idle, reason: StateReason::Frozen }
    );
    assert!(sim.current().unwrap().frozen);
    sim
}

#[test]
fn idle_sandbox_is_frozen_then_paused() {
    let mut sim = frozen();
    sim.tick(480_000);
    run(&mut sim);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Paused, reason: StateReason::Idle }
    );
}

#[test]
fn prompt_thaws_sandbox_before_it_is_sent() {
    let mut sim = frozen();
    sim.prompt(false);
    assert!(matches!(sim.pending[..], [Action::Thaw { .. }]), "{:?}", sim.pending);
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1);
}

#[test]
fn command_thaws_sandbox_and_resets_idle_time() {
    let mut sim = frozen();
    sim.input(Input::Touched);
    run(&mut sim);
    assert_eq!(sim.state.public.reason, StateReason::Ready);
    sim.tick(119_000);
    assert!(sim.pending.is_empty(), "the idle time starts anew: {:?}", sim.pending);
    sim.tick(1_000);
    assert!(matches!(sim.pending[..], [Action::Freeze { .. }]));
}

#[test]
fn failed_freeze_is_not_retried_before_pause() {
    let mut sim = ready();
    sim.tick(120_000);
    sim.execute(0, EffectOutcome::Failure);
    assert_eq!(sim.state.public.reason, StateReason::Ready);
    sim.tick(100_000);
    assert!(sim.pending.is_empty());
    sim.tick(400_000);
    assert!(matches!(sim.pending[..], [Action::StopAndSave { .. }]));
}

#[test]
fn restart_freezes_frozen_sandbox_again() {
    let mut sim = frozen();
    sim.current().unwrap().frozen = false;
    sim.crash();
    run(&mut sim);
    assert_eq!(sim.state.public.reason, StateReason::Frozen);
    assert!(sim.current().unwrap().frozen);
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1);
}

#[test]
fn sandbox_that_cannot_thaw_is_replaced() {
    let mut sim = frozen();
    sim.prompt(false);
    sim.tick(90_000);
    assert!(matches!(sim.pending[..], [Action::StopAndSave { kind: SnapshotKind::Recovered, .. }]));
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1, "the prompt runs in another sandbox");
}

#[test]
fn session_without_slot_queues_then_starts() {
    let mut sim = ready();
    sim.input(Input::Pause);
    run(&mut sim);
    sim.full = true;
    sim.prompt(false);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Queued, reason: StateReason::LimitSandboxes }
    );
    assert!(sim.pending.is_empty());
    let sequence = sim.state.waiting.unwrap().sequence;
    sim.crash();
    assert_eq!(sim.state.waiting.unwrap().sequence, sequence, "a restart keeps its queue entry");
    sim.input(Input::SlotGranted { sequence: sequence + 1 });
    assert!(sim.pending.is_empty(), "a grant for another entry is ignored");
    sim.grant_slot();
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1);
}

#[test]
fn new_session_is_queued_from_its_creation() {
    let mut sim = Simulation::new();
    let waiting = Waiting { sequence: 7, limit: Limit::Closed, position: 0 };
    sim.begin(State { waiting: Some(waiting), ..State::new(None, false) });
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Queued, reason: StateReason::Created }
    );
    assert_eq!(sim.state.position(), None);
    sim.input(Input::SlotQueued { sequence: 7, limit: Limit::Sandboxes(8), position: 2 });
    let described = Limit::Sandboxes(8).describe();
    assert_eq!(described, "8 of 8 sandboxes in use");
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Queued, reason: StateReason::LimitSandboxes }
    );
    assert_eq!(sim.state.position(), Some(2));
    sim.grant_slot();
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle);
}

#[test]
fn stopped_session_leaves_the_slot_queue() {
    let mut sim = ready();
    sim.input(Input::Pause);
    run(&mut sim);
    sim.full = true;
    sim.prompt(false);
    let before = sim.state.waiting.unwrap().sequence;
    sim.input(Input::Stop);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Paused, reason: StateReason::Stopped }
    );
    assert_eq!(sim.state.waiting, None);
    sim.input(Input::Resume);
    assert!(sim.state.waiting.unwrap().sequence > before, "at the end of the queue");
}

#[test]
fn only_idle_sessions_give_up_their_slot() {
    let mut sim = ready();
    sim.busy = true;
    sim.input(Input::SlotReleaseRequested);
    assert_eq!(sim.state.public.state, SessionState::Idle);
    sim.busy = false;
    sim.input(Input::SlotReleaseRequested);
    sim.full = true;
    // Too late for this sandbox, and the slot goes to the session that requested it.
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.state.public.reason, StateReason::LimitSandboxes);
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.input(Input::SlotReleaseRequested);
    assert_eq!(sim.state.public.state, SessionState::Running);
}

#[test]
fn adopted_session_is_not_idle_before_reconnect() {
    let mut sim = ready();
    sim.busy = true;
    sim.crash();
    sim.input(Input::SlotReleaseRequested);
    assert!(matches!(sim.pending[..], [Action::Find { .. }]), "{:?}", sim.pending);
    run(&mut sim);
    sim.input(Input::SlotReleaseRequested);
    sim.tick(60 * 60 * 1000);
    assert_eq!(sim.state.public.state, SessionState::Idle, "a running command is activity");
    sim.busy = false;
    sim.input(Input::SlotReleaseRequested);
    run(&mut sim);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Paused, reason: StateReason::SlotNeeded }
    );
}
