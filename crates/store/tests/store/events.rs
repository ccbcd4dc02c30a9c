//! Events: numbered without gaps or repeats.

use harvest_proto::{EventBody, SessionId, TurnId};
use harvest_store::{StoreError, Write};

use crate::test_store::{NOW, TestStore, on_both, outbox, warning};

on_both! {
    concurrent_writers_number_events_without_gaps,
    any_number_of_events_is_appended_in_order,
    repeated_event_is_ignored_and_gap_refused,
    each_epoch_has_its_own_outbox_numbers,
    followers_see_stored_events_in_order,
    events_are_listed_after_a_number,
    page_of_large_events_ends_early,
    event_queries_use_the_primary_key,
    skipped_event_is_not_sent_again,
    history_size_is_the_size_of_its_events,
    turn_history_counts_only_its_events,
    event_is_found_by_turn_and_content,
}

async fn concurrent_writers_number_events_without_gaps(test: TestStore) {
    let (one, two) = (test.session().await, test.session().await);
    let all = (0..50).map(|writer| {
        let (store, lease) = (test.store.clone(), test.lease);
        let session = if writer % 2 == 0 { one.clone() } else { two.clone() };
        tokio::spawn(async move {
            let mut last = 0;
            for turn in 0..4 {
                let writes = (0..=turn).map(|n| warning(&format!("{writer}.{turn}.{n}"))).collect();
                let done = store.session_commit(&session, lease, NOW, writes).await.unwrap();
                let seqs: Vec<u64> = done.events.iter().map(|event| event.seq).collect();
                assert_eq!(seqs, (done.seq - turn..=done.seq).collect::<Vec<_>>(), "one piece");
                assert!(seqs[0] > last);
                last = done.seq;
            }
        })
    });
    for done in all.collect::<Vec<_>>() {
        done.await.unwrap();
    }
    for session in [one, two] {
        assert_eq!(test.seqs(&session).await, (1..=250).collect::<Vec<_>>());
        assert_eq!(test.store.session_get(&session).await.unwrap().session.seq, 250);
    }
}

async fn any_number_of_events_is_appended_in_order(test: TestStore) {
    let session = test.session().await;
    let mut sent = 0;
    for count in [1, 2, 3, 63, 64, 65, 127, 200] {
        let writes = (sent + 1..=sent + count).map(outbox).collect();
        sent += count;
        assert_eq!(test.commit(&session, writes).await.unwrap(), sent);
    }
    let events = test.store.event_list(&session, 0, 1000).await.unwrap();
    for (at, event) in (1..=sent).zip(&events) {
        assert_eq!((event.seq, &event.body), (at, &EventBody::TextDelta { text: at.to_string() }));
    }
    assert_eq!(events.len() as u64, sent);
}

async fn repeated_event_is_ignored_and_gap_refused(test: TestStore) {
    let session = test.session().await;
    test.commit(&session, vec![outbox(1), outbox(2)]).await.unwrap();
    test.commit(&session, vec![outbox(1), outbox(2), outbox(3)]).await.unwrap();
    assert!(matches!(
        test.commit(&session, vec![outbox(4), outbox(6)]).await,
        Err(StoreError::OutboxGap { number: 6, stored: 4, .. })
    ));
    assert_eq!(
        test.store.outbox_stored(&session, 1).await.unwrap(),
        3,
        "a refused list is rolled back"
    );
    assert_eq!(test.store.outbox_stored(&session, 2).await.unwrap(), 0);
    assert_eq!(test.seqs(&session).await, [1, 2, 3]);
}

async fn each_epoch_has_its_own_outbox_numbers(test: TestStore) {
    let session = test.session().await;
    let of = |epoch: u64, number: u64| match outbox(number) {
        harvest_store::Write::Outbox { event, .. } => harvest_store::Write::Outbox { epoch, event },
        other => other,
    };
    test.commit(&session, vec![of(1, 1), of(2, 1), of(1, 2), of(2, 2), of(2, 2), of(1, 2)])
        .await
        .unwrap();
    assert_eq!(test.store.outbox_stored(&session, 1).await.unwrap(), 2);
    assert_eq!(test.store.outbox_stored(&session, 2).await.unwrap(), 2);
    assert_eq!(test.seqs(&session).await, [1, 2, 3, 4]);
}

async fn followers_see_stored_events_in_order(test: TestStore) {
    let session = test.session().await;
    let mut follower = test.store.event_follow(&session);
    for n in 0..50 {
        test.commit(&session, vec![warning(&n.to_string())]).await.unwrap();
    }
    assert!(test.commit(&session, vec![warning("rolled back"), outbox(7)]).await.is_err());
    test.commit(&session, vec![warning("last")]).await.unwrap();
    for seq in 1..=51 {
        assert_eq!(follower.recv().await.unwrap().seq, seq);
    }
}

async fn events_are_listed_after_a_number(test: TestStore) {
    let (session, other) = (test.session().await, test.session().await);
    test.commit(&session, (1..=100).map(outbox).collect()).await.unwrap();
    test.commit(&other, (1..=100).map(outbox).collect()).await.unwrap();
    assert_eq!(test.seqs(&session).await, (1..=100).collect::<Vec<_>>());
    let range: Vec<u64> =
        test.store.event_list(&other, 40, 3).await.unwrap().iter().map(|event| event.seq).collect();
    assert_eq!(range, [41, 42, 43]);
    assert_eq!(test.store.event_list(&SessionId::random(), 0, 3).await.unwrap(), []);
}

async fn page_of_large_events_ends_early(test: TestStore) {
    let session = test.session().await;
    let large = "x".repeat(100_000);
    for _ in 0..10 {
        test.commit(&session, vec![warning(&large)]).await.unwrap();
    }
    assert_eq!(test.store.event_list(&session, 0, 1000).await.unwrap().len(), 2);
    assert_eq!(test.seqs(&session).await, (1..=10).collect::<Vec<_>>());
    test.commit(&session, vec![warning(&large.repeat(10))]).await.unwrap();
    assert_eq!(test.store.event_list(&session, 10, 1000).await.unwrap().len(), 1, "at least one");
}

async fn event_queries_use_the_primary_key(test: TestStore) {
    let session = test.session().await;
    for chunk in 0..10 {
        test.commit(&session, (chunk * 200 + 1..=chunk * 200 + 200).map(outbox).collect())
            .await
            .unwrap();
    }
    let sql = "SELECT body FROM events WHERE session = $1 AND seq > $2 ORDER BY seq LIMIT 50";
    let plan = test.database.plan(sql, &session).await;
    assert!(plan.contains("events_pkey") || plan.contains("sqlite_autoindex_events_1"), "{plan}");
    assert!(!plan.to_lowercase().contains("sort") && !plan.contains("TEMP B-TREE"), "{plan}");
}

async fn skipped_event_is_not_sent_again(test: TestStore) {
    let session = test.session().await;
    let skip = |number| Write::OutboxSkip { epoch: 1, number };
    test.commit(&session, vec![outbox(1), skip(2), skip(3)]).await.unwrap();
    assert_eq!(test.store.outbox_stored(&session, 1).await.unwrap(), 3);
    test.commit(&session, vec![skip(3), outbox(4)]).await.unwrap();
    assert_eq!(test.seqs(&session).await, [1, 2], "the numbers of events have no gap");
    assert!(test.commit(&session, vec![skip(6)]).await.is_err(), "a gap is a lost event");
}

async fn history_size_is_the_size_of_its_events(test: TestStore) {
    let (one, two) = (test.session().await, test.session().await);
    // Alone, in a batch, and with another write.
    test.commit(&one, vec![warning("first: 日本語")]).await.unwrap();
    let (a, b) = tokio::join!(
        test.commit(&one, vec![warning("second"), warning("third")]),
        test.commit(&two, vec![warning("other")]),
    );
    a.and(b).unwrap();
    test.commit(&one, vec![warning("fourth"), Write::Title("t".into())]).await.unwrap();
    for session in [one, two] {
        let events = test.store.event_list(&session, 0, 10).await.unwrap();
        let size = |event: &harvest_proto::Event| serde_json::to_string(&event.body).unwrap().len();
        let bytes = events.iter().map(size).sum::<usize>() as u64;
        assert_eq!(test.store.session_history_bytes(&session).await.unwrap(), Some(bytes));
    }
}

async fn turn_history_counts_only_its_events(test: TestStore) {
    let (session, turn) = (test.session().await, TurnId::random());
    let body = EventBody::TextDelta { text: "日本語".into() };
    let of = |turn: &TurnId| Write::Event {
        at: NOW,
        turn: Some(turn.clone()),
        body: Box::new(body.clone()),
    };
    let writes = vec![of(&turn), of(&TurnId::random()), warning("none"), of(&turn)];
    test.commit(&session, writes).await.unwrap();
    let bytes = serde_json::to_string(&body).unwrap().len() as u64;
    assert_eq!(test.store.turn_history(&session, &turn).await.unwrap(), (2 * bytes, 2));
    assert_eq!(test.store.turn_history(&session, &TurnId::random()).await.unwrap(), (0, 0));
}

async fn event_is_found_by_turn_and_content(test: TestStore) {
    let (session, other, turn) = (test.session().await, test.session().await, TurnId::random());
    let body = |message: &str| EventBody::Warning { message: message.into() };
    let of_turn = Write::Event { at: NOW, turn: Some(turn.clone()), body: Box::new(body("limit")) };
    test.commit(&session, vec![warning("torn"), of_turn]).await.unwrap();
    for (of, turn, message, found) in [
        (&session, None, "torn", true),
        (&session, Some(&turn), "limit", true),
        (&session, None, "limit", false),
        (&session, Some(&TurnId::random()), "limit", false),
        (&session, Some(&turn), "torn", false),
        (&other, None, "torn", false),
    ] {
        let exists = test.store.event_exists(of, turn, &body(message)).await.unwrap();
        assert_eq!(exists, found, "{turn:?} {message}");
    }
}
