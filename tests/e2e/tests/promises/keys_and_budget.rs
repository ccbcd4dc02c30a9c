//! What a user learns about a missing or rejected API key and about a budget that is used up, with
//! real Claude Code.

use harvest_e2e::Host;
use harvest_proto::{
    EventBody,
    api::{Session, SessionState},
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::{SAMPLE, completed, turn_ended};

const SET_KEY: &str = "harvest secret set ANTHROPIC_API_KEY";

#[tokio::test]
async fn run_without_key_starts_nothing() {
    let host = Host::start().await;
    let folder = host.home().join("app");
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("a"), "a").unwrap();
    let refused = host.harvest(["run", "-r", folder.to_str().unwrap(), "Fix it."]);
    assert!(refused.code == 1 && refused.stderr.contains(SET_KEY), "{refused:?}");
    for list in [&["ls", "--json"][..], &["repo", "ls", "--json"]] {
        assert_eq!(host.harvest(list).stdout.trim(), "[]", "{list:?}");
    }
    let response = host.request(reqwest::Method::POST, "/v1/sessions").json(&json!({}));
    let response = response.send().await.unwrap();
    assert_eq!(response.status(), 409);
    assert!(response.text().await.unwrap().contains("\"no_key\""));
    let doctor = host.harvest(["doctor"]);
    assert!(doctor.stdout.contains("model_key") && doctor.stdout.contains(SET_KEY), "{doctor:?}");
}

#[tokio::test]
async fn rejected_key_fails_turn_and_names_command() {
    let model = rejecting_model().await;
    let env = [("ANTHROPIC_API_KEY", "sk-wrong"), ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &model)];
    let host = Host::start_with(&env).await;
    let doctor = host.harvest(["doctor"]);
    assert!(doctor.stdout.contains("ANTHROPIC_API_KEY is in the environment"), "{doctor:?}");
    let body = json!({ "network": "none", "prompt": "Ask the model." });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    host.follow(session.id.clone()).until("the turn to fail", turn_ended).await;
    let events = host.events(&session.id).await;
    let retried = |body: &EventBody| matches!(body, EventBody::Retry { .. });
    assert!(!events.iter().any(retried), "{events:?}");
    let named = |body: &EventBody| matches!(body, EventBody::TurnEnded { error: Some(error), .. } if error.contains(SET_KEY));
    assert!(events.iter().any(named), "{events:?}");
}

#[tokio::test]
async fn exhausted_budget_names_its_setting() {
    let host = Host::start_with(&[("HARVEST_BUDGET_TOKENS", "100")]).await;
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    host.prompt(&session, "Go on.", &json!([{ "text": "no" }])).await;
    let failed = |body: &EventBody| matches!(body, EventBody::TurnEnded { error: Some(_), .. });
    let ended = host.follow(session.clone()).until("the second turn", failed).await;
    let EventBody::TurnEnded { error: Some(error), .. } = ended.body else { panic!("{ended:?}") };
    assert!(error.contains("token budget reached") && error.contains("budget_tokens"), "{error}");
    assert!(!error.contains("authenticate"), "{error}");
}

/// A stand-in for the model service that accepts no key.
async fn rejecting_model() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = vec![0; 1 << 20];
            let _ = stream.read(&mut request).await;
            let error = json!({ "type": "authentication_error", "message": "invalid x-api-key" });
            let body = json!({ "type": "error", "error": error }).to_string();
            let head =
                "HTTP/1.1 401 Unauthorized\r\ncontent-type: application/json\r\nconnection: close";
            let answer = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
            let _ = stream.write_all(answer.as_bytes()).await;
            // Reads until the client closes: a reset could overtake the response.
            while stream.read(&mut request).await.is_ok_and(|read| read > 0) {}
        }
    });
    url
}
