//! kill -9 while many write.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use harvest_proto::{EventBody, SessionId};
use harvest_store::Lease;

use super::again;
use crate::home::{Home, NOW, on_both, warning};

on_both! { a_kill_in_the_middle_loses_nothing_that_was_answered }

const PIECES: u64 = 3;

async fn a_kill_in_the_middle_loses_nothing_that_was_answered(home: Home) {
    let session = home.session().await;
    let mut child = again("faults::kills::a_process_that_writes")
        .env("HARVEST_TEST_DATABASE", home.kept.text())
        .env("HARVEST_TEST_SESSION", format!("{session} {}", home.lease.0))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let seq = |line: String| line.strip_prefix("stored ").and_then(|seq| seq.parse::<u64>().ok());
    let mut answered: Vec<u64> = lines.by_ref().filter_map(seq).take(40).collect();
    child.kill().unwrap();
    answered.extend(lines.filter_map(seq));
    child.wait().unwrap();
    assert!(answered.len() >= 40, "the child ended by itself");

    let again = home.kept.store().await;
    let events = again.event_list(&session, 0, 100_000).await.unwrap();
    assert_eq!(
        events.iter().map(|event| event.seq).collect::<Vec<_>>(),
        (1..=events.len() as u64).collect::<Vec<_>>()
    );
    assert!(answered.iter().all(|seq| *seq <= events.len() as u64), "answered and not there");
    let message = |body: &EventBody| match body {
        EventBody::Warning { message } => message.clone(),
        other => panic!("{other:?}"),
    };
    for whole in events.chunks(usize::try_from(PIECES).unwrap()) {
        assert_eq!(whole.len() as u64, PIECES, "half a commit");
        assert!(whole.iter().all(|event| message(&event.body) == message(&whole[0].body)));
    }
    let lease = again.server_lease(NOW).await.unwrap();
    let next = again.session_commit(&session, lease, NOW, vec![warning("goes on")]).await.unwrap();
    assert_eq!(next.seq, events.len() as u64 + 1);
}

#[tokio::test]
#[ignore = "started and killed by another test"]
async fn a_process_that_writes() {
    let store = harvest_store::Store::connect(
        &std::env::var("HARVEST_TEST_DATABASE").expect("set by the other test").parse().unwrap(),
    )
    .await
    .unwrap();
    let words = std::env::var("HARVEST_TEST_SESSION").unwrap();
    let (session, lease) = words.split_once(' ').unwrap();
    let (session, lease): (SessionId, _) =
        (session.parse().unwrap(), Lease(lease.parse().unwrap()));
    let writers = (0..5).map(|writer| {
        let (store, session) = (store.clone(), session.clone());
        tokio::spawn(async move {
            for round in 0..100_000 {
                let writes = (0..PIECES).map(|_| warning(&format!("{writer} {round}"))).collect();
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
