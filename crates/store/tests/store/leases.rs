//! The server lease: of two servers only the newer can write.

use harvest_store::{Store, StoreError};

use crate::test_store::{NOW, TestStore, new_session, on_both, token, warning};

on_both! {
    writes_with_lost_lease_are_refused,
    superseded_server_cannot_write_anything,
    concurrent_servers_get_different_leases,
}

async fn writes_with_lost_lease_are_refused(test: TestStore) {
    let session = test.session().await;
    let newer = test.store.server_lease(NOW).await.unwrap();
    assert!(newer > test.lease);
    assert!(matches!(
        test.commit(&session, vec![warning("late")]).await,
        Err(StoreError::LeaseLost)
    ));
    assert!(matches!(
        test.store.session_insert_all(test.lease, vec![(new_session(), Vec::new())]).await,
        Err(StoreError::LeaseLost)
    ));
    assert!(matches!(
        test.store.session_delete(&session, test.lease, Vec::new(), NOW).await,
        Err(StoreError::LeaseLost)
    ));
    test.store.session_commit(&session, newer, NOW, vec![warning("ours")]).await.unwrap();
    assert_eq!(test.seqs(&session).await, [1]);
}

async fn superseded_server_cannot_write_anything(test: TestStore) {
    let session = test.session().await;
    let newer = test.database.store().await;
    let lease = newer.server_lease(NOW).await.unwrap();
    let older = &test.store;
    assert!(matches!(
        test.commit(&session, vec![warning("late")]).await,
        Err(StoreError::LeaseLost)
    ));
    // These requests carry no lease; the writer checks its own.
    assert!(matches!(older.token_insert("h1", &token("late")).await, Err(StoreError::LeaseLost)));
    assert!(matches!(older.meta_set("k", "v").await, Err(StoreError::LeaseLost)));
    assert!(matches!(older.idempotency_claim("k", "r", NOW).await, Err(StoreError::LeaseLost)));
    assert!(matches!(older.server_lease(NOW).await, Err(StoreError::LeaseLost)));
    assert_eq!(
        newer.session_commit(&session, lease, NOW, vec![warning("ours")]).await.unwrap().seq,
        1
    );
    newer.token_insert("h2", &token("ours")).await.unwrap();
    assert_eq!(newer.token_list().await.unwrap().len(), 1);
}

async fn concurrent_servers_get_different_leases(test: TestStore) {
    let url = test.database.url();
    let all: Vec<_> = (0..8)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move {
                let store = Store::connect(&url).await.unwrap();
                store.server_lease(NOW).await.unwrap().0
            })
        })
        .collect();
    let mut leases = Vec::new();
    for lease in all {
        leases.push(lease.await.unwrap());
    }
    leases.sort_unstable();
    assert_eq!(leases, (2..=9).collect::<Vec<_>>());
}
