//! Connections to names of the network policy.

use std::net::SocketAddr;

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
async fn echo() -> SocketAddr {
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
    let pinned = [("mirror.example.org".to_owned(), echo().await)].into();
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

#[tokio::test(flavor = "multi_thread")]
async fn http_with_matching_host_passes() {
    let door = door(true).await;
    let request = b"GET / HTTP/1.1\r\nHost: mirror.example.org\r\n\r\nbody";
    assert_eq!(send(&door, 80, request).await, request);
    assert!(door.ledger.events().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn http_with_other_host_is_cut_before_sending() {
    let door = door(true).await;
    assert_eq!(send(&door, 80, b"GET / HTTP/1.1\r\nHost: evil.org\r\n\r\n").await, b"");
    assert_eq!(refusals(&door.ledger.wait_for_events(1).await)[0].0, "mirror.example.org");
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

fn hello(name: &str) -> Vec<u8> {
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
