//! kill -9 during concurrent writes.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use harvest_proto::{EventBody, SessionId};
use harvest_store::Lease;

use super::run_ignored;
use crate::test_store::{NOW, TestStore, all_events, on_both, warning};

on_both! { a_kill_in_the_middle_loses_nothing_that_was_acknowledged }

const EVENTS_PER_COMMIT: u64 = 3;

async fn a_kill_in_the_middle_loses_nothing_that_was_acknowledged(test: TestStore) {
    let session = test.session().await;
    let mut child = run_ignored("faults::kills::child_process_that_writes")
        .env("HARVEST_TEST_DATABASE", test.database.text())
        .env("HARVEST_TEST_SESSION", format!("{session} {}", test.lease.0))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seq = |line: String| line.strip_prefix("stored ").and_then(|seq| seq.parse::<u64>().ok());
    let mut acknowledged: Vec<u64> = lines.by_ref().filter_map(seq).take(40).collect();
    child.kill().unwrap();
    acknowledged.extend(lines.filter_map(seq));
    child.wait().unwrap();
    assert!(acknowledged.len() >= 40, "the child exited early");

    let reopened = test.database.store().await;
    let events = all_events(&reopened, &session).await;
    assert_eq!(
        events.iter().map(|event| event.seq).collect::<Vec<_>>(),
        (1..=events.len() as u64).collect::<Vec<_>>()
    );
    assert!(
        acknowledged.iter().all(|seq| *seq <= events.len() as u64),
        "an acknowledged event is missing"
    );
    let message = |body: &EventBody| match body {
        EventBody::Warning { message } => message.clone(),
        other => panic!("{other:?}"),
    };
    for whole in events.chunks(usize::try_from(EVENTS_PER_COMMIT).unwrap()) {
        assert_eq!(whole.len() as u64, EVENTS_PER_COMMIT, "a commit is incomplete");
        assert!(whole.iter().all(|event| message(&event.body) == message(&whole[0].body)));
    }
    let lease = reopened.server_lease(NOW).await.unwrap();
    let next = reopened.session_commit(&session, lease, NOW, vec![warning("next")]).await.unwrap();
    assert_eq!(next.seq, events.len() as u64 + 1);
}

#[tokio::test]
#[ignore = "started and killed by another test"]
async fn child_process_that_writes() {
    let store = harvest_store::Store::connect(
        &std::env::var("HARVEST_TEST_DATABASE").expect("set by the other test").parse().unwrap(),
    )
    .await
    .unwrap();
    let values = std::env::var("HARVEST_TEST_SESSION").unwrap();
    let (session, lease) = values.split_once(' ').unwrap();
    let (session, lease): (SessionId, _) =
        (session.parse().unwrap(), Lease(lease.parse().unwrap()));
    let writers = (0..5).map(|writer| {
        let (store, session) = (store.clone(), session.clone());
        tokio::spawn(async move {
            for round in 0..100_000 {
                let writes =
                    (0..EVENTS_PER_COMMIT).map(|_| warning(&format!("{writer} {round}"))).collect();
                println!(
                    "stored {}",
                    store.session_commit(&session, lease, NOW, writes).await.unwrap().seq
                );
            }
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await.unwrap();
    }
}
