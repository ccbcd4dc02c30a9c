//! The server lease: of two servers the newer one writes.

use harvest_store::{Store, StoreError};

use crate::home::{Home, NOW, new_session, on_both, token, warning};

on_both! {
    who_lost_the_lease_writes_nothing_more,
    the_older_of_two_servers_is_refused_whatever_it_writes,
    servers_that_start_at_once_get_different_leases,
}

async fn who_lost_the_lease_writes_nothing_more(home: Home) {
    let session = home.session().await;
    let newer = home.store.server_lease(NOW).await.unwrap();
    assert!(newer > home.lease);
    assert!(matches!(
        home.commit(&session, vec![warning("late")]).await,
        Err(StoreError::LeaseLost)
    ));
    assert!(matches!(
        home.store.session_insert(home.lease, new_session(), Vec::new()).await,
        Err(StoreError::LeaseLost)
    ));
    assert!(matches!(
        home.store.session_delete(&session, home.lease, Vec::new(), NOW).await,
        Err(StoreError::LeaseLost)
    ));
    home.store.session_commit(&session, newer, NOW, vec![warning("ours")]).await.unwrap();
    assert_eq!(home.seqs(&session).await, [1]);
}

async fn the_older_of_two_servers_is_refused_whatever_it_writes(home: Home) {
    let session = home.session().await;
    let newer = home.kept.store().await;
    let lease = newer.server_lease(NOW).await.unwrap();
    let older = &home.store;
    assert!(matches!(
        home.commit(&session, vec![warning("late")]).await,
        Err(StoreError::LeaseLost)
    ));
    // These carry no lease; the writer knows it all the same.
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

async fn servers_that_start_at_once_get_different_leases(home: Home) {
    let url = home.kept.url();
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
