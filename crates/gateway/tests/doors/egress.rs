//! Connections to names of the network policy.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use harvest_gateway::{GatewayConfig, PrivateHosts};
use harvest_proto::{
    EventBody,
    door::{DoorReply, DoorRequest},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::{RecordingLedger, TestDoor, policy};

/// A server that echoes all bytes.
pub(crate) async fn echo() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    address
}

async fn door(allow_private: bool) -> TestDoor {
    door_to(echo().await, allow_private)
}

fn door_to(mirror: SocketAddr, allow_private: bool) -> TestDoor {
    let pinned = [("mirror.example.org".to_owned(), mirror)].into();
    let allowed = allow_private.then(|| "mirror.example.org".to_owned());
    let private_hosts = PrivateHosts::new(allowed.into_iter().collect());
    let config = GatewayConfig { private_hosts, pinned, ..GatewayConfig::default() };
    TestDoor::new(
        RecordingLedger::default(),
        config,
        policy(&["mirror.example.org", "*.wild.example"]),
    )
}

fn connect(name: &str, port: u16) -> DoorRequest {
    DoorRequest::Connect { name: name.into(), port }
}

fn refusals<'a>(events: &'a [EventBody]) -> Vec<(&'a str, &'a str)> {
    let refusal = |event: &'a EventBody| match event {
        EventBody::EgressRefused { name, reason, .. } => Some((name.as_str(), reason.as_str())),
        _ => None,
    };
    events.iter().filter_map(refusal).collect()
}

async fn send(door: &TestDoor, port: u16, bytes: &[u8]) -> Vec<u8> {
    let (reply, mut stream) = door.request(&connect("mirror.example.org", port)).await;
    assert_eq!(reply, DoorReply::Open);
    // A refused connection may be closed before everything is written.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut back = Vec::new();
    let _ = stream.read_to_end(&mut back).await;
    back
}

#[tokio::test(flavor = "multi_thread")]
async fn lookups_follow_the_policy_and_log_refusals_once() {
    let door = door(true).await;
    for name in
        ["mirror.example.org", "a.wild.example", "git.harvest.internal", "model.harvest.internal"]
    {
        assert_eq!(
            door.request(&DoorRequest::Lookup { name: name.into() }).await.0,
            DoorReply::Open,
            "{name}"
        );
    }
    for name in ["wild.example", "evil.org", "evil.org", "evil.org", "127.0.0.1"] {
        let (reply, _) = door.request(&DoorRequest::Lookup { name: name.into() }).await;
        assert!(matches!(reply, DoorReply::Refused { .. }), "{name}");
    }
    let events = door.ledger.events();
    let names: Vec<_> = refusals(&events).iter().map(|refusal| refusal.0).collect();
    assert_eq!(names, ["wild.example", "evil.org", "127.0.0.1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn logged_refusals_are_rate_limited() {
    let door = door(true).await;
    for number in 0..200 {
        door.request(&DoorRequest::Lookup { name: format!("n{number}.evil.org") }).await;
    }
    assert_eq!(door.ledger.events().len(), 64);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_ports_names_and_addresses_are_refused() {
    let door = door(true).await;
    for (name, port) in [
        ("mirror.example.org", 22),
        ("evil.org", 443),
        ("127.0.0.1", 80),
        ("git.harvest.internal", 443),
    ] {
        assert!(
            matches!(door.request(&connect(name, port)).await.0, DoorReply::Refused { .. }),
            "{name}:{port}"
        );
    }
    assert_eq!(door.ledger.events().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn name_with_private_address_is_refused() {
    let door = door(false).await;
    let (reply, _) = door.request(&connect("mirror.example.org", 443)).await;
    assert_eq!(
        reply,
        DoorReply::Refused { reason: "the name resolves to a private address".into() }
    );
    assert_eq!(refusals(&door.ledger.events())[0].0, "mirror.example.org");
}

/// A web server that answers with the host, method and body of each request, and records the hosts.
async fn web_server() -> (SocketAddr, Arc<Mutex<Vec<String>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&seen);
    let answer = move |method: axum::http::Method, headers: axum::http::HeaderMap, body: String| {
        let host = headers["host"].to_str().unwrap().to_owned();
        record.lock().unwrap().push(host.clone());
        async move { format!("{method} {host} {body}") }
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = axum::Router::new().fallback(answer);
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, seen)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_plain_http_request_must_name_the_host() {
    let (address, seen) = web_server().await;
    let door = door_to(address, true);
    let good = "GET /a HTTP/1.1\r\nhOST: Mirror.example.org:80\r\n\r\n\
                POST /b HTTP/1.1\r\nHost: mirror.example.org\r\nContent-Length: 4\r\n\r\nbody";
    let end = "\r\nConnection: close\r\n\r\n";
    let last = format!("GET /c HTTP/1.1\r\nHost: mirror.example.org{end}");
    let answers = send(&door, 80, format!("{good}{last}").as_bytes()).await;
    let answers = String::from_utf8(answers).unwrap();
    assert_eq!(answers.matches("200 OK").count(), 3, "{answers}");
    assert!(answers.contains("POST mirror.example.org body"), "{answers}");
    assert!(door.ledger.events().is_empty());
    seen.lock().unwrap().clear();
    // The second request of a kept-alive connection, pipelined.
    let evil = "GET /secret HTTP/1.1\r\nHost: evil.org\r\n\r\n";
    let _ = send(&door, 80, format!("{good}{evil}{last}").as_bytes()).await;
    assert_eq!(refusals(&door.ledger.wait_for_events(1).await)[0].0, "mirror.example.org");
    assert!(seen.lock().unwrap().iter().all(|host| host.starts_with(['m', 'M'])), "{seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ambiguous_plain_http_never_reaches_the_server() {
    let (address, seen) = web_server().await;
    let door = door_to(address, true);
    for head in [
        "GET / HTTP/1.1\r\nHost: evil.org\r\n\r\n",
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: mirror.example.org\r\nHost: evil.org\r\n\r\n",
        "GET http://evil.org/ HTTP/1.1\r\nHost: mirror.example.org\r\n\r\n",
        "CONNECT evil.org:443 HTTP/1.1\r\nHost: mirror.example.org\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : mirror.example.org\r\n\r\n",
        "GET / HTTP/1.1\r\n Host: mirror.example.org\r\n\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "SSH-2.0-x\r\n\r\n",
        "",
    ] {
        let answer = send(&door, 80, head.as_bytes()).await;
        assert!(!String::from_utf8_lossy(&answer).contains("200 OK"), "{head:?}");
        assert_eq!(*seen.lock().unwrap(), Vec::<String>::new(), "{head:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_passes_only_with_matching_server_name() {
    let door = door(true).await;
    let good = hello("mirror.example.org");
    assert_eq!(send(&door, 443, &good).await, good);
    assert!(door.ledger.events().is_empty());
    assert_eq!(send(&door, 443, &hello("evil.org")).await, b"");
    assert_eq!(refusals(&door.ledger.wait_for_events(1).await).len(), 1);
    assert_eq!(send(&door, 443, b"GET / HTTP/1.1\r\nHost: mirror.example.org\r\n\r\n").await, b"");
}

pub(crate) fn hello(name: &str) -> Vec<u8> {
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let name = name.to_owned().try_into().unwrap();
    let mut client = rustls::ClientConnection::new(std::sync::Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}
