//! Blobs: complete, limited per session, deleted with it.

use harvest_proto::BlobId;
use harvest_store::StoreError;

use crate::test_store::{NOW, TestStore, on_both};

on_both! {
    blob_is_complete_and_deleted_with_session,
    blob_beyond_quota_or_lease_is_refused,
}

async fn blob_is_complete_and_deleted_with_session(test: TestStore) {
    let session = test.session().await;
    let (id, text) = (BlobId::random(), "zero \0, é and ☃\n".repeat(20_000));
    let put = |text: String| test.store.blob_put(&session, test.lease, &id, text, 1 << 20, NOW);
    assert!(put(text.clone()).await.unwrap());
    // Sent again after a reconnect: the stored blob stays.
    assert!(put(String::new()).await.unwrap());
    assert!(test.store.blob_get(&session, &id).await.unwrap() == text);
    let other = test.session().await;
    assert!(matches!(test.store.blob_get(&other, &id).await, Err(StoreError::NotFound { .. })));
    test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    assert!(matches!(test.store.blob_get(&session, &id).await, Err(StoreError::NotFound { .. })));
    assert!(matches!(put(text).await, Err(StoreError::NotFound { .. })));
}

async fn blob_beyond_quota_or_lease_is_refused(test: TestStore) {
    let session = test.session().await;
    let put = async |bytes: usize, lease| {
        test.store.blob_put(&session, lease, &BlobId::random(), "x".repeat(bytes), 100, NOW).await
    };
    assert!(put(60, test.lease).await.unwrap());
    assert!(!put(41, test.lease).await.unwrap());
    assert!(put(40, test.lease).await.unwrap());
    assert!(put(0, test.lease).await.unwrap());
    assert!(!put(1, test.lease).await.unwrap());
    let newer = test.store.server_lease(NOW).await.unwrap();
    assert!(matches!(put(0, test.lease).await, Err(StoreError::LeaseLost)));
    assert!(put(0, newer).await.unwrap());
}
