//! Network rules: they apply to doors that are open, and to ports other than the web's.

use std::{net::SocketAddr, sync::Arc};

use harvest_gateway::{GatewayConfig, PrivateHosts, ledger::ResolvedPolicy};
use harvest_proto::{
    EventBody, NetworkPolicy, NetworkVerdict, RuleScope, RuleVerdict,
    api::NetworkRule,
    door::{DoorReply, DoorRequest},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
    sync::watch,
};

use crate::{
    RecordingLedger, TestDoor,
    egress::{echo, hello},
    policy,
};

const NAME: &str = "db.example.org";

fn rule(verdict: RuleVerdict, ports: &[u16], scope: RuleScope) -> NetworkRule {
    NetworkRule { name: NAME.to_owned(), verdict, ports: ports.to_vec(), private: false, scope }
}

/// A server that greets and echoes.
async fn greeter() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let _ = stream.write_all(b"hello\n").await;
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    address
}

/// A door whose rules can be changed, and a server behind it whose address is private.
fn door(
    server: SocketAddr,
    rules: Vec<NetworkRule>,
    may_be_private: bool,
) -> (TestDoor, watch::Sender<ResolvedPolicy>) {
    let pinned = [(NAME.to_owned(), server)].into();
    let allowed = may_be_private.then(|| NAME.to_owned());
    let private_hosts = PrivateHosts::new(allowed.into_iter().collect());
    let config = GatewayConfig { private_hosts, pinned, ..GatewayConfig::default() };
    let start = ResolvedPolicy { rules, ..ResolvedPolicy::of(NetworkPolicy::None, &[]) };
    let (sender, network) = watch::channel(start);
    let policy = crate::DoorPolicy { network, ..policy(&[]) };
    (TestDoor::new(RecordingLedger::default(), config, policy), sender)
}

fn connect(port: u16) -> DoorRequest {
    DoorRequest::Connect { name: NAME.to_owned(), port }
}

#[tokio::test(flavor = "multi_thread")]
async fn open_door_follows_its_rules() {
    let (door, rules) = door(greeter().await, Vec::new(), true);
    assert!(matches!(door.request(&connect(5432)).await.0, DoorReply::Refused { .. }));
    let allow = rule(RuleVerdict::Allow, &[5432], RuleScope::Session);
    rules.send_modify(|policy| policy.rules = vec![allow]);
    assert_eq!(
        door.request(&DoorRequest::Lookup { name: NAME.to_owned() }).await.0,
        DoorReply::Open
    );
    let (reply, mut stream) = door.request(&connect(5432)).await;
    assert_eq!(reply, DoorReply::Open);
    let mut greeting = [0; 6];
    stream.read_exact(&mut greeting).await.unwrap();
    assert_eq!(&greeting, b"hello\n", "a server may speak first");
    stream.write_all(b"ping").await.unwrap();
    let mut echoed = [0; 4];
    stream.read_exact(&mut echoed).await.unwrap();
    assert_eq!(&echoed, b"ping");
    assert!(matches!(door.request(&connect(443)).await.0, DoorReply::Refused { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_that_denies_cuts_open_connections() {
    let allow = rule(RuleVerdict::Allow, &[5432], RuleScope::Session);
    let (door, rules) = door(greeter().await, vec![allow.clone()], true);
    let (_, mut stream) = door.request(&connect(5432)).await;
    let mut greeting = [0; 6];
    stream.read_exact(&mut greeting).await.unwrap();
    // A change that leaves the connection allowed leaves it open.
    let other = NetworkRule { private: true, scope: RuleScope::Everywhere, ..allow.clone() };
    rules.send_modify(|policy| policy.rules = vec![allow.clone(), other]);
    stream.write_all(b"ping").await.unwrap();
    let mut echoed = [0; 4];
    stream.read_exact(&mut echoed).await.unwrap();
    let deny = rule(RuleVerdict::Deny, &[], RuleScope::Everywhere);
    rules.send_modify(|policy| policy.rules = vec![allow, deny]);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.is_empty());
    let denied = |events: &[EventBody]| {
        events.iter().any(|event| {
            matches!(event, EventBody::EgressRefused { reason, .. } if reason.contains("denied"))
        })
    };
    while !denied(&door.ledger.events()) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_on_any_port_must_name_the_host() {
    let allow = rule(RuleVerdict::Allow, &[8443], RuleScope::Session);
    let (door, _rules) = door(echo().await, vec![allow], true);
    for (name, passes) in [(NAME, true), ("evil.org", false)] {
        let (_, mut stream) = door.request(&connect(8443)).await;
        let sent = hello(name);
        let _ = stream.write_all(&sent).await;
        let _ = stream.shutdown().await;
        let mut back = Vec::new();
        let _ = stream.read_to_end(&mut back).await;
        assert_eq!(back == sent, passes, "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn private_address_needs_a_rule_that_says_so() {
    for private in [false, true] {
        let allow = rule(RuleVerdict::Allow, &[5432], RuleScope::Everywhere);
        let rules = vec![NetworkRule { private, ..allow }];
        let (door, _rules) = door(greeter().await, rules, false);
        let reply = door.request(&connect(5432)).await.0;
        assert_eq!(reply == DoorReply::Open, private);
        let hint = door.ledger.events().into_iter().find_map(|event| match event {
            EventBody::EgressRefused { hint, .. } => hint,
            _ => None,
        });
        let command = "`harvest net allow --everywhere --private db.example.org:5432`";
        assert_eq!(hint.is_some_and(|hint| hint.contains(command)), !private);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_and_refusals_are_counted() {
    let allow = rule(RuleVerdict::Allow, &[5432], RuleScope::Session);
    let (door, _rules) = door(greeter().await, vec![allow], true);
    let (_, mut stream) = door.request(&connect(5432)).await;
    stream.write_all(b"ping").await.unwrap();
    stream.read_exact(&mut [0; 10]).await.unwrap();
    let ledger = Arc::clone(&door.ledger);
    let total = |verdict| {
        let counts = ledger.traffic.lock().unwrap();
        let of = counts.iter().filter(|count| count.verdict == verdict && count.name == NAME);
        of.fold((0, 0, 0), |sum, one| {
            (sum.0 + one.connections, sum.1 + one.sent, sum.2 + one.received)
        })
    };
    // The client has its answer before the door has read all that the client sent.
    while total(NetworkVerdict::Allowed) != (1, 4, 10) {
        tokio::task::yield_now().await;
    }
    drop(stream);
    door.request(&connect(443)).await;
    // A door that closes stores what it has counted.
    drop(door.handle);
    while total(NetworkVerdict::Refused) != (1, 0, 0) {
        tokio::task::yield_now().await;
    }
}
