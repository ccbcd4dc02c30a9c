//! Images that hold agents: their size, and what they state.

use harvest_e2e::Host;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

#[tokio::test]
async fn base_image_stays_below_800_megabytes() {
    let host = Host::start().await;
    let image: Value = host.get("/v1/images/base").send().await.unwrap().json().await.unwrap();
    let bytes = image["bytes"].as_u64().unwrap();
    assert!(bytes < 800_000_000, "{bytes}");
}

#[tokio::test]
async fn agent_missing_in_image_is_refused() {
    let host = Host::start_with(&[("HARVEST_IMAGE", "base")]).await;
    let body = json!({ "agent": "claude", "model": "scripted" });
    let refused = host.request(Method::POST, "/v1/sessions").json(&body).send().await.unwrap();
    assert_eq!(refused.status(), StatusCode::CONFLICT);
    let problem: Value = refused.json().await.unwrap();
    assert_eq!(problem["code"], "agent_missing", "{problem}");
    assert!(problem["hint"].as_str().unwrap().contains("`harvest image build agents`"));
    let run = host.harvest(["run", "-a", "claude", "-m", "scripted", "hello"]);
    assert!(run.code == 1 && run.stderr.contains("image `base` has no agent `claude`"), "{run:?}");
}
