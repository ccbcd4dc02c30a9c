//! Deletion, retention and startup reconciliation: nothing leaks, whenever the server dies.

use std::sync::atomic::Ordering;

use harvest_proto::SnapshotId;

use super::*;

/// Waits until the condition holds.
pub(super) async fn eventually(what: &str, condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), wait).await.is_ok(), "never: {what}");
}

async fn two_turns(harness: &Harness, sessions: &Sessions) -> SessionId {
    let id = harness.session(sessions, Some("write /a one")).await.id;
    until_state(sessions, &id, SessionState::Idle).await;
    let second = send(sessions, &id, "two").await;
    until_status(sessions, &id, &second, PromptStatus::Completed).await;
    until_state(sessions, &id, SessionState::Idle).await;
    id
}

#[tokio::test]
async fn interrupted_delete_is_finished_by_next_server() {
    for (failing, left) in [
        (vec![FakeOp::Remove, FakeOp::SnapshotRemove], (1, 2)),
        (vec![FakeOp::SnapshotRemove], (0, 2)),
        (vec![], (0, 0)),
    ] {
        let harness = Harness::new().await;
        let sessions = harness.serve().await;
        let id = two_turns(&harness, &sessions).await;
        for act in &failing {
            harness.fake.set_failing(*act, true);
        }
        sessions.delete(&id).await.unwrap();
        assert!(matches!(sessions.get(&id).await, Err(SessionError::NotFound { .. })));
        // The server dies here, with part of the work done.
        drop(sessions);
        let there = (harness.fake.sandboxes().len(), harness.fake.snapshots_taken().len());
        assert_eq!(there, left, "{failing:?}");
        let recorded = harness.store.removal_list().await.unwrap().len();
        assert_eq!(recorded, left.0 + left.1, "the remaining removals are recorded: {failing:?}");
        for act in failing {
            harness.fake.set_failing(act, false);
        }
        let _sessions = harness.serve().await;
        eventually("everything is gone", || harness.fake.snapshots_taken().is_empty()).await;
        assert!(harness.fake.sandboxes().is_empty());
        removals_done(&harness).await;
    }
}

/// Waits until no removal is pending.
async fn removals_done(harness: &Harness) {
    let waiting = async {
        while !harness.store.removal_list().await.unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
    };
    assert!(
        tokio::time::timeout(Duration::from_secs(20), waiting).await.is_ok(),
        "removals are still pending"
    );
}

#[tokio::test]
async fn failed_removal_is_retried_without_restart() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = two_turns(&harness, &sessions).await;
    harness.fake.set_failing(FakeOp::SnapshotRemove, true);
    sessions.delete(&id).await.unwrap();
    assert_eq!(
        harness.store.removal_list().await.unwrap().len(),
        2,
        "the sandbox is removed, the snapshots are not"
    );
    harness.fake.set_failing(FakeOp::SnapshotRemove, false);
    eventually("the background task has removed them", || {
        harness.fake.snapshots_taken().is_empty()
    })
    .await;
}

#[tokio::test]
async fn shared_snapshot_is_removed_with_last_session() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = two_turns(&harness, &sessions).await;
    let shared = sessions.turns(&id).await.unwrap()[0].snapshot_id.clone().unwrap();
    let order = ForkSession { turn: Some(1), ..ForkSession::default() };
    let fork = sessions.fork(&id, order, ada()).await.unwrap().remove(0);
    until_state(&sessions, &fork.id, SessionState::Idle).await;
    sessions.delete(&id).await.unwrap();
    let left: Vec<_> = harness.fake.snapshots_taken().into_iter().map(|kept| kept.0).collect();
    assert_eq!(left, std::slice::from_ref(&shared));
    drop(sessions);
    let sessions = harness.serve().await;
    assert_eq!(harness.fake.snapshots_taken().len(), 1, "a restart changes nothing");
    let kept = &sessions.snapshots(&fork.id).await.unwrap()[0];
    assert_eq!((&kept.id, kept.turn), (&shared, Some(0)));
    sessions.delete(&fork.id).await.unwrap();
    assert!(harness.fake.snapshots_taken().is_empty());
    assert!(harness.store.removal_list().await.unwrap().is_empty());
}

#[tokio::test]
async fn startup_removes_orphaned_snapshots_but_not_pending_saves() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    harness.fake.set_failing(FakeOp::SnapshotAndRemove, true);
    let id = harness.session(&sessions, Some("one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    assert_eq!(sessions.pause(&id).await.unwrap_err().code(), "save_unknown");
    drop(sessions);
    // Both snapshots of the pending save may exist; the third one is an orphan.
    let json = harness.store.session_get(&id).await.unwrap().driver_state;
    let pending: Vec<SnapshotId> = json.split('"').filter_map(|word| word.parse().ok()).collect();
    assert_eq!(pending.len(), 2, "the turn's and the pause's: {json}");
    let orphan = SnapshotId::random();
    harness.fake.add_snapshot(&orphan);
    pending.iter().for_each(|snapshot| harness.fake.add_snapshot(snapshot));
    let _sessions = harness.serve().await;
    eventually("the orphan is removed", || {
        !harness.fake.snapshots_taken().iter().any(|kept| kept.0 == orphan)
    })
    .await;
    assert_eq!(harness.fake.snapshots_taken().len(), 2);
}

#[tokio::test]
async fn disks_of_another_store_are_not_removed() {
    let harness = Harness::new().await;
    let orphan = SnapshotId::random();
    harness.fake.add_snapshot(&orphan);
    harness.fake.set_owner_store("another");
    let sandbox = SandboxId::random();
    let from = StartFrom::Image("claude".into());
    let spec = SandboxSpec::of_session(sandbox.clone(), from, SandboxLimits::default());
    harness.fake.create(spec).await.unwrap();
    let _sessions = harness.serve().await;
    eventually("the server has reclaimed space", || harness.fake.reclaims() > 0).await;
    assert_eq!(harness.fake.snapshots_taken().len(), 1);
    assert_eq!(harness.fake.sandboxes(), [sandbox]);
}

#[tokio::test]
async fn missing_snapshot_is_reported_once() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = two_turns(&harness, &sessions).await;
    let first = sessions.turns(&id).await.unwrap()[0].snapshot_id.clone().unwrap();
    drop(sessions);
    harness.fake.lose_snapshot(&first);
    for _ in 0..2 {
        let sessions = harness.serve().await;
        let is_warning = |event: &Event| matches!(&event.body, EventBody::Warning { message } if message.contains("turn 1"));
        until(&sessions, &id, is_warning).await;
        let warnings = all(&sessions, &id).await.into_iter().filter(is_warning);
        assert_eq!(warnings.count(), 1, "reported once, not at every start");
        let turn = &sessions.turns(&id).await.unwrap()[0];
        assert_eq!((&turn.snapshot_id, turn.dropped.as_deref()), (&None, Some("gone")));
        let order = ForkSession { turn: Some(1), ..ForkSession::default() };
        assert_eq!(sessions.fork(&id, order, ada()).await.unwrap_err().code(), "no_snapshot");
        drop(sessions);
    }
    harness.fake.add_snapshot(&first);
    let sessions = harness.serve().await;
    // Snapshots are compared in the background after a start.
    while sessions.turns(&id).await.unwrap()[0].snapshot_id != Some(first.clone()) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn archived_session_keeps_newest_and_pinned_snapshots() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = two_turns(&harness, &sessions).await;
    let third = send(&sessions, &id, "three").await;
    until_status(&sessions, &id, &third, PromptStatus::Completed).await;
    let turns = sessions.turns(&id).await.unwrap();
    let pinned = turns[0].snapshot_id.clone().unwrap();
    assert!(sessions.snapshot_pin(&id, &pinned, true).await.unwrap().pinned);
    sessions.archive(&id).await.unwrap();
    until_state(&sessions, &id, SessionState::Archived).await;
    eventually("the rest is gone", || harness.fake.snapshots_taken().len() == 2).await;
    let newest = sessions.get(&id).await.unwrap().snapshot_id.unwrap();
    let mut kept: Vec<_> = harness.fake.snapshots_taken().into_iter().map(|kept| kept.0).collect();
    let mut wanted = vec![pinned, newest];
    kept.sort();
    wanted.sort();
    assert_eq!(kept, wanted);
    assert_eq!(sessions.turns(&id).await.unwrap()[1].dropped.as_deref(), Some("archived"));
}

#[tokio::test]
async fn removed_repository_loses_builds_and_state() {
    let harness = Harness::new().await;
    let ServerParts { repositories, sessions, .. } =
        harness.serve_parts(harness.lease().await).await;
    let _lines: Vec<_> = repositories
        .build(&demo(), BuildRepository::default(), &ada())
        .await
        .unwrap()
        .collect()
        .await;
    assert_eq!(harness.fake.snapshots_taken().len(), 1);
    harness.fake.set_failing(FakeOp::SnapshotRemove, true);
    repositories.delete(&demo()).await.unwrap();
    assert_eq!(harness.fake.states_removed(), [demo()]);
    drop(sessions);
    harness.fake.set_failing(FakeOp::SnapshotRemove, false);
    let _sessions = harness.serve().await;
    eventually("the build is gone", || harness.fake.snapshots_taken().is_empty()).await;
}

#[tokio::test]
async fn forge_copy_of_removed_repository_is_removed() {
    let harness = Harness::new().await;
    let forge = Arc::clone(&harness.pulls);
    let serve = || async {
        let dependencies = harness.dependencies(harness.lease().await);
        ServerParts::open(dependencies).await.unwrap()
    };
    let ServerParts { accounts, repositories, sessions, .. } = serve().await;
    let add = |name: &str, of: &str, secret: &str| AddRepository {
        url: format!("http://forge.example.org/{of}.git"),
        name: Some(name.parse().unwrap()),
        secret: Some(secret.to_owned()),
        ..AddRepository::default()
    };
    for one in [add("one", "one", "KEY"), add("two", "one", "KEY"), add("three", "three", "OTHER")]
    {
        accounts
            .secret_set(
                &SecretOwner::Global,
                one.secret.as_ref().unwrap(),
                Secret::new("token".to_owned()),
                None,
            )
            .await
            .unwrap();
        repositories.add(one, &ada()).await.unwrap();
    }
    // Another repository has the same URL.
    repositories.delete(&"local/one".parse().unwrap()).await.unwrap();
    assert_eq!(*forge.removed.lock().unwrap(), Vec::<String>::new());
    forge.keeps_copies.store(true, Ordering::SeqCst);
    repositories.delete(&"local/two".parse().unwrap()).await.unwrap();
    // A server that died right after recording the removal.
    sessions.close().await;
    drop(sessions);
    let three = "local/three".parse().unwrap();
    harness.store.repository_delete(&three, Timestamp::from_millis(0)).await.unwrap();
    forge.keeps_copies.store(false, Ordering::SeqCst);
    let parts = serve().await;
    eventually("both are gone", || forge.removed.lock().unwrap().len() == 2).await;
    let mut gone = forge.removed.lock().unwrap().clone();
    gone.sort();
    assert_eq!(gone, ["http://forge.example.org/one.git", "http://forge.example.org/three.git"]);
    removals_done(&harness).await;
    let left = parts.accounts.secret_list().await.unwrap();
    assert!(left.is_empty(), "the secrets are removed too: {left:?}");
}

#[tokio::test]
async fn open_session_keeps_newest_snapshots() {
    let mut harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = two_turns(&harness, &sessions).await;
    for text in ["three", "four"] {
        let prompt = send(&sessions, &id, text).await;
        until_status(&sessions, &id, &prompt, PromptStatus::Completed).await;
        until_state(&sessions, &id, SessionState::Idle).await;
    }
    sessions.close().await;
    drop(sessions);
    harness.config.retention.snapshots_per_session = 2;
    let sessions = harness.serve().await;
    eventually("the oldest two are gone", || harness.fake.snapshots_taken().len() == 2).await;
    let turns = sessions.turns(&id).await.unwrap();
    let dropped: Vec<_> = turns.iter().map(|turn| turn.dropped.as_deref()).collect();
    assert_eq!(dropped, [Some("too_many"), Some("too_many"), None, None]);
    let report = sessions.retention().await.unwrap();
    assert_eq!((report.items[0].snapshots, report.dropped.len()), (2, 0));
    sessions.close().await;
    drop(sessions);
    // With a quota of zero, only the session's current snapshot stays.
    harness.config.retention.snapshots_bytes = Some(0);
    let sessions = harness.serve().await;
    eventually("one is left", || harness.fake.snapshots_taken().len() == 1).await;
    assert!(sessions.get(&id).await.unwrap().snapshot_id.is_some());
}

#[tokio::test]
async fn old_archived_session_is_deleted_with_snapshots() {
    let mut harness = Harness::new().await;
    harness.config.retention.archived = Some(Duration::ZERO);
    let sessions = harness.serve().await;
    let id = two_turns(&harness, &sessions).await;
    sessions.archive(&id).await.unwrap();
    eventually("nothing is left", || harness.fake.snapshots_taken().is_empty()).await;
    assert!(matches!(sessions.get(&id).await, Err(SessionError::NotFound { .. })));
}

#[tokio::test]
async fn sandbox_that_starts_after_unloading_is_removed() {
    let timeouts = Timeouts { boot: Duration::from_millis(20), ..Timeouts::default() };
    let harness = Harness::with(timeouts).await;
    let sessions = harness.serve().await;
    harness.fake.hold_creates(true);
    let id = harness.session(&sessions, None).await.id;
    until_state(&sessions, &id, SessionState::Failed).await;
    eventually("the session is unloaded", || sessions.unload_resting() == 0).await;
    harness.fake.hold_creates(false);
    eventually("it starts late", || !harness.fake.created().is_empty()).await;
    eventually("it is removed", || harness.fake.sandboxes().is_empty()).await;
}
