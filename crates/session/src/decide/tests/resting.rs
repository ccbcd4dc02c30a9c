//! The promises by example: machines that stand still, and sessions that wait in line.

use super::{
    examples::{ready, run},
    world::{Luck, World},
};
use crate::decide::*;

pub(super) fn frozen() -> World {
    let mut world = ready();
    world.tick(120_000);
    run(&mut world);
    assert_eq!(world.state.shown, Shown { state: SessionState::Idle, reason: "frozen".into() });
    assert!(world.current().unwrap().still);
    world
}

#[test]
fn an_idle_machine_stands_still_then_is_paused() {
    let mut world = frozen();
    world.tick(480_000);
    run(&mut world);
    assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "idle".into() });
}

#[test]
fn a_prompt_has_a_machine_that_stands_still_go_on_before_it_is_sent() {
    let mut world = frozen();
    world.prompt(false);
    assert!(matches!(world.pending[..], [Action::Thaw { .. }]), "{:?}", world.pending);
    run(&mut world);
    assert_eq!(world.runs.len(), 1);
}

#[test]
fn a_command_has_a_machine_that_stands_still_go_on_and_it_counts_as_used() {
    let mut world = frozen();
    world.input(Input::Touched);
    run(&mut world);
    assert_eq!(world.state.shown.reason, "ready");
    world.tick(119_000);
    assert!(world.pending.is_empty(), "it is idle since then: {:?}", world.pending);
    world.tick(1_000);
    assert!(matches!(world.pending[..], [Action::Freeze { .. }]));
}

#[test]
fn what_cannot_stand_still_is_left_alone_and_paused_in_time() {
    let mut world = ready();
    world.tick(120_000);
    world.carry_out(0, Luck::Bad);
    assert_eq!(world.state.shown.reason, "ready");
    world.tick(100_000);
    assert!(world.pending.is_empty());
    world.tick(400_000);
    assert!(matches!(world.pending[..], [Action::EndKept { .. }]));
}

#[test]
fn what_stood_still_when_the_server_died_does_so_still_under_the_next_and_takes_prompts() {
    let mut world = frozen();
    world.current().unwrap().still = false;
    world.crash();
    run(&mut world);
    assert_eq!(world.state.shown.reason, "frozen");
    assert!(world.current().unwrap().still);
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.runs.len(), 1);
}

#[test]
fn a_machine_whose_work_cannot_be_thawed_is_given_up_and_its_disk_kept() {
    let mut world = frozen();
    world.prompt(false);
    world.tick(90_000);
    assert!(matches!(world.pending[..], [Action::EndKept { kind: SnapshotKind::Recovered, .. }]));
    run(&mut world);
    assert_eq!(world.runs.len(), 1, "the prompt is another sandbox's");
}

#[test]
fn a_session_without_a_place_waits_in_line_and_starts_by_itself() {
    let mut world = ready();
    world.input(Input::Pause);
    run(&mut world);
    world.full = true;
    world.prompt(false);
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Queued, reason: "limit_sandboxes".into() }
    );
    assert!(world.pending.is_empty());
    let ticket = world.state.waiting.unwrap().ticket;
    world.crash();
    assert_eq!(world.state.waiting.unwrap().ticket, ticket, "it keeps its place in line");
    world.input(Input::PlaceGiven { ticket: ticket + 1 });
    assert!(world.pending.is_empty(), "that place is another's");
    world.give_place();
    run(&mut world);
    assert_eq!(world.runs.len(), 1);
}

#[test]
fn a_new_session_has_its_place_in_line_from_its_creation_on() {
    let mut world = World::new();
    let waiting = Waiting { ticket: 7, limit: Limit::Closed, position: 0 };
    world.begin(State { waiting: Some(waiting), ..State::new(None, false) });
    assert_eq!(world.state.shown, Shown { state: SessionState::Queued, reason: "created".into() });
    assert_eq!(world.state.position(), None);
    world.input(Input::PlaceMoved { ticket: 7, limit: Limit::Sandboxes, position: 2 });
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Queued, reason: "limit_sandboxes".into() }
    );
    assert_eq!(world.state.position(), Some(2));
    world.give_place();
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Idle);
}

#[test]
fn who_waits_in_line_can_be_stopped_and_asks_again_later() {
    let mut world = ready();
    world.input(Input::Pause);
    run(&mut world);
    world.full = true;
    world.prompt(false);
    let before = world.state.waiting.unwrap().ticket;
    world.input(Input::Stop);
    assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "stopped".into() });
    assert_eq!(world.state.waiting, None);
    world.input(Input::Resume);
    assert!(world.state.waiting.unwrap().ticket > before, "at the end of the line");
}

#[test]
fn an_idle_session_gives_up_its_place_and_one_in_use_does_not() {
    let mut world = ready();
    world.busy = true;
    world.input(Input::PlaceNeeded);
    assert_eq!(world.state.shown.state, SessionState::Idle);
    world.busy = false;
    world.input(Input::PlaceNeeded);
    world.full = true;
    // Too late for this machine; and who asked for the place gets it.
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.state.shown.reason, "limit_sandboxes");
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.input(Input::PlaceNeeded);
    assert_eq!(world.state.shown.state, SessionState::Running);
}

#[test]
fn an_adopted_session_rests_for_nobody_before_it_is_known_what_runs_in_it() {
    let mut world = ready();
    world.busy = true;
    world.crash();
    world.input(Input::PlaceNeeded);
    assert!(matches!(world.pending[..], [Action::Find { .. }]), "{:?}", world.pending);
    run(&mut world);
    world.input(Input::PlaceNeeded);
    world.tick(60 * 60 * 1000);
    assert_eq!(world.state.shown.state, SessionState::Idle, "running work is activity");
    world.busy = false;
    world.input(Input::PlaceNeeded);
    run(&mut world);
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Paused, reason: "place_needed".into() }
    );
}
