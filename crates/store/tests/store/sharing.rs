//! Requests that share a transaction do not share their troubles.

use harvest_proto::{PromptId, SessionId};
use harvest_store::StoreError;

use crate::home::{Home, NOW, new_session, on_both, prompt, warning};

on_both! {
    a_failing_request_does_not_spoil_the_others_of_its_group,
    a_caller_that_goes_away_leaves_no_transaction_open,
    what_is_answered_is_there_after_opening_again,
    everything_asked_for_before_the_end_is_written,
    a_closed_store_says_so,
    readers_do_not_wait_for_the_writer,
}

async fn a_failing_request_does_not_spoil_the_others_of_its_group(home: Home) {
    let (good, gone) = (home.session().await, SessionId::random());
    let duplicate = PromptId::random();
    let results = tokio::join!(
        home.commit(&good, vec![warning("one")]),
        home.commit(&gone, vec![warning("nowhere")]),
        home.commit(&good, vec![prompt(&duplicate)]),
        home.commit(&good, vec![warning("rolled back"), prompt(&duplicate)]),
        home.commit(&good, vec![warning("two")]),
        home.commit(&gone, vec![warning("the last one fails, too")]),
    );
    assert!(results.0.is_ok() && results.2.is_ok() && results.4.is_ok());
    assert!(matches!(results.1, Err(StoreError::NotFound { .. })));
    assert!(matches!(results.3, Err(StoreError::Exists { .. })), "{:?}", results.3);
    assert!(matches!(results.5, Err(StoreError::NotFound { .. })));
    assert_eq!(home.seqs(&good).await, [1, 2, 3]);
}

async fn a_caller_that_goes_away_leaves_no_transaction_open(home: Home) {
    let session = home.session().await;
    for _ in 0..20 {
        let commit = home.commit(&session, vec![warning("w")]);
        // Polled once, so that it is on its way, then dropped.
        tokio::select! { biased; _ = commit => {}, () = std::future::ready(()) => {} }
    }
    assert_eq!(home.commit(&session, vec![warning("last")]).await.unwrap(), 21);
}

async fn what_is_answered_is_there_after_opening_again(home: Home) {
    let session = home.session().await;
    let id = PromptId::random();
    home.commit(&session, vec![prompt(&id)]).await.unwrap();
    // Not closed on purpose: it is opened a second time as it would be after a kill.
    let again = home.kept.store().await;
    assert_eq!(again.prompt_get(&session, &id).await.unwrap().seq, 1);
    assert_eq!(again.server_lease(NOW).await.unwrap().0, home.lease.0 + 1);
}

async fn everything_asked_for_before_the_end_is_written(home: Home) {
    let session = home.session().await;
    let asked: Vec<_> = (0..300)
        .map(|n| {
            let (store, session, lease) = (home.store.clone(), session.clone(), home.lease);
            tokio::spawn(async move {
                store.session_commit(&session, lease, NOW, vec![warning(&n.to_string())]).await
            })
        })
        .collect();
    // Until each has been polled once: its request waits then.
    for _ in 0..300 {
        tokio::task::yield_now().await;
    }
    home.store.close().await;
    for one in asked {
        one.await.unwrap().unwrap();
    }
    let again = home.kept.store().await;
    assert_eq!(again.session_get(&session).await.unwrap().session.seq, 300);
}

async fn a_closed_store_says_so(home: Home) {
    let session = home.session().await;
    home.store.close().await;
    home.store.close().await;
    assert!(matches!(home.commit(&session, vec![warning("w")]).await, Err(StoreError::Closed)));
}

async fn readers_do_not_wait_for_the_writer(home: Home) {
    let session = home.session().await;
    let mut other = home.kept.raw().await;
    home.kept.hold_writers(&mut other).await;
    let mut writing = Box::pin(home.store.session_insert(home.lease, new_session(), Vec::new()));
    for _ in 0..20 {
        let read = tokio::select! {
            biased;
            _ = &mut writing => panic!("two writers at once"),
            read = home.store.session_get(&session) => read,
        };
        assert_eq!(read.unwrap().session.id, session);
    }
    sqlx::raw_sql("ROLLBACK").execute(&mut other).await.unwrap();
    writing.await.unwrap();
}
