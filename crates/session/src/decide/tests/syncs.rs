//! Requested syncs: conflicts, repeated failures and what the agent is told.

use harvest_proto::event::{CheckoutSync, CommittedWork, SyncOutcome};

use super::{
    examples::{ready, run},
    simulation::Simulation,
};
use crate::decide::*;

fn checkout(outcome: SyncOutcome, epoch: u32) -> CheckoutSync {
    let conflict = outcome == SyncOutcome::Conflict;
    let failed = outcome == SyncOutcome::Failed;
    CheckoutSync {
        repository: "acme/shop".parse().unwrap(),
        outcome,
        branch: Some("harvest/x".into()),
        upstream: Some("origin/main".into()),
        before: None,
        after: None,
        base: None,
        work: CommittedWork::default(),
        checkpoint: conflict.then(|| format!("checkpoint-x-{epoch}")),
        conflicts: conflict.then(|| "README".into()).into_iter().collect(),
        commit: conflict.then(|| format!("{epoch} Mine")),
        error: failed.then(|| "the remote did not answer".into()),
        next: Some("git rebase origin/main".into()),
    }
}

/// The reports that the sync leads to.
fn sync(sim: &mut Simulation, outcome: SyncOutcome, epoch: u32) -> Vec<EventBody> {
    sim.input(Input::SyncEnded { checkouts: vec![checkout(outcome, epoch)] });
    run(sim);
    std::mem::take(&mut sim.reports)
}

/// The end of a sync with any outcome.
pub(super) fn random_sync(which: usize) -> Input {
    let outcome = SyncOutcome::ALL[which % SyncOutcome::ALL.len()];
    Input::SyncEnded { checkouts: vec![checkout(outcome, 1)] }
}

#[test]
fn conflict_needs_input_until_next_prompt() {
    let mut sim = ready();
    sync(&mut sim, SyncOutcome::Conflict, 1);
    let expected = PublicState { state: SessionState::NeedsInput, reason: StateReason::Conflict };
    assert_eq!(sim.state.public, expected);
    let note = sim.state.syncs.note.clone().unwrap();
    assert!(note.contains("README") && note.contains("checkpoint-x-1"), "{note}");
    sim.crash();
    run(&mut sim);
    assert_eq!(sim.state.public, expected, "it survives a restart");
    sim.prompt(false);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Running);
    assert_eq!(sim.state.syncs.note, None, "the agent was told");
    sim.end_turn(TurnOutcome::Completed);
    run(&mut sim);
    assert_eq!(sim.state.public.state, SessionState::Idle);
}

#[test]
fn third_equal_failure_is_reported_once() {
    let mut sim = ready();
    for attempt in 1..=5 {
        let reported = sync(&mut sim, SyncOutcome::Conflict, attempt);
        assert_eq!(reported.len(), usize::from(attempt == 3), "attempt {attempt}");
        let [EventBody::Blocked { criterion, error, attempts, checkpoint, needed_action }] =
            &reported[..]
        else {
            continue;
        };
        assert_eq!(criterion, "acme/shop follows origin/main");
        assert_eq!(error, "acme/shop: conflict with origin/main in README");
        assert_eq!(attempts.len(), 3);
        assert!(attempts[0].contains("stopped at 1 Mine, kept as checkpoint-x-1"), "{attempts:?}");
        assert_eq!(checkpoint.as_deref(), Some("checkpoint-x-3"));
        assert_eq!(needed_action, "acme/shop: git rebase origin/main");
        let note = sim.state.syncs.note.clone().unwrap();
        assert!(note.starts_with("Harvest tried the same sync 3 times"), "{note}");
        assert!(note.contains(error) && note.contains(needed_action), "{note}");
    }
    assert!(sim.state.blocked);
    sync(&mut sim, SyncOutcome::Rebased, 6);
    assert_eq!(sim.state.public.state, SessionState::Idle, "a sync that succeeds ends it");
}

#[test]
fn different_failures_are_not_counted_together() {
    let mut sim = ready();
    use SyncOutcome::{Conflict, Failed, UpToDate};
    for outcome in [Failed, Failed, Conflict, Failed, Failed, UpToDate, Failed, Failed] {
        assert_eq!(sync(&mut sim, outcome, 1), []);
    }
    assert_eq!(sim.state.public.state, SessionState::Idle, "a failure leaves the session usable");
    assert_eq!(sync(&mut sim, Failed, 1).len(), 1);
    let expected = PublicState { state: SessionState::NeedsInput, reason: StateReason::Blocked };
    assert_eq!(sim.state.public, expected);
}

#[test]
fn agent_is_told_only_of_changes() {
    let mut sim = ready();
    sync(&mut sim, SyncOutcome::UpToDate, 1);
    assert_eq!(sim.state.syncs.note, None);
    sync(&mut sim, SyncOutcome::Rebased, 1);
    let note = sim.state.syncs.note.clone().unwrap();
    assert!(note.contains("was rebased onto origin/main"), "{note}");
}
