//! The whole of what events hold only the ends of.

use harvest_proto::event::Blob;

use super::*;

fn long(event: &Event) -> bool {
    matches!(event.body, EventBody::ToolEnded { .. })
}

async fn blob_of(sessions: &Sessions, session: &SessionId) -> Option<Blob> {
    until(sessions, session, long).await.body.blob().cloned()
}

#[tokio::test]
async fn a_blob_is_kept_when_its_event_is_seen() {
    let house = House::new().await;
    let sessions = house.serve().await;
    // More than may be in flight at once.
    let id = house.session(&sessions, Some("long 1000000")).await.id;
    let blob = blob_of(&sessions, &id).await.unwrap();
    assert_eq!(blob.bytes, 1_000_000);
    assert_eq!(sessions.blob(&id, &blob.id).await.unwrap(), "x".repeat(1_000_000));
    let other = house.session(&sessions, None).await.id;
    let missing = sessions.blob(&other, &blob.id).await;
    assert!(matches!(missing, Err(SessionError::NotFound { .. })), "{missing:?}");
}

#[tokio::test]
async fn an_event_whose_blob_is_not_as_promised_is_kept_without_it() {
    let house = House::new().await;
    let sessions = house.serve().await;
    for prompt in ["long 100000 99999", "long 100000 600000", "long 99999999 1"] {
        let id = house.session(&sessions, Some(prompt)).await.id;
        assert_eq!(blob_of(&sessions, &id).await, None, "{prompt}");
        until_state(&sessions, &id, SessionState::Idle).await;
    }
}

#[tokio::test]
async fn a_blob_that_cannot_be_written_holds_its_event_back_until_it_can() {
    let house = House::new().await;
    let sessions = house.serve().await;
    let id = house.session(&sessions, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    mishaps::break_store(&house, Some("INSERT ON blob_pieces")).await;
    send(&sessions, &id, "long 200000").await;
    until_state(&sessions, &id, SessionState::Running).await;
    // A cut connection on top of it: the event is sent again, and its blob asked for again.
    house.fake.drop_connections(&sandbox(&sessions, &id).await);
    assert!(
        !all(&sessions, &id).await.iter().any(long),
        "an event was seen before its blob was kept"
    );
    mishaps::break_store(&house, None).await;
    let blob = blob_of(&sessions, &id).await.unwrap();
    assert_eq!(sessions.blob(&id, &blob.id).await.unwrap().len(), 200_000);
    assert_eq!(all(&sessions, &id).await.iter().filter(|event| long(event)).count(), 1);
}
