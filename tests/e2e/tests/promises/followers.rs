//! Event stream clients: many at once, and some that do not read.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::join_all;
use harvest_e2e::{Host, most_memory};
use harvest_proto::SessionId;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{completed, turn_ended};

/// Requests a session's events on a new connection without reading the response.
async fn stalled(host: &Host, session: &SessionId) -> TcpStream {
    let url = host.url().unwrap();
    let address = url.trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.unwrap();
    let head = format!(
        "GET /v1/sessions/{session}/events HTTP/1.1\r\nhost: {address}\r\nauthorization: Bearer {}\r\n\
         accept: text/event-stream\r\n\r\n",
        host.token()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream
}

/// Reads the sequence numbers of the complete events received so far.
async fn numbers(stream: &mut TcpStream, last: u64) -> Vec<u64> {
    let (mut text, mut piece) = (String::new(), vec![0; 1 << 20]);
    let whole = |text: &str| {
        text.ends_with("\n\n") || text.ends_with("\r\n\r\n") || text.contains("\n\n\r\n")
    };
    while !(text.contains(&format!("id: {last}\n")) && whole(&text)) {
        match tokio::time::timeout(Duration::from_secs(20), stream.read(&mut piece)).await {
            Ok(Ok(count)) if count > 0 => text.push_str(&String::from_utf8_lossy(&piece[..count])),
            _ => break,
        }
    }
    text.lines().filter_map(|line| line.strip_prefix("id: ")?.trim().parse().ok()).collect()
}

#[tokio::test]
async fn stalled_reader_costs_no_memory_and_misses_nothing() {
    let host = Host::start().await;
    let session = host.bare("Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;
    let mut readers = Vec::new();
    for _ in 0..30 {
        readers.push(stalled(&host, &session).await);
    }
    // 20 MB of events, much more than the socket buffers hold.
    let say = json!({ "bash": "head -c 60000 /dev/zero | tr '\\0' x" });
    let script: Vec<_> = std::iter::repeat_n(say, 100).collect();
    let mut after = host.show(&session).await.seq;
    let before = most_memory(host.server()).unwrap();
    let mut follower = host.follow(session.clone());
    for _ in 0..3 {
        host.prompt(&session, "Say a lot.", &json!(script)).await;
        after = follower.after(after, "the turn to end", turn_ended).await.seq;
    }
    let grown = most_memory(host.server()).unwrap().saturating_sub(before);
    println!("the server grew by {} MB", grown >> 20);
    assert!(grown < 80 << 20, "it grew by {grown} bytes");
    // One client resumes reading; another reconnects with its cursor.
    let mut awake = readers.pop().unwrap();
    let seen = numbers(&mut awake, after).await;
    assert!(
        seen.len() as u64 >= after,
        "everything comes, though it is late: {} of {after}",
        seen.len()
    );
    assert!(seen.iter().copied().eq(1..=seen.len() as u64), "in order: {seen:?}");
    drop(readers);
    let answer = host.get(&format!("/v1/sessions/{session}/events"));
    let answer = answer
        .header("accept", "text/event-stream")
        .header("last-event-id", (after - 5).to_string());
    let mut answer = answer.send().await.unwrap();
    let mut text = String::new();
    while !text.contains(&format!("id: {after}\n")) {
        text.push_str(&String::from_utf8_lossy(&answer.chunk().await.unwrap().unwrap()));
    }
    assert!(
        text.contains(&format!("id: {}\n", after - 4))
            && !text.contains(&format!("id: {}\n", after - 5))
    );
}

#[tokio::test]
async fn hundred_followers_each_see_every_event_once() {
    let host = Host::start().await;
    let script =
        json!([{ "text": "one word after the other, for all", "chunks": 30, "delay_ms": 20 }]);
    let session = host.bare("Talk.", &script).await.id;
    let follow = || async {
        let mut follower = host.follow(session.clone());
        // The follower asserts that sequence numbers have no gap and no repeat.
        follower.until("the turn to end", turn_ended).await;
        follower.text()
    };
    let texts: BTreeSet<String> = join_all((0..100).map(|_| follow())).await.into_iter().collect();
    assert_eq!(texts.into_iter().collect::<Vec<_>>(), ["one word after the other, for all"]);
}
