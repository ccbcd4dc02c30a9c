//! Blobs: the full text of tool output that events truncate.

use harvest_proto::event::Blob;

use super::*;

fn long(event: &Event) -> bool {
    matches!(event.body, EventBody::ToolEnded { .. })
}

async fn blob_of(sessions: &Sessions, session: &SessionId) -> Option<Blob> {
    until(sessions, session, long).await.body.blob().cloned()
}

#[tokio::test]
async fn blob_is_stored_before_its_event() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    // Larger than the flow-control window.
    let id = harness.session(&sessions, Some("long 1000000")).await.id;
    let blob = blob_of(&sessions, &id).await.unwrap();
    assert_eq!(blob.bytes, 1_000_000);
    assert_eq!(sessions.blob(&id, &blob.id).await.unwrap(), "x".repeat(1_000_000));
    let other = harness.session(&sessions, None).await.id;
    let missing = sessions.blob(&other, &blob.id).await;
    assert!(matches!(missing, Err(SessionError::NotFound { .. })), "{missing:?}");
}

#[tokio::test]
async fn event_with_wrong_blob_size_loses_blob() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    for prompt in ["long 100000 99999", "long 100000 600000", "long 99999999 1"] {
        let id = harness.session(&sessions, Some(prompt)).await.id;
        assert_eq!(blob_of(&sessions, &id).await, None, "{prompt}");
        until_state(&sessions, &id, SessionState::Idle).await;
    }
}

#[tokio::test]
async fn unwritable_blob_delays_its_event() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    failures::break_store(&harness, Some("INSERT ON blob_pieces")).await;
    send(&sessions, &id, "long 200000").await;
    until_state(&sessions, &id, SessionState::Running).await;
    // After a reconnect, the event is sent again and its blob is requested again.
    harness.fake.drop_connections(&sandbox(&sessions, &id).await);
    assert!(
        !all(&sessions, &id).await.iter().any(long),
        "the event is visible before its blob is stored"
    );
    failures::break_store(&harness, None).await;
    let blob = blob_of(&sessions, &id).await.unwrap();
    assert_eq!(sessions.blob(&id, &blob.id).await.unwrap().len(), 200_000);
    assert_eq!(all(&sessions, &id).await.iter().filter(|event| long(event)).count(), 1);
}
