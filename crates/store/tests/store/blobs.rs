//! Blobs: whole, bounded per session, gone with it.

use harvest_proto::BlobId;
use harvest_store::StoreError;

use crate::home::{Home, NOW, on_both};

on_both! {
    a_blob_comes_back_whole_and_goes_with_its_session,
    blobs_beyond_a_sessions_quota_are_not_kept_and_a_lost_lease_keeps_none,
}

async fn a_blob_comes_back_whole_and_goes_with_its_session(home: Home) {
    let session = home.session().await;
    let (id, text) = (BlobId::random(), "zero \0, é and ☃\n".repeat(20_000));
    let put = |text: String| home.store.blob_put(&session, home.lease, &id, text, 1 << 20, NOW);
    assert!(put(text.clone()).await.unwrap());
    // Sent again after a reconnect: what is there stays.
    assert!(put(String::new()).await.unwrap());
    assert!(home.store.blob_get(&session, &id).await.unwrap() == text);
    let other = home.session().await;
    assert!(matches!(home.store.blob_get(&other, &id).await, Err(StoreError::NotFound { .. })));
    home.store.session_delete(&session, home.lease, Vec::new(), NOW).await.unwrap();
    assert!(matches!(home.store.blob_get(&session, &id).await, Err(StoreError::NotFound { .. })));
    assert!(matches!(put(text).await, Err(StoreError::NotFound { .. })));
}

async fn blobs_beyond_a_sessions_quota_are_not_kept_and_a_lost_lease_keeps_none(home: Home) {
    let session = home.session().await;
    let put = async |bytes: usize, lease| {
        home.store.blob_put(&session, lease, &BlobId::random(), "x".repeat(bytes), 100, NOW).await
    };
    assert!(put(60, home.lease).await.unwrap());
    assert!(!put(41, home.lease).await.unwrap());
    assert!(put(40, home.lease).await.unwrap());
    assert!(put(0, home.lease).await.unwrap());
    assert!(!put(1, home.lease).await.unwrap());
    let newer = home.store.server_lease(NOW).await.unwrap();
    assert!(matches!(put(0, home.lease).await, Err(StoreError::LeaseLost)));
    assert!(put(0, newer).await.unwrap());
}
