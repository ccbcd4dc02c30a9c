//! Webhooks: what is taken, and what is refused before it is read.

use std::path::Path;

use harvest_forge::sign_webhook;
use harvest_proto::Secret;
use harvest_server::Limits;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::{
    problem,
    test_server::{ApiResponse, TestServer, WEBHOOK_SECRET},
};

const PATH: &str = "/hooks/github";

async fn send(server: &TestServer, id: &str, signature: Option<&str>, body: &str) -> ApiResponse {
    let mut headers = vec![
        ("content-type", "application/json"),
        ("x-github-event", "push"),
        ("x-github-delivery", id),
    ];
    headers.extend(signature.map(|signature| ("x-hub-signature-256", signature)));
    server.request_as(None, "POST", PATH, &headers, body).await
}

fn sign(body: &str) -> String {
    sign_webhook(&Secret::new(WEBHOOK_SECRET.to_owned()), body.as_bytes())
}

#[tokio::test]
async fn signed_webhook_is_taken_without_a_token() {
    let server = TestServer::start().await;
    let body = r#"{"ref":"refs/heads/main","unknown":{"field":[1]}}"#;
    for _ in 0..2 {
        assert_eq!(send(&server, "d-1", Some(&sign(body)), body).await.status, 202);
    }
    let headers = [
        ("x-github-event", "sponsorship"),
        ("x-github-delivery", "d-2"),
        ("x-hub-signature-256", &sign("{}")),
    ];
    assert_eq!(server.request_as(None, "POST", PATH, &headers, "{}").await.status, 202);
}

#[tokio::test]
async fn forged_webhook_is_refused_before_parsing() {
    let server = TestServer::start().await;
    let body = "{ not json";
    problem(&send(&server, "d-1", None, body).await, 401, "invalid_signature");
    let other = sign("{}");
    for signature in [other.as_str(), "sha256=", "sha1=abc"] {
        let refused = send(&server, "d-1", Some(signature), body).await;
        problem(&refused, 401, "invalid_signature");
    }
    problem(&send(&server, "d-1", Some(&sign(body)), body).await, 400, "invalid_webhook");
    problem(&send(&server, "not an id", Some(&sign("{}")), "{}").await, 400, "invalid_webhook");
    let long = " ".repeat(2 * 1024 * 1024 + 1);
    problem(&send(&server, "d-1", Some(&sign(&long)), &long).await, 413, "too_large");
}

#[tokio::test]
async fn flood_of_webhooks_is_limited_before_work() {
    let limits = Limits { requests_per_second: 1, ..Limits::default() };
    let server = TestServer::start_with(limits).await;
    // Neither signed nor JSON: a request that gets further is refused with 401.
    for _ in 0..1000 {
        let refused = send(&server, "d-1", Some("sha256="), "x").await;
        if refused.status != 401 {
            return problem(&refused, 429, "rate_limited");
        }
    }
    panic!("the rate limit was not reached");
}

/// Sends every example of GitHub's webhooks, signed by GitHub's own library.
#[tokio::test(flavor = "multi_thread")]
async fn every_example_of_githubs_webhooks_is_taken() {
    let limits = Limits { requests_per_second: 0, ..Limits::default() };
    let server = TestServer::start_with(limits).await;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let peers = Command::new(root.join(".ci/github-peers")).output().await.unwrap();
    assert!(peers.status.success(), "{}", String::from_utf8_lossy(&peers.stderr));
    let peers = Path::new(str::from_utf8(&peers.stdout).unwrap().trim());
    let sent = Command::new(peers.join("node"))
        .arg(root.join("crates/forge/tests/peers/webhooks.mjs"))
        .args(["send", &format!("http://{}{PATH}", server.address), WEBHOOK_SECRET])
        .current_dir(peers)
        .output()
        .await
        .unwrap();
    assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
    let sent: Value = serde_json::from_slice(&sent.stdout).unwrap();
    assert!(sent["sent"].as_u64().unwrap() > 300, "{sent}");
    assert_eq!(sent["statuses"], json!({"202": sent["sent"]}));
}
