//! Examples: prompts, turns, saves, starts and stops.

use harvest_proto::bridge::PromptProgress;

use super::{
    freeze_and_slots::frozen,
    simulation::{EffectOutcome, Simulation},
};
use crate::decide::*;

/// Executes everything pending, successfully.
pub(super) fn run(sim: &mut Simulation) {
    for _ in 0..200 {
        if !sim.pending.is_empty() {
            sim.execute(0, EffectOutcome::Success);
        } else {
            sim.deliver();
        }
    }
}

pub(super) fn ready() -> Simulation {
    let mut sim = Simulation::new();
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle);
    sim
}

#[test]
fn second_prompt_waits_until_first_turn_is_saved() {
    let mut sim = ready();
    sim.prompt(false);
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    assert!(matches!(sim.pending[..], [Action::Capture { .. }]));
    run(&mut sim);
    assert_eq!(sim.runs.len(), 2);
}

#[test]
fn undelivered_prompt_is_resent_with_same_id() {
    let mut sim = ready();
    sim.prompt(false);
    let [Action::SendPrompt { prompt, .. }] = &sim.pending[..] else { panic!("{:?}", sim.pending) };
    let prompt = prompt.clone();
    sim.crash();
    run(&mut sim);
    assert_eq!(sim.runs.keys().collect::<Vec<_>>(), [&prompt]);
}

#[test]
fn dead_sandbox_interrupts_turn_and_disk_is_recovered() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.kill();
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Paused);
    assert_eq!(sim.state.public.reason, StateReason::SandboxLost);
    assert_eq!(sim.prompts.values().collect::<Vec<_>>(), [&PromptStatus::Interrupted]);
    sim.prompt(false);
    let [Action::Start { from, .. }] = &sim.pending[..] else { panic!("{:?}", sim.pending) };
    assert_eq!((from, from.is_some()), (&sim.newest, true));
}

#[test]
fn unknown_save_blocks_session_until_resume() {
    let mut sim = ready();
    sim.input(Input::Pause);
    sim.execute(0, EffectOutcome::Failure);
    assert_eq!(sim.state.public.reason, StateReason::SaveUnknown);
    sim.prompt(false);
    assert!(sim.pending.is_empty());
    sim.input(Input::Resume);
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1);
}

#[test]
fn capture_after_restart_waits_for_the_bridge() {
    let mut sim = ready();
    sim.prompt(false);
    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    let [Action::Capture { snapshot, .. }] = &sim.pending[..] else { panic!("{:?}", sim.pending) };
    let first = snapshot.clone();
    for _ in 0..2 {
        sim.crash();
        sim.execute(0, EffectOutcome::Success);
        assert!(matches!(sim.pending[..], [Action::Connect { .. }, ..]), "{:?}", sim.pending);
        let captures = |action: &Action| matches!(action, Action::Capture { .. });
        assert!(!sim.pending.iter().any(captures), "the bridge is not up yet: {:?}", sim.pending);
        assert_eq!(sim.runs.len(), 1);
    }
    run(&mut sim);
    assert_eq!(sim.turns[&1], first, "under the same id");
    assert_eq!(sim.runs.len(), 2, "and the next prompt runs");
}

#[test]
fn unreachable_sandbox_is_saved_with_unsaved_turn() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    sim.crash();
    sim.execute(0, EffectOutcome::Success);
    sim.pending.clear();
    sim.tick(90_000);
    let stored = |action: &Action| {
        matches!(action, Action::StopAndSave { kind: SnapshotKind::Recovered, .. })
    };
    assert!(sim.pending.iter().any(stored), "{:?}", sim.pending);
    run(&mut sim);
    assert_eq!(sim.turns.len(), 1);
}

#[test]
fn failed_snapshot_blocks_the_next_prompt() {
    let mut sim = ready();
    sim.prompt(false);
    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    sim.execute(0, EffectOutcome::Failure);
    assert_eq!(sim.state.public.reason, StateReason::SaveUnknown);
    assert_eq!(sim.runs.len(), 1);
    sim.input(Input::Resume);
    run(&mut sim);
    assert_eq!(sim.runs.len(), 2);
}

#[test]
fn unconfirmed_stop_kills_sandbox_and_saves_disk() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.input(Input::Stop);
    sim.execute(0, EffectOutcome::Failure);
    sim.now += 61_000;
    sim.input(Input::Tick);
    assert!(matches!(sim.pending[..], [Action::StopAndSave { kind: SnapshotKind::Recovered, .. }]));
    run(&mut sim);
    assert_eq!(sim.prompts.values().collect::<Vec<_>>(), [&PromptStatus::Stopped]);
}

#[test]
fn prompt_stopped_before_delivery_never_runs() {
    let mut sim = ready();
    sim.prompt(false);
    sim.input(Input::Stop);
    sim.crash();
    run(&mut sim);
    assert!(sim.runs.is_empty());
    assert_eq!(sim.prompts.values().collect::<Vec<_>>(), [&PromptStatus::Stopped]);
}

#[test]
fn prompt_during_a_question_is_the_answer() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.ask();
    sim.deliver();
    assert_eq!(sim.state.public.state, SessionState::NeedsInput);
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Running);
    assert_eq!(sim.runs.len(), 1, "the answer is not a turn");
    assert_eq!(sim.prompts.values().filter(|s| **s == PromptStatus::Completed).count(), 1);
}

#[test]
fn blocked_session_needs_input_until_next_prompt() {
    let mut sim = ready();
    sim.input(Input::Blocked);
    assert!(!sim.state.blocked, "only a turn can be blocked");
    sim.prompt(false);
    run(&mut sim);
    sim.input(Input::Blocked);
    assert_eq!(sim.state.public.state, SessionState::Running);
    sim.end_turn(TurnOutcome::Completed);
    run(&mut sim);
    let expected = PublicState { state: SessionState::NeedsInput, reason: StateReason::Blocked };
    assert_eq!(sim.state.public, expected);
    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Completed);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle);
}

#[test]
fn used_up_budget_needs_input_until_next_prompt() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Failed);
    run(&mut sim);
    let expected = PublicState { state: SessionState::NeedsInput, reason: StateReason::Budget };
    assert_eq!(sim.state.public, expected);
    sim.crash();
    run(&mut sim);
    assert!(sim.state.over_budget, "it survives a restart");
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Running);
    sim.end_turn(TurnOutcome::Completed);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle);
}

#[test]
fn idle_session_pauses_and_prompt_resumes_it() {
    let mut sim = ready();
    sim.now += 600_000;
    sim.input(Input::Tick);
    run(&mut sim);
    assert_eq!(
        (sim.state.public.state, sim.state.public.reason),
        (SessionState::Paused, StateReason::Idle)
    );
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Running);
    assert_eq!(sim.state.epoch, 2);
}

#[test]
fn three_failed_starts_wait_for_resume() {
    let mut sim = Simulation::new();
    sim.prompt(false);
    for _ in 0..3 {
        sim.execute(0, EffectOutcome::Failure);
        sim.execute(0, EffectOutcome::Success);
    }
    assert_eq!(sim.state.public.reason, StateReason::StartFailed);
    assert!(sim.pending.is_empty());
    sim.input(Input::Resume);
    run(&mut sim);
    assert_eq!(sim.runs.len(), 1);
}

#[test]
fn turn_ends_only_with_its_own_event() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.drop_link();
    sim.end_turn(TurnOutcome::Failed);
    sim.execute(0, EffectOutcome::Success);
    let prompt = sim.order[0].clone();
    assert!(matches!(sim.current().unwrap().seen[..], [(_, PromptProgress::Ended)]));
    assert!(sim.state.turn().is_some(), "the outcome is not known yet: {:?}", sim.state.sandbox);
    assert!(sim.pending.is_empty(), "nothing is saved before the event: {:?}", sim.pending);
    sim.deliver();
    assert_eq!(sim.prompts[&prompt], PromptStatus::Failed);
    assert!(matches!(sim.pending[..], [Action::Capture { .. }]));
}

fn fail_boot(sim: &mut Simulation, after_millis: i64) {
    while !matches!(sim.pending[..], [Action::Boot { .. }]) {
        sim.execute(0, EffectOutcome::Success);
    }
    sim.now += after_millis;
    sim.execute(0, EffectOutcome::Failure);
    sim.deliver();
    while matches!(sim.state.sandbox, SandboxState::Stopping { .. }) {
        sim.execute(0, EffectOutcome::Success);
    }
}

#[test]
fn fast_boot_failure_is_retried_three_times() {
    let mut sim = Simulation::new();
    for _ in 0..2 {
        fail_boot(&mut sim, 1000);
        assert!(matches!(sim.state.sandbox, SandboxState::Starting { .. }), "{:?}", sim.state);
    }
    fail_boot(&mut sim, 1000);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Failed, reason: StateReason::BootFailed }
    );
    sim.input(Input::Resume);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle);
}

#[test]
fn permanent_boot_failure_is_not_retried() {
    let mut sim = Simulation::new();
    while !matches!(sim.pending[..], [Action::Boot { .. }]) {
        sim.execute(0, EffectOutcome::Success);
    }
    let epoch = sim.state.epoch;
    sim.input(Input::BootFailed { epoch, detail: "setup".into(), permanent: true });
    run(&mut sim);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Failed, reason: StateReason::BootFailed }
    );
    assert_eq!(sim.state.epoch, epoch, "no other sandbox was started");
}

#[test]
fn slow_boot_failure_is_retried_three_times() {
    let mut sim = Simulation::new();
    let slow = i64::try_from(sim.timeouts.breaker.as_millis()).unwrap();
    for tried in 1..=3 {
        fail_boot(&mut sim, slow);
        let failed = sim.state.public.reason == StateReason::BootFailed;
        assert_eq!(failed, tried == 3, "{:?}", sim.state);
    }
}

#[test]
fn reports_of_older_sandboxes_are_ignored() {
    let mut sim = ready();
    sim.input(Input::Pause);
    run(&mut sim);
    sim.input(Input::Resume);
    run(&mut sim);
    let before = sim.state.clone();
    sim.input(Input::SandboxEnded { epoch: 1, reason: "killed".into() });
    sim.input(Input::LinkLost { epoch: 1 });
    sim.input(Input::BootFailed { epoch: 1, detail: "late".into(), permanent: true });
    assert_eq!(sim.state, before);
}

#[test]
fn terminate_stops_at_once_and_recovers_disk() {
    let mut turn = ready();
    turn.prompt(false);
    run(&mut turn);
    let mut saving = ready();
    saving.prompt(false);
    run(&mut saving);
    saving.end_turn(TurnOutcome::Completed);
    saving.deliver();
    for mut sim in [ready(), frozen(), turn, saving] {
        sim.input(Input::Terminate);
        let stored = |action: &Action| {
            matches!(action, Action::StopAndSave { kind: SnapshotKind::Recovered, .. })
        };
        let at = sim.pending.iter().position(stored);
        sim.execute(at.unwrap_or_else(|| panic!("{:?}", sim.pending)), EffectOutcome::Success);
        assert_eq!(
            sim.state.public,
            PublicState { state: SessionState::Paused, reason: StateReason::Terminated }
        );
    }
}

#[test]
fn turn_in_progress_continues_after_server_shutdown() {
    let mut sim = ready();
    sim.prompt(false);
    sim.prompt(false);
    run(&mut sim);
    let began = sim.state.turn().unwrap().since;
    sim.input(Input::Suspend);
    assert!(!sim.state.is_suspended(), "the server waits for the freeze");
    run(&mut sim);
    assert!(sim.state.is_suspended() && sim.current().is_some_and(|sandbox| sandbox.frozen));
    assert_eq!(sim.state.public.state, SessionState::Running);
    // Longer than a turn may take.
    sim.now += 3 * 60 * 60 * 1000;
    sim.crash();
    run(&mut sim);
    assert!(sim.current().is_some_and(|sandbox| !sandbox.frozen));
    assert_eq!(sim.state.turn().unwrap().since.since(began).as_secs(), 3 * 60 * 60);
    sim.end_turn(TurnOutcome::Completed);
    run(&mut sim);
    assert_eq!((sim.state.epoch, sim.runs.len()), (1, 2), "the queued prompt runs next");
}

#[test]
fn turn_ending_during_shutdown_is_saved() {
    let mut sim = ready();
    sim.prompt(false);
    sim.prompt(false);
    run(&mut sim);
    sim.input(Input::Suspend);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    run(&mut sim);
    assert_eq!((sim.runs.len(), sim.turns.len()), (1, 1), "the next prompt is not sent");
    assert_eq!(sim.state.sandbox, SandboxState::Absent);
    sim.crash();
    run(&mut sim);
    assert_eq!(sim.runs.len(), 2);
}

#[test]
fn shutdown_does_not_wait_for_hanging_start() {
    let mut sim = Simulation::new();
    sim.prompt(false);
    assert!(matches!(sim.pending[..], [Action::Start { .. }]));
    sim.input(Input::Suspend);
    assert!(sim.state.is_suspended());
    sim.crash();
    run(&mut sim);
    assert_eq!((sim.state.epoch, sim.runs.len()), (2, 1));
}

#[test]
fn suspended_session_without_prompts_stays_paused() {
    let mut sim = ready();
    sim.input(Input::Suspend);
    run(&mut sim);
    sim.crash();
    run(&mut sim);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Paused, reason: StateReason::ServerShutdown }
    );
}

#[test]
fn expired_sandbox_is_replaced_before_next_turn() {
    let mut sim = ready();
    sim.timeouts.turn = std::time::Duration::from_secs(100 * 60 * 60);
    sim.prompt(false);
    sim.prompt(false);
    run(&mut sim);
    sim.tick(25 * 60 * 60 * 1000);
    assert_eq!(sim.state.public.state, SessionState::Running, "a running turn is not interrupted");
    sim.end_turn(TurnOutcome::Completed);
    run(&mut sim);
    assert_eq!((sim.state.epoch, sim.runs.len()), (2, 2));
    assert_eq!(sim.turns.len(), 1, "the overdue turn was saved");
}

#[test]
fn prompt_resumes_any_paused_session() {
    for request in [Input::Pause, Input::Terminate, Input::Stop, Input::Suspend] {
        let mut sim = Simulation::new();
        if request != Input::Stop {
            run(&mut sim);
        }
        sim.input(request);
        run(&mut sim);
        assert_eq!(sim.state.public.state, SessionState::Paused);
        if sim.state.suspending {
            sim.crash();
        }
        sim.prompt(false);
        run(&mut sim);
        assert_eq!(sim.runs.len(), 1);
    }
}

#[test]
fn start_without_answer_times_out() {
    let mut sim = Simulation::new();
    sim.tick(30 * 60 * 1000);
    assert_eq!(sim.state.public.state, SessionState::Starting);
    sim.pending.retain(|action| matches!(action, Action::StopAndDiscard { .. }));
    run(&mut sim);
    assert_eq!(
        sim.state.public,
        PublicState { state: SessionState::Failed, reason: StateReason::StartTimeout }
    );
}

#[test]
fn capture_finished_after_terminate_is_removed() {
    let mut sim = ready();
    sim.prompt(false);
    run(&mut sim);
    sim.end_turn(TurnOutcome::Completed);
    sim.deliver();
    let [Action::Capture { snapshot, .. }] = &sim.pending[..] else { panic!("{:?}", sim.pending) };
    let snapshot = snapshot.clone();
    sim.input(Input::Terminate);
    // The capture finishes before the sandbox stops.
    sim.execute(0, EffectOutcome::Success);
    assert!(
        sim.pending.contains(&Action::RemoveSnapshot { snapshot: snapshot.clone() }),
        "{:?}",
        sim.pending
    );
    run(&mut sim);
    assert_eq!(sim.state.public.reason, StateReason::Terminated);
    assert!(sim.newest.is_some_and(|newest| newest != snapshot), "another snapshot was saved");
}
