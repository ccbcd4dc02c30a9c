//! Events: numbers without gap or repeat, and reading them from either end.

use harvest_proto::{EventBody, SessionId};
use harvest_store::StoreError;

use crate::home::{Home, NOW, on_both, outbox, warning};

on_both! {
    fifty_writers_give_numbers_without_gap_or_repeat,
    any_number_of_events_is_appended_in_order,
    an_event_sent_again_is_stored_once_and_a_skipped_one_is_refused,
    every_sandbox_counts_its_outbox_by_itself,
    followers_see_only_what_is_stored_and_in_order,
    events_are_read_from_either_end_without_overlap,
    reading_events_never_looks_at_those_not_asked_for,
}

async fn fifty_writers_give_numbers_without_gap_or_repeat(home: Home) {
    let (one, two) = (home.session().await, home.session().await);
    let all = (0..50).map(|writer| {
        let (store, lease) = (home.store.clone(), home.lease);
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
        assert_eq!(home.seqs(&session).await, (1..=250).collect::<Vec<_>>());
        assert_eq!(home.store.session_get(&session).await.unwrap().session.seq, 250);
    }
}

async fn any_number_of_events_is_appended_in_order(home: Home) {
    let session = home.session().await;
    let mut sent = 0;
    for count in [1, 2, 3, 63, 64, 65, 127, 200] {
        let writes = (sent + 1..=sent + count).map(outbox).collect();
        sent += count;
        assert_eq!(home.commit(&session, writes).await.unwrap(), sent);
    }
    let events = home.store.event_list(&session, 0, 1000).await.unwrap();
    for (at, event) in (1..=sent).zip(&events) {
        assert_eq!((event.seq, &event.body), (at, &EventBody::TextDelta { text: at.to_string() }));
    }
    assert_eq!(events.len() as u64, sent);
}

async fn an_event_sent_again_is_stored_once_and_a_skipped_one_is_refused(home: Home) {
    let session = home.session().await;
    home.commit(&session, vec![outbox(1), outbox(2)]).await.unwrap();
    home.commit(&session, vec![outbox(1), outbox(2), outbox(3)]).await.unwrap();
    assert!(matches!(
        home.commit(&session, vec![outbox(4), outbox(6)]).await,
        Err(StoreError::OutboxGap { number: 6, stored: 4, .. })
    ));
    assert_eq!(
        home.store.outbox_stored(&session, 1).await.unwrap(),
        3,
        "nothing of a refused list is kept"
    );
    assert_eq!(home.store.outbox_stored(&session, 2).await.unwrap(), 0);
    assert_eq!(home.seqs(&session).await, [1, 2, 3]);
}

async fn every_sandbox_counts_its_outbox_by_itself(home: Home) {
    let session = home.session().await;
    let of = |epoch: u64, number: u64| match outbox(number) {
        harvest_store::Write::Outbox { event, .. } => harvest_store::Write::Outbox { epoch, event },
        other => other,
    };
    home.commit(&session, vec![of(1, 1), of(2, 1), of(1, 2), of(2, 2), of(2, 2), of(1, 2)])
        .await
        .unwrap();
    assert_eq!(home.store.outbox_stored(&session, 1).await.unwrap(), 2);
    assert_eq!(home.store.outbox_stored(&session, 2).await.unwrap(), 2);
    assert_eq!(home.seqs(&session).await, [1, 2, 3, 4]);
}

async fn followers_see_only_what_is_stored_and_in_order(home: Home) {
    let session = home.session().await;
    let mut follower = home.store.event_follow(&session);
    for n in 0..50 {
        home.commit(&session, vec![warning(&n.to_string())]).await.unwrap();
    }
    assert!(home.commit(&session, vec![warning("not kept"), outbox(7)]).await.is_err());
    home.commit(&session, vec![warning("last")]).await.unwrap();
    for seq in 1..=51 {
        assert_eq!(follower.recv().await.unwrap().seq, seq);
    }
}

async fn events_are_read_from_either_end_without_overlap(home: Home) {
    let (session, other) = (home.session().await, home.session().await);
    home.commit(&session, (1..=100).map(outbox).collect()).await.unwrap();
    home.commit(&other, (1..=100).map(outbox).collect()).await.unwrap();
    let (mut pages, mut before) = (Vec::new(), u64::MAX);
    loop {
        let page = home.store.event_newest(&session, before, 30).await.unwrap();
        let Some(first) = page.first() else { break };
        before = first.seq;
        pages.splice(0..0, page.into_iter().map(|event| event.seq));
    }
    assert_eq!(pages, (1..=100).collect::<Vec<_>>());
    let range: Vec<u64> =
        home.store.event_list(&other, 40, 3).await.unwrap().iter().map(|event| event.seq).collect();
    assert_eq!(range, [41, 42, 43]);
    assert_eq!(home.store.event_list(&SessionId::random(), 0, 3).await.unwrap(), []);
}

async fn reading_events_never_looks_at_those_not_asked_for(home: Home) {
    let session = home.session().await;
    for chunk in 0..10 {
        home.commit(&session, (chunk * 200 + 1..=chunk * 200 + 200).map(outbox).collect())
            .await
            .unwrap();
    }
    for (word, order) in [(">", "seq"), ("<", "seq DESC")] {
        let sql = format!(
            "SELECT body FROM events WHERE session = $1 AND seq {word} $2 ORDER BY {order} LIMIT 50"
        );
        let plan = home.kept.plan(&sql, &session).await;
        assert!(
            plan.contains("events_pkey") || plan.contains("sqlite_autoindex_events_1"),
            "{plan}"
        );
        assert!(!plan.to_lowercase().contains("sort") && !plan.contains("TEMP B-TREE"), "{plan}");
    }
}
