//! Clients that read nothing cost the server a bounded amount of memory and lock out no caller.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
};

use harvest_e2e::{Host, private_memory};
use harvest_proto::SessionId;
use serde_json::{Value, json};

use crate::turn_ended;

const FOLLOWERS: u64 = 300;
const SILENT: u64 = 1000;

// A page of events, a frame that is being sent, and the buffers of the connection.
const BYTES_PER_FOLLOWER: u64 = 300 * 1024;

// The buffers of a connection and its task.
const BYTES_PER_SILENT: u64 = 64 * 1024;

/// Events of 60 KB.
fn long_outputs(number: usize) -> Value {
    json!(vec![json!({ "bash": "head -c 60000 /dev/zero | tr '\\0' x" }); number])
}

fn address(host: &Host) -> SocketAddr {
    let url = host.url().unwrap();
    url.trim_start_matches("http://").parse().unwrap()
}

/// A connection that asks for all events of a session and reads none. It returns when the response
/// begins, so that the store serves one after the other.
fn follow_without_reading(host: &Host, session: &SessionId) -> TcpStream {
    let mut stream = TcpStream::connect(address(host)).unwrap();
    let request = format!(
        "GET /v1/sessions/{session}/events HTTP/1.1\r\nHost: {}\r\nAccept: text/event-stream\r\n\
         Authorization: Bearer {}\r\n\r\n",
        address(host),
        host.token()
    );
    stream.write_all(request.as_bytes()).unwrap();
    stream.read_exact(&mut [0; 1]).unwrap();
    stream
}

#[tokio::test]
async fn clients_that_read_nothing_are_bounded() {
    let host = Host::start().await;
    let session = host.bare("Begin.", &long_outputs(60)).await.id;
    host.follow(session.clone()).until("the turn to end", turn_ended).await;
    let memory = || private_memory(host.server()).unwrap();
    let before = memory();
    let _followers: Vec<TcpStream> =
        (0..FOLLOWERS).map(|_| follow_without_reading(&host, &session)).collect();
    // More events arrive while they hold what they have not sent.
    let after = host.show(&session).await.seq;
    host.prompt(&session, "Go on.", &long_outputs(60)).await;
    host.follow(session.clone()).after(after, "the turn to end", turn_ended).await;
    let grown = memory().saturating_sub(before);
    println!("{FOLLOWERS} followers: {} KiB each", grown / FOLLOWERS / 1024);
    assert!(grown < FOLLOWERS * BYTES_PER_FOLLOWER, "{grown} bytes");
    let _silent: Vec<TcpStream> =
        (0..SILENT).map(|_| TcpStream::connect(address(&host)).unwrap()).collect();
    assert_eq!(host.show(&session).await.turns, 2, "a caller with a token is served");
    let grown = memory().saturating_sub(before);
    println!("with {SILENT} silent connections: {} KiB in all", grown / 1024);
    let limit = FOLLOWERS * BYTES_PER_FOLLOWER + SILENT * BYTES_PER_SILENT;
    assert!(grown < limit, "{grown} bytes");
}
