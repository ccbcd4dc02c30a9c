//! The promises by example.

use harvest_proto::bridge::PromptProgress;

use super::world::{Luck, World};
use crate::decide::*;

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
fn a_turn_whose_server_died_while_it_was_kept_is_asked_what_it_changed_before_it_is_kept() {
    let mut world = ready();
    world.prompt(false);
    world.prompt(false);
    run(&mut world);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    let [Action::Capture { snapshot, .. }] = &world.pending[..] else { panic!("{:?}", world.pending) };
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
    let kept = |action: &Action| matches!(action, Action::EndKept { kind: SnapshotKind::Recovered, .. });
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

fn frozen() -> World {
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
    assert_eq!(world.state.shown, Shown { state: SessionState::Queued, reason: "limit_sandboxes".into() });
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
    assert_eq!(world.state.shown, Shown { state: SessionState::Queued, reason: "limit_sandboxes".into() });
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
    assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "place_needed".into() });
}

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
        let kept = |action: &Action| matches!(action, Action::EndKept { kind: SnapshotKind::Recovered, .. });
        let at = world.pending.iter().position(kept);
        world.carry_out(at.unwrap_or_else(|| panic!("{:?}", world.pending)), Luck::Good);
        assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "terminated".into() });
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
    assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "server_shutdown".into() });
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
    assert_eq!(world.state.shown, Shown { state: SessionState::Paused, reason: "server_shutdown".into() });
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
    assert_eq!(world.state.shown, Shown { state: SessionState::Failed, reason: "start_timeout".into() });
}

#[test]
fn a_state_of_the_last_version_is_read() {
    let old = r#"{"epoch":3,"turns":2,"disk":null,"conversed":true,"rest":"open","wake":false,
        "machine":{"ready":{"sandbox":"sbx_aaaaaaaaaaaa","link":"up","born":"2026-01-01T00:00:00.000Z",
        "work":{"idle":{"since":"2026-01-01T00:00:00.000Z"}}}},
        "shown":{"state":"idle","reason":"ready"},"failures":[]}"#;
    let state: State = serde_json::from_str(old).unwrap();
    assert!(state.is_awake() && state.waiting.is_none() && state.restoring.is_none() && !state.ceding);
}

#[test]
fn a_snapshot_taken_for_a_machine_that_was_terminated_meanwhile_is_forgotten() {
    let mut world = ready();
    world.prompt(false);
    run(&mut world);
    world.end_turn(TurnOutcome::Completed);
    world.deliver();
    let [Action::Capture { snapshot, .. }] = &world.pending[..] else { panic!("{:?}", world.pending) };
    let snapshot = snapshot.clone();
    world.input(Input::Terminate);
    // It is taken before the machine is ended.
    world.carry_out(0, Luck::Good);
    assert!(world.pending.contains(&Action::Forget { snapshot: snapshot.clone() }), "{:?}", world.pending);
    run(&mut world);
    assert_eq!(world.state.shown.reason, "terminated");
    assert!(world.newest.is_some_and(|newest| newest != snapshot), "what was kept is another one");
}
