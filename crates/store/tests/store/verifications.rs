//! Verifications and the snapshots that they leave.

use harvest_proto::{
    RepositoryName, SessionId, SnapshotId, Timestamp, VerificationId,
    api::{CheckOutcome, Evidence, Repository, Verification, VerificationStatus},
    bridge::Exit,
};
use harvest_store::{Removal, StoreError};

use crate::test_store::{NOW, TestStore, on_both};

on_both! {
    verification_is_stored_until_its_end,
    five_snapshots_of_verifications_are_kept,
    unfinished_verifications_end_after_restart,
    deletion_removes_snapshots_of_verifications,
}

fn name() -> RepositoryName {
    "o/r".parse().unwrap()
}

pub(crate) async fn with_repository(test: &TestStore) {
    let repository = Repository {
        name: name(),
        url: "https://h/o/r".into(),
        base: None,
        secret: None,
        image: None,
        build: None,
        created_at: NOW,
    };
    test.store.repository_insert(&repository).await.unwrap();
}

pub(crate) fn queued(at: i64, session: Option<SessionId>) -> Verification {
    Verification {
        id: VerificationId::random(),
        repository: name(),
        session,
        revision: "main".into(),
        pull_request: Some(7),
        commit: "4363bc6f00".into(),
        base: "main".parse().ok(),
        status: VerificationStatus::Queued,
        step: String::new(),
        evidence: None,
        error: None,
        unpublished: None,
        started_at: Timestamp::from_millis(at),
        ended_at: None,
    }
}

pub(crate) fn done(queued: &Verification, snapshot: Option<SnapshotId>) -> Verification {
    let evidence = Evidence {
        repository: name(),
        commit: queued.commit.clone(),
        check: ".harvest/check.sh".into(),
        command: ".harvest/check.sh".into(),
        base: None,
        base_commit: Some("b".into()),
        changed: vec![".harvest/lib.sh".into()],
        changed_count: 1,
        snapshot_id: snapshot,
        outcome: CheckOutcome::Passed,
        exit: Exit::Code(0),
        millis: 1,
        tail: "ok\0".into(),
        at: NOW,
    };
    let (status, ended_at) = (VerificationStatus::Done, Some(NOW));
    Verification { status, evidence: Some(evidence), ended_at, ..queued.clone() }
}

async fn insert(test: &TestStore, new: &Verification) -> SnapshotId {
    let snapshot = SnapshotId::random();
    test.store.verification_insert(test.lease, new, &snapshot).await.unwrap();
    snapshot
}

async fn verification_is_stored_until_its_end(test: TestStore) {
    with_repository(&test).await;
    let new = queued(1, None);
    let snapshot = insert(&test, &new).await;
    assert_eq!(test.store.verification_get(&name(), &new.id).await.unwrap(), new);
    let running = Verification { status: VerificationStatus::Running, ..new.clone() };
    test.store.verification_update(test.lease, &running).await.unwrap();
    assert_eq!(test.store.verification_snapshots().await.unwrap(), std::slice::from_ref(&snapshot));
    let ended = done(&new, Some(snapshot));
    test.store.verification_update(test.lease, &ended).await.unwrap();
    assert_eq!(test.store.verification_list(&name()).await.unwrap(), [ended]);
    let other = test.store.verification_get(&"o/other".parse().unwrap(), &new.id).await;
    assert!(matches!(other, Err(StoreError::NotFound { .. })));
}

async fn five_snapshots_of_verifications_are_kept(test: TestStore) {
    with_repository(&test).await;
    let mut snapshots = Vec::new();
    for at in 0..8 {
        let new = queued(at, None);
        let snapshot = insert(&test, &new).await;
        let ended = done(&new, Some(snapshot.clone()));
        test.store.verification_update(test.lease, &ended).await.unwrap();
        snapshots.insert(0, snapshot);
    }
    let outdated = test.store.verification_outdated(&name()).await.unwrap();
    assert_eq!(outdated, snapshots[5..]);
    for snapshot in &outdated {
        let name = name();
        test.store.verification_forget(test.lease, &name, Some(snapshot)).await.unwrap();
    }
    assert!(test.store.verification_outdated(&name()).await.unwrap().is_empty());
    let listed = test.store.verification_list(&name()).await.unwrap();
    let kept: Vec<_> = listed.into_iter().map(|one| one.evidence.unwrap().snapshot_id).collect();
    let expected = snapshots.iter().enumerate().map(|(at, one)| (at < 5).then(|| one.clone()));
    assert_eq!(kept, expected.collect::<Vec<_>>(), "evidence names no removed snapshot");
}

async fn unfinished_verifications_end_after_restart(test: TestStore) {
    with_repository(&test).await;
    let (old, new) = (queued(1, None), queued(2, None));
    insert(&test, &old).await;
    insert(&test, &new).await;
    let ended = done(&old, None);
    test.store.verification_update(test.lease, &ended).await.unwrap();
    let why = "the server was restarted";
    let unfinished = test.store.verification_end_unfinished(test.lease, why, NOW);
    assert_eq!(unfinished.await.unwrap(), 1);
    let listed = test.store.verification_list(&name()).await.unwrap();
    assert_eq!(listed[0].status, VerificationStatus::NotRun);
    assert_eq!(listed[0].error.as_deref(), Some(why));
    assert_eq!(listed[1], ended);
    assert!(test.store.verification_snapshots().await.unwrap().is_empty());
}

async fn deletion_removes_snapshots_of_verifications(test: TestStore) {
    with_repository(&test).await;
    let session = test.session().await;
    let (of_session, other) = (queued(1, Some(session.clone())), queued(2, None));
    let snapshots = [insert(&test, &of_session).await, insert(&test, &other).await];
    let removed = test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    assert!(removed.contains(&Removal::Snapshot(snapshots[0].clone())), "{removed:?}");
    assert_eq!(test.store.verification_list(&name()).await.unwrap(), [other]);
    let removed = test.store.repository_delete(&name(), NOW).await.unwrap();
    assert!(removed.contains(&Removal::Snapshot(snapshots[1].clone())), "{removed:?}");
    assert_eq!(test.database.count("verifications").await, 0);
}
