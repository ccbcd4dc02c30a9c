//! Clients that disconnect in the middle of a request: their commands end, partial uploads are
//! discarded, and the session counts as idle again.

use std::{
    io::{Read, Write},
    net::TcpStream,
};

use harvest_e2e::{Host, eventually, processes_with};
use harvest_proto::{SessionId, api::SessionState};
use serde_json::json;

use super::{begin, lives};

/// A request whose connection closes on drop.
fn half(host: &Host, head: &str, body: &[u8]) -> TcpStream {
    let address = host.url().unwrap().replace("http://", "");
    let mut stream = TcpStream::connect(&address).unwrap();
    let head =
        format!("{head}\r\nhost: {address}\r\nauthorization: Bearer {}\r\n\r\n", host.token());
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// Waits until the unused sandbox is frozen.
async fn is_left(host: &Host, session: &SessionId, after: u64) -> u64 {
    let mut follower = host.follow(session.clone());
    follower.after(after, "it to stand still", crate::freeze_pause_restore::frozen).await.seq
}

#[tokio::test]
async fn vanished_client_leaves_no_partial_change() {
    let host = Host::start_with(&[("HARVEST_CLOCKS_IDLE_FREEZE", "300ms")]).await;
    let session =
        begin(&host, &json!([{ "bash": "echo old > /workspace/file" }, { "text": "on" }])).await;
    let mut left = is_left(&host, &session, 0).await;
    let path = format!("/v1/sessions/{session}");

    // A command whose output is no longer read.
    let body = json!({ "argv": ["sh", "-c", "yes & exec sleep 98751.5"] }).to_string();
    let head = format!(
        "POST {path}/exec HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {}",
        body.len()
    );
    let stream = half(&host, &head, body.as_bytes());
    lives("98751.5").await;
    drop(stream);
    eventually("the command to be gone", || async {
        processes_with("98751.5").is_empty().then_some(())
    })
    .await;
    left = is_left(&host, &session, left).await;

    // A file upload that stops half way.
    let head =
        format!("PUT {path}/files?path=/workspace/file HTTP/1.1\r\ncontent-length: 50000000");
    let stream = half(&host, &head, &vec![b'x'; 4_000_000]);
    host.wait_for(&session, SessionState::Idle).await;
    let partial = "until [ $(ls -A /workspace | wc -l) -gt 1 ]; do sleep 0.05; done";
    host.exec(&session, "root", partial).await;
    drop(stream);
    let gone =
        "while [ $(ls -A /workspace | wc -l) -gt 1 ]; do sleep 0.05; done; cat /workspace/file";
    assert_eq!(host.exec(&session, "root", gone).await.1, "old\n");
    left = is_left(&host, &session, left).await;

    // A file download that stops half way.
    host.exec(&session, "harvest", "head -c 200000000 /dev/zero > /tmp/large").await;
    let mut stream = half(&host, &format!("GET {path}/files?path=/tmp/large HTTP/1.1"), b"");
    stream.read_exact(&mut [0; 100_000]).unwrap();
    drop(stream);
    is_left(&host, &session, left).await;
}
