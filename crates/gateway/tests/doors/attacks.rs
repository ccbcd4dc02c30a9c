//! A hostile sandbox at its door: addresses behind names, services it does not have.

use std::sync::Arc;

use harvest_gateway::{DoorSocket, Gateway, GatewayConfig, ledger::ResolvedPolicy};
use harvest_proto::{
    EventBody, NetworkPolicy, RuleScope, RuleVerdict,
    api::NetworkRule,
    door::{DoorReply, DoorRequest, GIT_NAME, MCP_NAME, MODEL_NAME},
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
