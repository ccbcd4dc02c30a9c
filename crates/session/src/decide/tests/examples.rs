//! The promises by example: prompts, turns, saves, starts and ends.

use harvest_proto::bridge::PromptProgress;

use super::{
    resting::frozen,
    world::{Luck, World},
};
use crate::decide::*;

/// Lets everything that is under way happen, without a mishap.
pub(super) fn run(world: &mut World) {
    for _ in 0..200 {
        if !world.pending.is_empty() {
            world.carry_out(0, Luck::Good);
        } else {
            world.deliver();
        }
    }
}

pub(super) fn ready() -> World {
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
fn a_turn_whose_server_died_while_it_was_kept_is_asked_what_it_changed_before_it_is_kept() {
    let mut world = ready();
    world.prompt(false);
    world.prompt(false);
    run(&mut world);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    let [Action::Capture { snapshot, .. }] = &world.pending[..] else {
        panic!("{:?}", world.pending)
    };
    let first = snapshot.clone();
    for _ in 0..2 {
        world.crash();
        world.carry_out(0, Luck::Good);
        assert!(matches!(world.pending[..], [Action::Connect { .. }, ..]), "{:?}", world.pending);
        let captures = |action: &Action| matches!(action, Action::Capture { .. });
        assert!(!world.pending.iter().any(captures), "nobody could be asked: {:?}", world.pending);
        assert_eq!(world.runs.len(), 1);
    }
    run(&mut world);
    assert_eq!(world.turns[&1], first, "under the id it had");
    assert_eq!(world.runs.len(), 2, "and the next prompt goes on");
}

#[test]
fn a_turn_that_can_no_longer_be_asked_is_kept_with_its_machine() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    world.crash();
    world.carry_out(0, Luck::Good);
    world.pending.clear();
    world.tick(90_000);
    let kept =
        |action: &Action| matches!(action, Action::EndKept { kind: SnapshotKind::Recovered, .. });
    assert!(world.pending.iter().any(kept), "{:?}", world.pending);
    run(&mut world);
    assert_eq!(world.turns.len(), 1);
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
    assert_eq!(
        (world.state.shown.state, world.state.shown.reason.as_str()),
        (SessionState::Paused, "idle")
    );
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
    assert!(
        world.state.turn().is_some(),
        "nobody knows the outcome yet: {:?}",
        world.state.machine
    );
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
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Failed, reason: "boot_failed".into() }
    );
    world.input(Input::Resume);
    run(&mut world);
    assert_eq!(world.state.shown.state, SessionState::Idle);
}

#[test]
fn a_boot_that_fails_slowly_is_not_tried_for_ever() {
    let mut world = World::new();
    let slow = world.clocks.breaker / 3;
    boot_badly(&mut world, i64::try_from(slow.as_millis()).unwrap());
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Failed, reason: "boot_failed".into() }
    );
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

#[test]
fn terminate_ends_the_machine_now_and_keeps_what_it_left_as_recovered() {
    let mut turn = ready();
    turn.prompt(false);
    run(&mut turn);
    let mut saving = ready();
    saving.prompt(false);
    run(&mut saving);
    saving.end_turn(TurnOutcome::Completed);
    saving.deliver();
    for mut world in [ready(), frozen(), turn, saving] {
        world.input(Input::Terminate);
        let kept = |action: &Action| {
            matches!(action, Action::EndKept { kind: SnapshotKind::Recovered, .. })
        };
        let at = world.pending.iter().position(kept);
        world.carry_out(at.unwrap_or_else(|| panic!("{:?}", world.pending)), Luck::Good);
        assert_eq!(
            world.state.shown,
            Shown { state: SessionState::Paused, reason: "terminated".into() }
        );
    }
}

#[test]
fn what_waited_when_the_server_ended_goes_on_with_the_next() {
    let mut world = ready();
    world.prompt(false);
    world.prompt(false);
    run(&mut world);
    world.input(Input::Suspend);
    run(&mut world);
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Paused, reason: "server_shutdown".into() }
    );
    assert_eq!(world.runs.len(), 1);
    world.crash();
    run(&mut world);
    assert_eq!(world.runs.len(), 2, "the one that waited runs, the stopped one does not run again");
}

#[test]
fn a_session_suspended_with_nothing_to_do_stays_paused() {
    let mut world = ready();
    world.input(Input::Suspend);
    run(&mut world);
    world.crash();
    run(&mut world);
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Paused, reason: "server_shutdown".into() }
    );
}

#[test]
fn a_sandbox_past_its_lifetime_gets_no_further_turn_and_the_next_prompt_another_one() {
    let mut world = ready();
    world.clocks.turn = std::time::Duration::from_secs(100 * 60 * 60);
    world.prompt(false);
    world.prompt(false);
    run(&mut world);
    world.tick(25 * 60 * 60 * 1000);
    assert_eq!(world.state.shown.state, SessionState::Running, "running work is activity");
    world.end_turn(TurnOutcome::Completed);
    run(&mut world);
    assert_eq!((world.state.epoch, world.runs.len()), (2, 2));
    assert_eq!(world.turns.len(), 1, "the turn that ran over was kept");
}

#[test]
fn a_prompt_wakes_whatever_rests() {
    for rest in [Input::Pause, Input::Terminate, Input::Stop, Input::Suspend] {
        let mut world = World::new();
        if rest != Input::Stop {
            run(&mut world);
        }
        world.input(rest);
        run(&mut world);
        assert_eq!(world.state.shown.state, SessionState::Paused);
        world.prompt(false);
        run(&mut world);
        assert_eq!(world.runs.len(), 1);
    }
}

#[test]
fn a_start_that_never_answers_is_given_up() {
    let mut world = World::new();
    world.tick(30 * 60 * 1000);
    assert_eq!(world.state.shown.state, SessionState::Starting);
    world.pending.retain(|action| matches!(action, Action::End { .. }));
    run(&mut world);
    assert_eq!(
        world.state.shown,
        Shown { state: SessionState::Failed, reason: "start_timeout".into() }
    );
}

#[test]
fn a_state_of_the_last_version_is_read() {
    let old = r#"{"epoch":3,"turns":2,"disk":null,"conversed":true,"rest":"open","wake":false,
        "machine":{"ready":{"sandbox":"sbx_aaaaaaaaaaaa","link":"up","born":"2026-01-01T00:00:00.000Z",
        "work":{"idle":{"since":"2026-01-01T00:00:00.000Z"}}}},
        "shown":{"state":"idle","reason":"ready"},"failures":[]}"#;
    let state: State = serde_json::from_str(old).unwrap();
    assert!(
        state.is_awake() && state.waiting.is_none() && state.restoring.is_none() && !state.ceding
    );
}

#[test]
fn a_snapshot_taken_for_a_machine_that_was_terminated_meanwhile_is_forgotten() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    let [Action::Capture { snapshot, .. }] = &world.pending[..] else {
        panic!("{:?}", world.pending)
    };
    let snapshot = snapshot.clone();
    world.input(Input::Terminate);
    // It is taken before the machine is ended.
    world.carry_out(0, Luck::Good);
    assert!(
        world.pending.contains(&Action::Forget { snapshot: snapshot.clone() }),
        "{:?}",
        world.pending
    );
    run(&mut world);
    assert_eq!(world.state.shown.reason, "terminated");
    assert!(world.newest.is_some_and(|newest| newest != snapshot), "what was kept is another one");
}
