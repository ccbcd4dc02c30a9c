//! Group commit: requests in one transaction do not affect each other.

use harvest_proto::{PromptId, SessionId};
use harvest_store::StoreError;

use crate::test_store::{NOW, TestStore, new_session, on_both, prompt, warning};

on_both! {
    failing_request_does_not_affect_its_group,
    dropped_caller_leaves_no_open_transaction,
    acknowledged_write_survives_reopening,
    everything_requests_for_before_the_end_is_written,
    closed_store_refuses_writes,
    readers_do_not_wait_for_the_writer,
}

async fn failing_request_does_not_affect_its_group(test: TestStore) {
    let (good, gone) = (test.session().await, SessionId::random());
    let duplicate = PromptId::random();
    let results = tokio::join!(
        test.commit(&good, vec![warning("one")]),
        test.commit(&gone, vec![warning("nowhere")]),
        test.commit(&good, vec![prompt(&duplicate)]),
        test.commit(&good, vec![warning("rolled back"), prompt(&duplicate)]),
        test.commit(&good, vec![warning("two")]),
        test.commit(&gone, vec![warning("the last one fails, too")]),
    );
    assert!(results.0.is_ok() && results.2.is_ok() && results.4.is_ok());
    assert!(matches!(results.1, Err(StoreError::NotFound { .. })));
    assert!(matches!(results.3, Err(StoreError::Exists { .. })), "{:?}", results.3);
    assert!(matches!(results.5, Err(StoreError::NotFound { .. })));
    assert_eq!(test.seqs(&good).await, [1, 2, 3]);
}

async fn dropped_caller_leaves_no_open_transaction(test: TestStore) {
    let session = test.session().await;
    for _ in 0..20 {
        let commit = test.commit(&session, vec![warning("w")]);
        // Polled once, so that the request is sent, then dropped.
        tokio::select! { biased; _ = commit => {}, () = std::future::ready(()) => {} }
    }
    assert_eq!(test.commit(&session, vec![warning("last")]).await.unwrap(), 21);
}

async fn acknowledged_write_survives_reopening(test: TestStore) {
    let session = test.session().await;
    let id = PromptId::random();
    test.commit(&session, vec![prompt(&id)]).await.unwrap();
    // Not closed on purpose: reopened as after a kill.
    let again = test.database.store().await;
    assert_eq!(again.prompt_get(&session, &id).await.unwrap().seq, 1);
    assert_eq!(again.server_lease(NOW).await.unwrap().0, test.lease.0 + 1);
}

async fn everything_requests_for_before_the_end_is_written(test: TestStore) {
    let session = test.session().await;
    let requests: Vec<_> = (0..300)
        .map(|n| {
            let (store, session, lease) = (test.store.clone(), session.clone(), test.lease);
            tokio::spawn(async move {
                store.session_commit(&session, lease, NOW, vec![warning(&n.to_string())]).await
            })
        })
        .collect();
    // Until each task has been polled once and has sent its request.
    for _ in 0..300 {
        tokio::task::yield_now().await;
    }
    test.store.close().await;
    for one in requests {
        one.await.unwrap().unwrap();
    }
    let again = test.database.store().await;
    assert_eq!(again.session_get(&session).await.unwrap().session.seq, 300);
}

async fn closed_store_refuses_writes(test: TestStore) {
    let session = test.session().await;
    test.store.close().await;
    test.store.close().await;
    assert!(matches!(test.commit(&session, vec![warning("w")]).await, Err(StoreError::Closed)));
}

async fn readers_do_not_wait_for_the_writer(test: TestStore) {
    let session = test.session().await;
    let mut other = test.database.raw().await;
    test.database.hold_writers(&mut other).await;
    let mut writing =
        Box::pin(test.store.session_insert_all(test.lease, vec![(new_session(), Vec::new())]));
    for _ in 0..20 {
        let read = tokio::select! {
            biased;
            _ = &mut writing => panic!("two writers at once"),
            read = test.store.session_get(&session) => read,
        };
        assert_eq!(read.unwrap().session.id, session);
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    writing.await.unwrap();
}

/// PostgreSQL vacuums by itself.
#[tokio::test]
async fn sqlite_file_shrinks_after_deletion() {
    let test = TestStore::sqlite().await;
    let session = test.session().await;
    for _ in 0..16 {
        test.commit(&session, vec![warning(&"x".repeat(1 << 20))]).await.unwrap();
    }
    test.store.session_delete(&session, test.lease, Vec::new(), NOW).await.unwrap();
    harvest_e2e::eventually("the file to shrink", async || {
        let bytes = std::fs::metadata(test.database.file()).unwrap().len();
        (bytes < 6 << 20).then_some(())
    })
    .await;
    let other = test.session().await;
    assert_eq!(test.commit(&other, vec![warning("still works")]).await.unwrap(), 1);
}
