//! Examples: hosts that do not answer, and full disks.

use super::{
    examples::{ready, run},
    simulation::{EffectOutcome, Simulation},
};
use crate::decide::*;

#[test]
fn turn_ends_after_processes_of_terminated_sandbox() {
    let ended = |sim: &Simulation| sim.prompts.values().all(|at| *at == PromptStatus::Stopped);
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.input(Input::Terminate);
    assert!(!ended(&sim));
    // The host does not answer: whether the processes run is unknown.
    let snapshot = sim.state.saving().unwrap().clone();
    sim.pending.clear();
    sim.input(Input::StopSaveFailed { snapshot, detail: "timeout".into(), found: None });
    assert!(matches!(sim.state.sandbox, SandboxState::SaveUnknown { .. }) && !ended(&sim));
    sim.crash();
    sim.input(Input::Resume);
    run(&mut sim);
    assert!(ended(&sim));
}

#[test]
fn only_the_end_of_work_uses_the_reserve() {
    let mut sim = ready();
    assert!(!sim.state.is_ending());
    sim.prompt(false);
    run(&mut sim);
    let epoch = sim.state.epoch;
    sim.input(Input::LinkLost { epoch });
    assert!(!sim.state.is_ending());
    for end in [Input::Stop, Input::Pause, Input::Terminate, Input::Archive] {
        assert!(end.ends_work());
        sim.input(end);
        assert!(sim.state.is_ending());
    }
}

#[test]
fn full_disk_is_retried_after_breaker_window() {
    let window = |sim: &Simulation| i64::try_from(sim.timeouts.breaker.as_millis()).unwrap();
    let mut sim = Simulation::new();
    let (epoch, cause) = (sim.state.epoch, StartFailure::NoSpace);
    sim.pending.clear();
    sim.input(Input::StartFailed { epoch, detail: "disk full".into(), cause });
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Failed);
    sim.crash();
    let wait = window(&sim);
    sim.tick(wait);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle, "room is back");

    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    sim.execute(0, EffectOutcome::Failure);
    assert_eq!(sim.state.public.reason, StateReason::SaveUnknown);
    let wait = window(&sim);
    sim.tick(wait);
    run(&mut sim);
    assert_eq!((sim.state.public.state, sim.turns.len()), (SessionState::Idle, 1));
}

#[test]
fn failed_check_is_told_to_the_next_prompt() {
    let note = || Some("it failed".to_owned());
    let told = |sim: &Simulation| sim.state.turn().and_then(|turn| turn.failed_checks.clone());
    let mut sim = ready();
    sim.input(Input::Reviewed { failed_checks: note() });
    sim.crash();
    run(&mut sim);
    sim.prompt(false);
    assert_eq!((told(&sim), &sim.state.failed_checks), (note(), &None));
    // The supervisor does not have the prompt: it is sent again with the note.
    sim.crash();
    assert_eq!(told(&sim), note());
    run(&mut sim);
    assert_eq!(told(&sim), None, "the prompt is accepted");
}

#[test]
fn retry_ends_with_what_it_was_for() {
    let fail = |sim: &mut Simulation, cause| {
        let epoch = sim.state.epoch;
        sim.pending.clear();
        sim.input(Input::StartFailed { epoch, detail: "failed".into(), cause });
        run(sim);
    };
    let mut sim = Simulation::new();
    let window = i64::try_from(sim.timeouts.breaker.as_millis()).unwrap();
    fail(&mut sim, StartFailure::NoSpace);
    assert!(sim.state.retry_at.is_some());
    sim.input(Input::Pause);
    assert_eq!(sim.state.retry_at, None, "the start is no longer wanted");
    sim.input(Input::Resume);
    fail(&mut sim, StartFailure::NoSpace);
    sim.prompt(false);
    fail(&mut sim, StartFailure::Permanent);
    sim.tick(window);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Failed, "no retry can help");
}

#[test]
fn paused_session_still_retries_its_save() {
    let mut sim = ready();
    let window = i64::try_from(sim.timeouts.breaker.as_millis()).unwrap();
    sim.input(Input::Pause);
    let snapshot = sim.state.saving().unwrap().clone();
    sim.pending.clear();
    sim.input(Input::StopSaveFailed { snapshot, detail: "timeout".into(), found: None });
    sim.input(Input::Pause);
    sim.tick(window);
    run(&mut sim);
    assert_eq!(sim.state.sandbox, SandboxState::Absent);
    assert_eq!((sim.state.public.state, sim.state.retry_at), (SessionState::Paused, None));
}
