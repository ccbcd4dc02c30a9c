//! Examples: restores.

use super::{
    examples::{ready, run},
    simulation::{EffectOutcome, Simulation},
};
use crate::decide::*;

fn two_turns() -> Simulation {
    let mut sim = ready();
    for _ in 0..2 {
        sim.prompt(false);
        run(&mut sim);
        sim.end_turn(TurnOutcome::Completed);
        run(&mut sim);
    }
    assert_eq!(sim.turns.len(), 2);
    sim
}

#[test]
fn restore_saves_current_state_and_numbers_continue() {
    let mut sim = two_turns();
    let first = sim.turns[&1].clone();
    sim.input(Input::Restore { snapshot: Some(first.clone()), turn: Some(1) });
    assert!(matches!(sim.pending[..], [Action::StopAndSave { kind: SnapshotKind::Pause, .. }]));
    sim.crash();
    run(&mut sim);
    assert_eq!(sim.newest, Some(first));
    assert_eq!(
        sim.state.public.state,
        SessionState::Idle,
        "a session with a sandbox gets a new one"
    );
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.state.turn().unwrap().number, 3);
    assert_eq!(sim.turns.len(), 2, "the later turn can still be restored");
}

#[test]
fn restored_start_has_neither_snapshot_nor_conversation() {
    let mut sim = two_turns();
    sim.input(Input::Restore { snapshot: None, turn: Some(0) });
    run(&mut sim);
    assert_eq!((sim.state.latest_snapshot.as_ref(), sim.state.has_conversation), (None, false));
    assert_eq!(sim.state.public.state, SessionState::Idle);
    assert_eq!(sim.turns.len(), 2, "the turns can still be restored");
}

#[test]
fn restore_stops_and_saves_the_running_turn() {
    let mut sim = two_turns();
    sim.prompt(false);
    run(&mut sim);
    let (first, waiting) = (sim.turns[&1].clone(), sim.order.len());
    sim.input(Input::Restore { snapshot: Some(first.clone()), turn: Some(1) });
    assert!(matches!(sim.pending[..], [Action::StopTurn { .. }]));
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.prompts[&sim.order[waiting - 1]], PromptStatus::Stopped);
    assert!(sim.turns.contains_key(&3), "the stopped turn has its own snapshot");
    assert_eq!(sim.newest, Some(first), "the queued prompt starts from the restored snapshot");
    assert_eq!(sim.state.turn().unwrap().number, 4);
}

#[test]
fn paused_session_stays_paused_after_restore() {
    let mut sim = two_turns();
    sim.input(Input::Pause);
    run(&mut sim);
    let first = sim.turns[&1].clone();
    sim.input(Input::Restore { snapshot: Some(first.clone()), turn: Some(1) });
    assert!(sim.pending.is_empty());
    assert_eq!(sim.state.latest_snapshot, Some(first));
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Paused, reason: StateReason::Restored }
    );
}

#[test]
fn restore_continues_after_a_failed_save() {
    let mut sim = two_turns();
    let first = sim.turns[&1].clone();
    sim.input(Input::Restore { snapshot: Some(first.clone()), turn: Some(1) });
    sim.execute(0, EffectOutcome::Failure);
    assert_eq!(sim.state.public.reason, StateReason::SaveUnknown);
    sim.input(Input::Resume);
    run(&mut sim);
    assert_eq!((sim.newest.clone(), sim.state.public.state), (Some(first), SessionState::Idle));
}
