//! Models of several services: each is reached by its path inside, with a key that only the gateway
//! has, and its tokens are counted.

use axum::{
    Router,
    body::Bytes,
    http::{HeaderMap, Uri},
    routing::get,
};
use harvest_e2e::Host;
use harvest_proto::{EventBody, api::Session};
use serde_json::json;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

use crate::completed;

const KEY: &str = "sk-proj-only-at-the-gateway";
const ANSWER: &str = r#"{"id":"r","object":"response","output":[],"usage":{"input_tokens":20,"output_tokens":6,"input_tokens_details":{"cached_tokens":5}}}"#;

type Seen = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// A stand-in for the OpenAI API.
async fn openai() -> (String, Seen) {
    let seen = Seen::default();
    let kept = Arc::clone(&seen);
    let answer = move |uri: Uri, headers: HeaderMap, _: Bytes| {
        let key = headers.get("authorization").map(|key| key.to_str().unwrap().to_owned());
        kept.lock().unwrap().push((uri.to_string(), key));
        let list = uri.path().ends_with("/models");
        let body = if list { r#"{"data":[{"id":"gpt-x"}]}"# } else { ANSWER };
        async move { ([("content-type", "application/json")], body) }
    };
    let router = Router::new().fallback(get(answer.clone()).post(answer));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, seen)
}

// The stand-in answers while the command line program runs.
#[tokio::test(flavor = "multi_thread")]
async fn session_calls_openai_without_its_key() {
    let (url, seen) = openai().await;
    let env = [("OPENAI_API_KEY", KEY), ("HARVEST_UPSTREAMS_OPENAI_URL", &url)];
    let host = Host::start_with(&env).await;
    let listed = host.harvest(["models"]);
    assert!(listed.stdout.contains("OPENAI_API_KEY (environment)"), "{listed:?}");
    assert!(listed.stdout.contains("openai/gpt-x\n"), "{listed:?}");
    assert!(listed.stderr.contains("harvest secret set ANTHROPIC_API_KEY"), "{listed:?}");
    let call = "curl -s http://model.harvest.internal/openai/v1/responses -H 'authorization: Bearer mine' \
                -d '{\"model\":\"gpt-x\",\"input\":\"hi\"}'; env";
    let script = json!([{ "bash": call }]);
    let body = json!({ "agent": "scripted", "model": "openai/gpt-x", "network": "none",
                       "prompt": format!("script: {script}") });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    host.follow(session.id.clone()).until("the turn to end", completed).await;
    let expected = ("/v1/responses".to_owned(), Some(format!("Bearer {KEY}")));
    assert!(seen.lock().unwrap().contains(&expected), "{seen:?}");
    let events = host.events(&session.id).await;
    assert!(!format!("{events:?}").contains(KEY), "{events:?}");
    let counted = |event: &EventBody| {
        matches!(event, EventBody::ModelCall { upstream, usage, .. }
            if upstream == "openai" && usage.input_tokens == 15 && usage.cache_read_tokens == 5)
    };
    assert!(events.iter().any(counted), "{events:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unlisted_model_is_used_with_a_warning() {
    let (url, _seen) = openai().await;
    let env = [("OPENAI_API_KEY", KEY), ("HARVEST_UPSTREAMS_OPENAI_URL", &url)];
    let host = Host::start_with(&env).await;
    let folder = tempfile::tempdir().unwrap();
    let run = |model: &str| {
        let mut command = host.command();
        command.current_dir(folder.path());
        command.args(["run", "-d", "-a", "scripted", "-m", model, "script: [{\"text\":\"hi\"}]"]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let warned = run("openai/gpt-y");
    assert!(warned.contains("`openai` lists no model `gpt-y`, but gpt-x"), "{warned}");
    let known = run("openai/gpt-x");
    assert!(!known.contains("lists no model"), "{known}");
}

#[tokio::test]
async fn unknown_model_service_is_refused_with_alternatives() {
    let host = Host::start().await;
    let refused = host.harvest(["run", "-m", "nope/model", "Fix it."]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("there is no model service `nope`"), "{refused:?}");
    assert!(refused.stderr.contains("[upstreams.nope]"), "{refused:?}");
}
