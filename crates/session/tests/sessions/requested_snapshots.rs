//! Snapshots that users take of their sessions.

use harvest_proto::{
    Hint,
    api::{CreateSnapshot, Snapshot},
};

use super::*;

async fn take(
    sessions: &Sessions,
    id: &SessionId,
    name: Option<&str>,
) -> Result<Snapshot, SessionError> {
    let create = CreateSnapshot { name: name.map(str::to_owned) };
    sessions.snapshot_create(id, create, &[]).await
}

#[tokio::test]
async fn snapshot_during_turn_is_restored_later() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("write /note one")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    send(&sessions, &id, "hold").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::TurnStarted { number: 2, .. }))
        .await;
    let taken = take(&sessions, &id, Some("one")).await.unwrap();
    assert_eq!((taken.kind, taken.turn, taken.pinned), (SnapshotKind::Request, None, true));
    let running = sessions.get(&id).await.unwrap();
    assert_eq!(running.state, SessionState::Running, "the turn goes on");
    harness.fake.finish_turn(&sandbox(&sessions, &id).await);
    let third = send(&sessions, &id, "write /note two").await;
    until_status(&sessions, &id, &third, PromptStatus::Completed).await;
    until_state(&sessions, &id, SessionState::Idle).await;
    let point = RestorePoint::Snapshot(taken.id.clone());
    sessions.restore(&id, &point).await.unwrap();
    until_state(&sessions, &id, SessionState::Idle).await;
    let note = harness.fake.file(&sandbox(&sessions, &id).await, "/note");
    assert_eq!(note.as_deref(), Some(&b"one"[..]));
    assert_eq!(sessions.get(&id).await.unwrap().snapshot_id, Some(taken.id));
    assert_gapless(&all(&sessions, &id).await);
}

#[tokio::test]
async fn session_without_sandbox_names_its_newest_snapshot() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let paused = sessions.pause(&id).await.unwrap();
    let before = harness.fake.snapshots_taken().len();
    let named = take(&sessions, &id, Some("rest")).await.unwrap();
    assert_eq!((named.id, named.name.as_deref()), (paused, Some("rest")));
    assert_eq!(harness.fake.snapshots_taken().len(), before);
}

#[tokio::test]
async fn snapshot_of_another_session_is_not_restored() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let one = harness.session(&sessions, Some("hello")).await.id;
    let other = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &one, SessionState::Idle).await;
    until_state(&sessions, &other, SessionState::Idle).await;
    let taken = take(&sessions, &one, None).await.unwrap();
    assert!(!taken.pinned, "retention applies to one without a name");
    let refused = sessions.restore(&other, &RestorePoint::Snapshot(taken.id)).await.unwrap_err();
    assert_eq!(refused.code(), "no_snapshot");
}

#[tokio::test]
async fn repeated_request_takes_one_snapshot() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let taken = take(&sessions, &id, None).await.unwrap();
    let planned = [taken.id.to_string()];
    let again = sessions.snapshot_create(&id, CreateSnapshot::default(), &planned).await.unwrap();
    assert_eq!(again.id, taken.id);
}

#[tokio::test]
async fn failed_capture_leaves_no_snapshot() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let before = sessions.snapshots(&id).await.unwrap();
    harness.fake.set_failing(FakeOp::Capture, true);
    assert!(take(&sessions, &id, Some("never")).await.is_err());
    assert_eq!(sessions.snapshots(&id).await.unwrap(), before);
    assert_eq!(sessions.get(&id).await.unwrap().state, SessionState::Idle);
}

#[tokio::test]
async fn full_session_drops_its_oldest_requested_snapshots() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    for _ in 0..201 {
        take(&sessions, &id, None).await.unwrap();
    }
    assert!(sessions.snapshots(&id).await.unwrap().len() <= 101, "retention came first");
}

#[tokio::test]
async fn refused_snapshot_names_the_setting_that_keeps_all() {
    let mut harness = Harness::new().await;
    harness.config.retention.snapshots_per_session = 1000;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    for _ in 0..200 {
        take(&sessions, &id, None).await.unwrap();
    }
    let refused = take(&sessions, &id, None).await.unwrap_err();
    assert_eq!(refused.code(), "too_many_snapshots");
    assert!(refused.hint().unwrap().contains("retention.snapshots_per_session"));
    assert!(take(&sessions, &id, Some("pinned")).await.is_ok(), "a name has a limit of its own");
}
