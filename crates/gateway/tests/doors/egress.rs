//! Names of the policy: who gets through, and to where.

use std::net::SocketAddr;

use harvest_gateway::GatewayConfig;
use harvest_proto::{
    EventBody,
    door::{Answer, Ask},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

use crate::{Books, House, pass};

/// Answers every connection with what it was sent.
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

async fn house(allow_private_upstreams: bool) -> House {
    let pinned = [("mirror.example.org".to_owned(), echo().await)].into();
    let config = GatewayConfig { allow_private_upstreams, pinned, ..GatewayConfig::default() };
    House::new(Books::default(), config, pass(&["mirror.example.org", "*.wild.example"]))
}

fn connect(name: &str, port: u16) -> Ask {
    Ask::Connect { name: name.into(), port }
}

fn refusals<'a>(events: &'a [EventBody]) -> Vec<(&'a str, &'a str)> {
    let refusal = |event: &'a EventBody| match event {
        EventBody::EgressRefused { name, reason } => Some((name.as_str(), reason.as_str())),
        _ => None,
    };
    events.iter().filter_map(refusal).collect()
}

async fn sends(house: &House, port: u16, bytes: &[u8]) -> Vec<u8> {
    let (answer, mut stream) = house.ask(&connect("mirror.example.org", port)).await;
    assert_eq!(answer, Answer::Open);
    // A refused connection may be gone before all is written.
    let _ = stream.write_all(bytes).await;
    let _ = stream.shutdown().await;
    let mut back = Vec::new();
    let _ = stream.read_to_end(&mut back).await;
    back
}

#[tokio::test(flavor = "multi_thread")]
async fn names_are_looked_up_by_the_policy_and_a_refusal_is_told_once() {
    let house = house(true).await;
    for name in
        ["mirror.example.org", "a.wild.example", "git.harvest.internal", "model.harvest.internal"]
    {
        assert_eq!(house.ask(&Ask::Lookup { name: name.into() }).await.0, Answer::Open, "{name}");
    }
    for name in ["wild.example", "evil.org", "evil.org", "evil.org", "127.0.0.1"] {
        let (answer, _) = house.ask(&Ask::Lookup { name: name.into() }).await;
        assert!(matches!(answer, Answer::Refused { .. }), "{name}");
    }
    let events = house.books.events();
    let names: Vec<_> = refusals(&events).iter().map(|refusal| refusal.0).collect();
    assert_eq!(names, ["wild.example", "evil.org", "127.0.0.1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_refused_names_does_not_fill_the_history() {
    let house = house(true).await;
    for number in 0..200 {
        house.ask(&Ask::Lookup { name: format!("n{number}.evil.org") }).await;
    }
    assert_eq!(house.books.events().len(), 64);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_ports_other_names_and_addresses_are_not_connected() {
    let house = house(true).await;
    for (name, port) in [
        ("mirror.example.org", 22),
        ("evil.org", 443),
        ("127.0.0.1", 80),
        ("git.harvest.internal", 443),
    ] {
        assert!(
            matches!(house.ask(&connect(name, port)).await.0, Answer::Refused { .. }),
            "{name}:{port}"
        );
    }
    assert_eq!(house.books.events().len(), 4);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_leads_to_a_private_address_is_refused() {
    let house = house(false).await;
    let (answer, _) = house.ask(&connect("mirror.example.org", 443)).await;
    assert_eq!(answer, Answer::Refused { reason: "the name leads to a private address".into() });
    assert_eq!(refusals(&house.books.events())[0].0, "mirror.example.org");
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_passes_when_its_host_is_the_name() {
    let house = house(true).await;
    let request = b"GET / HTTP/1.1\r\nHost: mirror.example.org\r\n\r\nbody";
    assert_eq!(sends(&house, 80, request).await, request);
    assert!(house.books.events().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_http_for_another_host_is_cut_before_a_byte_gets_out() {
    let house = house(true).await;
    assert_eq!(sends(&house, 80, b"GET / HTTP/1.1\r\nHost: evil.org\r\n\r\n").await, b"");
    assert_eq!(refusals(&house.books.count(1).await)[0].0, "mirror.example.org");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_passes_when_its_server_name_is_the_name_and_only_then() {
    let house = house(true).await;
    let good = hello("mirror.example.org");
    assert_eq!(sends(&house, 443, &good).await, good);
    assert!(house.books.events().is_empty());
    assert_eq!(sends(&house, 443, &hello("evil.org")).await, b"");
    assert_eq!(refusals(&house.books.count(1).await).len(), 1);
    assert_eq!(
        sends(&house, 443, b"GET / HTTP/1.1\r\nHost: mirror.example.org\r\n\r\n").await,
        b""
    );
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
