//! A hostile sandbox at its door: addresses behind names, services it does not have.

use std::sync::Arc;

use harvest_gateway::{
    DoorSocket, Gateway, GatewayConfig,
    ledger::{GitAccess, ResolvedPolicy},
};
use harvest_proto::{
    EventBody, NetworkPolicy, RuleScope, RuleVerdict,
    api::NetworkRule,
    door::{DoorReply, DoorRequest, GIT_NAME, MCP_NAME, MODEL_NAME},
};

use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream, UnixStream},
};

use crate::{RecordingLedger, TestDoor, dial, policy};

fn connect(name: &str, port: u16) -> DoorRequest {
    DoorRequest::Connect { name: name.to_owned(), port }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_of_special_addresses_are_refused() {
    for address in [
        "127.0.0.1:443",
        "[::1]:443",
        "[::ffff:127.0.0.1]:443",
        "0.0.0.0:443",
        "10.1.2.3:443",
        "169.254.169.254:443",
        "[fd00:ec2::254]:443",
        "168.63.129.16:443",
        "100.100.100.200:443",
        "[fe80::1]:443",
    ] {
        let pinned = [("evil.example.org".to_owned(), address.parse().unwrap())].into();
        let config = GatewayConfig { pinned, ..GatewayConfig::default() };
        let network = ResolvedPolicy::of(NetworkPolicy::Full, &[]).fixed();
        let policy = crate::DoorPolicy { network, ..policy(&[]) };
        let door = TestDoor::new(RecordingLedger::default(), config, policy);
        let (reply, _) = door.request(&connect("evil.example.org", 443)).await;
        assert!(matches!(reply, DoorReply::Refused { .. }), "{address}: {reply:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metadata_service_needs_more_than_a_rule() {
    let rule = NetworkRule {
        name: "evil.example.org".to_owned(),
        verdict: RuleVerdict::Allow,
        ports: vec![80, 443],
        private: true,
        scope: RuleScope::Everywhere,
    };
    let pinned = [(rule.name.clone(), "169.254.169.254:80".parse().unwrap())].into();
    let config = GatewayConfig { pinned, ..GatewayConfig::default() };
    let network =
        ResolvedPolicy { rules: vec![rule], ..ResolvedPolicy::of(NetworkPolicy::Full, &[]) };
    let policy = crate::DoorPolicy { network: network.fixed(), ..policy(&[]) };
    let door = TestDoor::new(RecordingLedger::default(), config, policy);
    let (reply, _) = door.request(&connect("evil.example.org", 80)).await;
    assert!(matches!(reply, DoorReply::Refused { .. }), "{reply:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn door_for_names_has_no_services() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("door.sock");
    let gateway = Gateway::new(Arc::new(RecordingLedger::default()), GatewayConfig::default());
    let network = ResolvedPolicy {
        owner: String::new(),
        ..ResolvedPolicy::of(NetworkPolicy::Trusted, &["example.org"])
    };
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let observer = Box::new(move |event| sender.send(event).unwrap());
    let listener = Box::new(DoorSocket::bind(&socket).unwrap());
    let _door = gateway.open_for_names(listener, network.fixed(), observer);
    for name in [MODEL_NAME, GIT_NAME, MCP_NAME] {
        for request in [connect(name, 80), DoorRequest::Lookup { name: name.to_owned() }] {
            let (reply, _) = dial(&socket, &request).await;
            assert!(matches!(reply, DoorReply::Refused { .. }), "{name}: {reply:?}");
        }
    }
    let lookup = |name: &str| DoorRequest::Lookup { name: name.to_owned() };
    assert_eq!(dial(&socket, &lookup("example.org")).await.0, DoorReply::Open);
    dial(&socket, &lookup("other.org")).await;
    let of_other = async {
        loop {
            match events.recv().await.unwrap() {
                EventBody::EgressRefused { name, hint, .. } if name == "other.org" => return hint,
                _ => {}
            }
        }
    };
    assert_eq!(of_other.await.as_deref(), Some("`--allow other.org` allows it"));
}

/// A git door whose only repository has its remote at a listener.
async fn git_door(secret: Option<&str>) -> (TestDoor, TcpListener) {
    let remote = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/app.git", remote.local_addr().unwrap());
    let mut policy = policy(&[]);
    let (name, branch) = ("local/app".parse().unwrap(), Some("main".parse().unwrap()));
    let secret = secret.map(str::to_owned);
    policy.repositories = vec![GitAccess { name, url, local: true, secret, branch }];
    let secrets = [("FORGE_TOKEN", "tok-1234567")].into();
    let ledger = RecordingLedger { secrets, ..RecordingLedger::default() };
    (TestDoor::new(ledger, GatewayConfig::default(), policy), remote)
}

async fn read_head(stream: &mut TcpStream) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    String::from_utf8(head).unwrap().to_ascii_lowercase()
}

#[tokio::test(flavor = "multi_thread")]
async fn discovery_request_announces_no_body() {
    let (door, remote) = git_door(None).await;
    let inside = door.inside(GIT_NAME, 80).await;
    for service in ["git-upload-pack", "git-receive-pack"] {
        let mut client = TcpStream::connect(inside).await.unwrap();
        let line = format!("GET /local/app.git/info/refs?service={service} HTTP/1.1");
        let body = "x".repeat(300);
        let request = format!("{line}\r\nhost: git\r\ncontent-length: 300\r\n\r\n{body}");
        client.write_all(request.as_bytes()).await.unwrap();
        let (mut received, _) = remote.accept().await.unwrap();
        let head = read_head(&mut received).await;
        assert!(head.starts_with("get /app.git/info/refs"), "{head}");
        assert!(!head.contains("content-length") && !head.contains("transfer-encoding"), "{head}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_git_response_is_refused() {
    let (door, remote) = git_door(Some("FORGE_TOKEN")).await;
    let inside = door.inside(GIT_NAME, 80).await;
    let mut client = TcpStream::connect(inside).await.unwrap();
    let line = "GET /local/app.git/info/refs?service=git-upload-pack HTTP/1.1";
    let request = format!("{line}\r\nhost: git\r\nconnection: close\r\n\r\n");
    client.write_all(request.as_bytes()).await.unwrap();
    let (mut received, _) = remote.accept().await.unwrap();
    assert!(read_head(&mut received).await.contains("authorization: basic "));
    let answer = "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nhi";
    received.write_all(answer.as_bytes()).await.unwrap();
    let mut answered = String::new();
    client.read_to_string(&mut answered).await.unwrap();
    assert!(answered.starts_with("HTTP/1.1 502") && answered.contains("unasked"), "{answered}");
}

/// Connections to a gateway name of which none sends a complete request.
async fn slow_heads(door: &TestDoor, count: usize) -> Vec<BufReader<UnixStream>> {
    let mut held = Vec::new();
    for _ in 0..count {
        let (reply, mut stream) = door.request(&connect(MODEL_NAME, 80)).await;
        assert_eq!(reply, DoorReply::Open);
        stream.write_all(b"POST /v1/messages HTTP/1.1\r\nx-slow: ").await.unwrap();
        held.push(stream);
    }
    held
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_requests_of_one_door_delay_no_other() {
    let hostile = TestDoor::new(RecordingLedger::default(), GatewayConfig::default(), policy(&[]));
    let mut held = slow_heads(&hostile, 512).await;
    let socket = hostile.folder.path().join("other.sock");
    let listener = Box::new(DoorSocket::bind(&socket).unwrap());
    let _other = hostile.gateway.open(listener, policy(&[]), None, None);
    for stream in &mut held {
        stream.write_all(b"a").await.unwrap();
        let (_, mut answered) = dial(&socket, &connect(MODEL_NAME, 80)).await;
        answered.write_all(b"GET /none HTTP/1.1\r\nhost: model\r\n\r\n").await.unwrap();
        let mut line = String::new();
        answered.read_line(&mut line).await.unwrap();
        assert!(line.starts_with("HTTP/1.1 404"), "{line}");
    }
}
