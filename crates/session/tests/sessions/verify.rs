//! Verifications: the check of any commit or pull request.

use super::*;

use harvest_gateway::ledger::DoorPurpose;
use harvest_proto::{
    NetworkPolicy, SnapshotId, VerificationId,
    api::{Verification, VerificationStatus, VerifyRepository},
};
use harvest_session::Repositories;

/// The fake's base declares a check for commits that begin like this.
fn commit(last: u32) -> String {
    format!("cafe{last:036}")
}

fn revision(revision: &str) -> VerifyRepository {
    VerifyRepository { revision: Some(revision.to_owned()), ..VerifyRepository::default() }
}

async fn verify(repositories: &Repositories, order: VerifyRepository) -> Verification {
    let started = repositories.verify(&demo(), order, &ada()).await.unwrap();
    assert_eq!(started.status, VerificationStatus::Queued);
    ended(repositories, &started.id).await
}

async fn ended(repositories: &Repositories, id: &VerificationId) -> Verification {
    let states = repositories.verification_follow(&demo(), id).await.unwrap();
    let last = states.collect::<Vec<_>>().await.pop().unwrap();
    assert!(last.status.has_ended(), "{last:?}");
    last
}

#[tokio::test]
async fn verification_ends_with_evidence_and_status() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let verified = verify(&parts.repositories, revision(&commit(1))).await;
    let evidence = verified.evidence.clone().unwrap();
    assert_eq!(evidence.outcome, CheckOutcome::Passed);
    assert_eq!(evidence.check, "`check` in .harvest/config.toml");
    assert_eq!((evidence.command.as_str(), &evidence.commit), ("make check", &commit(1)));
    assert!(evidence.base_commit.is_some());
    let statuses = harness.pulls.statuses.lock().unwrap().clone();
    assert_eq!(statuses.len(), 1);
    assert_eq!((&statuses[0].0, statuses[0].1.context.as_str()), (&commit(1), "harvest/check"));
    let stored = parts.repositories.verification(&demo(), &verified.id).await.unwrap();
    assert_eq!(stored, verified, "the row says what followers saw");
    assert_eq!(harness.fake.sandboxes(), Vec::<SandboxId>::new(), "no sandbox is left");
    let saved = harness.fake.snapshots_taken();
    assert_eq!(saved, [(evidence.snapshot_id.unwrap(), SnapshotKind::Check)]);
    let pass = harness.doors.0.lock().unwrap().last().unwrap().clone();
    assert_eq!((pass.purpose, &pass.repositories[0].branch), (DoorPurpose::StrangersCheck, &None));
}

#[tokio::test]
async fn pull_request_is_checked_against_its_base() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let order = open_seven(&harness, &parts.repositories).await;
    let verified = verify(&parts.repositories, order).await;
    assert_eq!((verified.pull_request, verified.revision.as_str()), (Some(7), "theirs"));
    let evidence = verified.evidence.unwrap();
    assert_eq!((evidence.commit, evidence.base), (commit(7), "release".parse().ok()));
    let context = harness.pulls.statuses.lock().unwrap()[0].1.context.clone();
    assert_eq!(context, "harvest/check (release)", "a base that the pull request chose");
    // The default branch is at the same commit.
    *harness.doors.2.lock().unwrap() = commit(8);
    let order = open_seven(&harness, &parts.repositories).await;
    let verified = verify(&parts.repositories, order).await;
    assert_eq!(verified.evidence.unwrap().base, "release".parse().ok());
    assert_eq!(harness.pulls.statuses.lock().unwrap()[1].1.context, "harvest/check");
}

/// Opens the pull request 7 at the forge, and orders its check.
async fn open_seven(harness: &Harness, repositories: &Repositories) -> VerifyRepository {
    let pull = PullRequest {
        number: 7,
        url: "http://forge/7".into(),
        title: "Theirs".into(),
        body: String::new(),
        state: PullRequestState::Open,
        draft: false,
        branch: "theirs".parse().unwrap(),
        base: "release".parse().unwrap(),
        commit: commit(7),
        evidence: None,
    };
    let url = repositories.get(&demo()).await.unwrap().url;
    harness.pulls.open.lock().unwrap().insert(url, pull);
    VerifyRepository { pull_request: Some(7), ..VerifyRepository::default() }
}

#[tokio::test]
async fn commits_of_strangers_get_no_host_secrets() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let pull = open_seven(&harness, &parts.repositories).await;
    let main = revision("main");
    for (tip, order, purpose) in [
        // A fork's branch, which the repository does not have or has at another commit.
        (commit(1), pull.clone(), DoorPurpose::StrangersCheck),
        (commit(7), pull, DoorPurpose::Check),
        (commit(7), main, DoorPurpose::Check),
        (commit(7), revision(&commit(7)), DoorPurpose::StrangersCheck),
    ] {
        *harness.doors.2.lock().unwrap() = tip;
        verify(&parts.repositories, order).await;
        assert_eq!(harness.doors.0.lock().unwrap().last().unwrap().purpose, purpose);
    }
}

#[tokio::test]
async fn user_has_twenty_unfinished_verifications() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    harness.fake.hold_creates(true);
    let order = async |number: u32| {
        parts.repositories.verify(&demo(), revision(&commit(number)), &ada()).await
    };
    let first = order(0).await.unwrap();
    assert_eq!(order(0).await.unwrap().id, first.id, "the same check is not run twice");
    for number in 1..20 {
        assert_ne!(order(number).await.unwrap().id, first.id);
    }
    assert_eq!(order(20).await.unwrap_err().code(), "too_many_verifications");
    assert_eq!(parts.repositories.verifications(&demo()).await.unwrap().len(), 20);
    harness.fake.hold_creates(false);
    ended(&parts.repositories, &first.id).await;
    assert_ne!(order(0).await.unwrap().id, first.id, "it has ended");
}

#[tokio::test]
async fn verification_that_cannot_run_says_why() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    for (order, code) in [
        (revision("nobranch"), "no_branch"),
        (revision("-x"), "invalid_revision"),
        (
            VerifyRepository { revision: Some("main".into()), pull_request: Some(1) },
            "invalid_revision",
        ),
        (VerifyRepository { revision: None, pull_request: Some(99) }, "forge_failed"),
        (VerifyRepository::default(), "remote_unavailable"),
    ] {
        let refused = parts.repositories.verify(&demo(), order, &ada()).await.unwrap_err();
        assert_eq!(refused.code(), code, "{refused}");
    }
    assert_eq!(parts.repositories.verifications(&demo()).await.unwrap(), []);
    harness.fake.set_boot_failing(true);
    let broken = verify(&parts.repositories, revision(&commit(1))).await;
    assert_eq!((broken.status, broken.evidence), (VerificationStatus::NotRun, None));
    assert!(broken.error.unwrap().contains("made to fail by the test"));
    assert_eq!(harness.pulls.statuses.lock().unwrap().len(), 0, "nothing is shown at the forge");
    assert_eq!(harness.fake.sandboxes(), Vec::<SandboxId>::new());
}

#[tokio::test]
async fn verification_of_killed_server_has_ended() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let first = harness.serve_parts(lease).await;
    let template = verify(&first.repositories, revision(&commit(1))).await;
    let (id, status) = (VerificationId::random(), VerificationStatus::Running);
    let running = Verification { id, status, evidence: None, ended_at: None, ..template };
    harness.store.verification_insert(lease, &running, &SnapshotId::random()).await.unwrap();
    let second = harness.serve_parts(harness.lease().await).await;
    let ended = ended(&second.repositories, &running.id).await;
    assert_eq!(ended.status, VerificationStatus::NotRun);
    assert_eq!(ended.error.as_deref(), Some("the server was restarted"));
}

#[tokio::test]
async fn snapshots_of_five_newest_checks_are_kept() {
    let harness = Harness::new().await;
    let parts = harness.serve_parts(harness.lease().await).await;
    let mut taken = Vec::new();
    for number in 0..7 {
        let verified = verify(&parts.repositories, revision(&commit(number))).await;
        taken.push(verified.evidence.unwrap().snapshot_id.unwrap());
    }
    let mut kept: Vec<_> =
        harness.fake.snapshots_taken().into_iter().map(|(snapshot, _)| snapshot).collect();
    let mut expected = taken[2..].to_vec();
    kept.sort();
    expected.sort();
    assert_eq!(kept, expected);
}

#[tokio::test]
async fn older_check_does_not_replace_newer_evidence() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let parts = harness.serve_parts(lease).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let session = holding_session(&parts).await;
    until(&parts.sessions, &session.id, started).await;
    let push = async |commit: String| {
        let (repository, branch) = (demo(), session.branch.clone());
        ledger.log(&session.id, EventBody::Pushed { repository, branch, commit }).await;
    };
    push(commit(1)).await;
    harness.fake.hold_creates(true);
    let older = parts.repositories.verify_session(&session.id).await.unwrap().remove(0);
    push(commit(2)).await;
    harness.fake.hold_creates(false);
    let older = ended(&parts.repositories, &older.id).await;
    assert_eq!(older.evidence.unwrap().commit, commit(1), "it stays in the row");
    let statuses = harness.pulls.statuses.lock().unwrap().clone();
    assert_eq!(statuses.last().unwrap().0, commit(1), "and at the commit");
    let events = all(&parts.sessions, &session.id).await;
    assert!(
        !events.iter().any(|event| matches!(event.body, EventBody::Evidence(_))),
        "{events:#?}"
    );
    let record = harness.store.session_get(&session.id).await.unwrap();
    assert_eq!(record.checkouts[0].unreviewed(), Some(commit(2).as_str()));
    let pull = parts.sessions.get(&session.id).await.unwrap().repositories.remove(0).pr.unwrap();
    assert_eq!(pull.evidence, None);
}

async fn holding_session(parts: &ServerParts) -> Session {
    let session = CreateSession {
        repository: Some("demo".into()),
        network: Some(NetworkPolicy::None),
        prompt: Some("hold".parse().unwrap()),
        ..CreateSession::default()
    };
    parts.sessions.create(session, ada()).await.unwrap()
}

#[tokio::test]
async fn pushed_work_is_verified_again() {
    let harness = Harness::new().await;
    let lease = harness.lease().await;
    let parts = harness.serve_parts(lease).await;
    let ledger = StoreLedger::new(harness.store.clone(), lease, harness.vault.clone(), None);
    let session = holding_session(&parts).await;
    let refused = parts.repositories.verify_session(&session.id).await.unwrap_err();
    assert_eq!(refused.code(), "nothing_pushed");
    until(&parts.sessions, &session.id, started).await;
    let (repository, branch) = (demo(), session.branch.clone());
    ledger.log(&session.id, EventBody::Pushed { repository, branch, commit: commit(2) }).await;
    let started = parts.repositories.verify_session(&session.id).await.unwrap();
    let verified = ended(&parts.repositories, &started[0].id).await;
    let evidence = verified.evidence.unwrap();
    assert_eq!(verified.session.as_ref(), Some(&session.id));
    let is_evidence = |event: &Event| matches!(event.body, EventBody::Evidence(_));
    let event = until(&parts.sessions, &session.id, is_evidence).await;
    assert_eq!(event.body, EventBody::Evidence(evidence.clone()), "event and row agree");
    let pull = parts.sessions.get(&session.id).await.unwrap().repositories.remove(0).pr.unwrap();
    assert_eq!(pull.evidence, Some(evidence), "and the pull request");
    let pass = harness.doors.0.lock().unwrap().last().unwrap().clone();
    assert_eq!(pass.network.borrow().base, NetworkPolicy::None, "no wider than the session's");
}
