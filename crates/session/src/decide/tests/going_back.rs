//! The promises by example: restores.

use super::{
    examples::{ready, run},
    world::{Luck, World},
};
use crate::decide::*;

fn two_turns() -> World {
    let mut world = ready();
    for _ in 0..2 {
        world.prompt(false);
        run(&mut world);
        world.end_turn(TurnOutcome::Completed);
        run(&mut world);
    }
    assert_eq!(world.turns.len(), 2);
    world
}

#[test]
fn a_restore_keeps_the_present_state_and_goes_on_from_the_turn_with_the_next_number() {
    let mut world = two_turns();
    let first = world.turns[&1].clone();
    world.input(Input::Restore { snapshot: first.clone(), turn: 1 });
    assert!(matches!(world.pending[..], [Action::EndKept { kind: SnapshotKind::Pause, .. }]));
    world.crash();
    run(&mut world);
    assert_eq!(world.newest, Some(first));
    assert_eq!(world.state.shown.state, SessionState::Idle, "what had a machine has one again");
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.state.turn().unwrap().number, 3);
    assert_eq!(world.turns.len(), 2, "the later turn can be gone back to, too");
}

#[test]
fn a_restore_stops_the_turn_first_and_keeps_what_it_did() {
    let mut world = two_turns();
    world.prompt(false);
    run(&mut world);
    let (first, waiting) = (world.turns[&1].clone(), world.order.len());
    world.input(Input::Restore { snapshot: first.clone(), turn: 1 });
    assert!(matches!(world.pending[..], [Action::StopTurn { .. }]));
    world.prompt(false);
    run(&mut world);
    assert_eq!(world.prompts[&world.order[waiting - 1]], PromptStatus::Stopped);
    assert!(world.turns.contains_key(&3), "the stopped turn has a snapshot of its own");
    assert_eq!(world.newest, Some(first), "and the prompt that waited begins at the restored one");
    assert_eq!(world.state.turn().unwrap().number, 4);
}

#[test]
fn a_paused_session_is_restored_where_it_lies() {
    let mut world = two_turns();
    world.input(Input::Pause);
    run(&mut world);
    let first = world.turns[&1].clone();
    world.input(Input::Restore { snapshot: first.clone(), turn: 1 });
    assert!(world.pending.is_empty());
    assert_eq!(world.state.disk, Some(first));
    assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "restored".into() });
}

#[test]
fn a_restore_survives_a_save_that_went_wrong() {
    let mut world = two_turns();
    let first = world.turns[&1].clone();
    world.input(Input::Restore { snapshot: first.clone(), turn: 1 });
    world.carry_out(0, Luck::Bad);
    assert_eq!(world.state.shown.reason, "save_unknown");
    world.input(Input::Resume);
    run(&mut world);
    assert_eq!((world.newest.clone(), world.state.shown.state), (Some(first), SessionState::Idle));
}
