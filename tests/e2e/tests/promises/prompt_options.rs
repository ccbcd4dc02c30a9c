//! The options of a prompt: the model, the effort and the images that its agent sends to a model
//! service.

use std::sync::{Arc, Mutex};

use axum::{Json, Router, body::Bytes, http::StatusCode, routing::get};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_e2e::Host;
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, Session},
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use crate::{completed, turn_ended};

/// The bodies of the requests that a stand-in for the model services got. It accepts no key.
#[derive(Clone, Default)]
pub(crate) struct Requests(Arc<Mutex<Vec<Value>>>);

impl Requests {
    /// A server whose model services are the stand-in.
    pub(crate) async fn record() -> (Host, Self) {
        let requests = Self::default();
        let kept = requests.clone();
        let answer = move |body: Bytes| {
            kept.0.lock().unwrap().extend(serde_json::from_slice::<Value>(&body).ok());
            let error = json!({ "type": "authentication_error", "message": "invalid x-api-key" });
            let body = json!({ "type": "error", "error": error });
            async move { (StatusCode::UNAUTHORIZED, Json(body)) }
        };
        let router = Router::new().fallback(get(answer.clone()).post(answer));
        let router = router.layer(axum::extract::DefaultBodyLimit::disable());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, router).await });
        let openai = format!("{url}/v1");
        let env = [
            ("HARVEST_IMAGE", "agents"),
            ("ANTHROPIC_API_KEY", "sk-recorded"),
            ("OPENAI_API_KEY", "sk-recorded"),
            ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &*url),
            ("HARVEST_UPSTREAMS_OPENAI_URL", &*openai),
        ];
        (Host::start_with(&env).await, requests)
    }

    /// Removes and returns all requests.
    pub(crate) fn take(&self) -> Vec<Value> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

pub(crate) async fn create(host: &Host, body: Value) -> SessionId {
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
    session.id
}

/// Model and effort of each request, whatever its protocol.
fn asked(requests: &[Value]) -> Vec<(String, Option<String>)> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let asked = |request: &Value| {
        let efforts =
            [&request["output_config"]["effort"], &request["reasoning"]["effort"]].map(text);
        (text(&request["model"]).unwrap_or_default(), efforts.into_iter().flatten().next())
    };
    requests.iter().map(asked).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn model_and_effort_hold_for_one_prompt() {
    let (host, requests) = Requests::record().await;
    for agent in ["claude", "opencode", "codex"] {
        let body = json!({ "agent": agent, "network": "none", "model": "m-one", "effort": "low",
                           "prompt": "First." });
        let session = create(&host, body).await;
        let mut follower = host.follow(session.clone());
        let mut last = follower.until("turn 1", turn_ended).await.seq;
        let mut turns = vec![asked(&requests.take())];
        for options in [json!({ "model": "m-two", "effort": "high" }), json!({})] {
            let mut body = json!({ "text": "Next." });
            body.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
            host.post(&format!("/v1/sessions/{session}/prompts"), body).await;
            last = follower.after(last, "the next turn", turn_ended).await.seq;
            turns.push(asked(&requests.take()));
        }
        let call = |model: &str, effort: &str| (model.to_owned(), Some(effort.to_owned()));
        let (one, two) = (call("m-one", "low"), call("m-two", "high"));
        for (turn, (own, other)) in turns.iter().zip([(&one, &two), (&two, &one), (&one, &two)]) {
            assert!(turn.contains(own) && !turn.contains(other), "{agent}: {turns:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn prompt_can_use_another_model_service() {
    let (host, requests) = Requests::record().await;
    let body = json!({ "agent": "claude", "network": "none", "model": "scripted",
                       "prompt": "script: [{\"text\":\"one\"}]" });
    let session = create(&host, body).await;
    let mut follower = host.follow(session.clone());
    let last = follower.until("turn 1", completed).await.seq;
    let prompts = format!("/v1/sessions/{session}/prompts");
    host.post(&prompts, json!({ "text": "Think.", "model": "anthropic/m-two" })).await;
    let last = follower.after(last, "turn 2", turn_ended).await.seq;
    let models = asked(&requests.take());
    assert!(models.iter().any(|(model, _)| model == "m-two"), "{models:?}");
    host.post(&prompts, json!({ "text": "script: [{\"text\":\"three\"}]" })).await;
    follower.after(last, "turn 3", completed).await;
    assert_eq!(asked(&requests.take()), []);
}

/// One pixel.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

/// Whether a request has an image of the type that was attached, in any protocol.
fn has_image(request: &Value) -> bool {
    let request = request.to_string();
    request.contains(r#""media_type":"image/png""#) || request.contains("data:image/png;base64,")
}

#[tokio::test(flavor = "multi_thread")]
async fn attached_image_reaches_the_model() {
    let (host, requests) = Requests::record().await;
    let file = host.home().join("one.png");
    std::fs::write(&file, BASE64_STANDARD.decode(PNG).unwrap()).unwrap();
    let file = file.to_str().unwrap();
    for agent in ["claude", "opencode", "codex"] {
        let body = json!({ "agent": agent, "network": "none", "model": "m-one" });
        let session = create(&host, body).await;
        let id = session.to_string();
        let sent = host.harvest(["send", &id, "--attach", file, "Look at this."]);
        assert_eq!(sent.code, 0, "{sent:?}");
        host.follow(session.clone()).until("the turn", turn_ended).await;
        let all = requests.take();
        assert!(all.iter().any(has_image), "{agent}: {all:?}");
        let logs = host.harvest(["logs", &id]).stdout;
        assert!(logs.contains("Queued “Look at this.” with an image"), "{logs}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn agent_without_images_gets_their_paths() {
    let host = Host::start().await;
    let body =
        json!({ "agent": "scripted", "network": "none", "prompt": "script: [{\"history\":true}]" });
    let session = create(&host, body).await;
    let mut follower = host.follow(session.clone());
    let last = follower.until("turn 1", completed).await.seq;
    let prompts = format!("/v1/sessions/{session}/prompts");
    let script = json!([{ "bash": "file=$(ls /tmp/prm_*-1.png) && wc -c < $file" }]);
    let image = json!({ "media_type": "image/png", "data": PNG });
    let body = json!({ "text": format!("script: {script}"), "attachments": [image] });
    let prompt: Prompt = serde_json::from_value(host.post(&prompts, body).await).unwrap();
    let bytes = BASE64_STANDARD.decode(PNG).unwrap().len();
    let output = |body: &EventBody| matches!(body, EventBody::ToolEnded { output, .. } if output.trim() == bytes.to_string());
    follower.after(last, "the size of the file", output).await;
    assert_eq!(prompt.attachments[0].bytes, bytes as u64);
}

#[tokio::test(flavor = "multi_thread")]
async fn damaged_image_is_refused_with_its_reason() {
    let host = Host::start().await;
    let file = host.home().join("cut.png");
    let bytes = BASE64_STANDARD.decode(PNG).unwrap();
    std::fs::write(&file, &bytes[..40]).unwrap();
    let refused =
        host.harvest(["run", "-m", "scripted", "--attach", file.to_str().unwrap(), "Look."]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("damaged or incomplete image/png file"), "{refused:?}");
}
