//! Examples: hosts that do not answer.

use super::{
    examples::{ready, run},
    simulation::Simulation,
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
