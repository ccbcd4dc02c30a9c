//! The options of a prompt: the model and the effort that its agent asks of a model service.

use std::sync::{Arc, Mutex};

use axum::{Json, Router, body::Bytes, http::StatusCode, routing::get};
use harvest_e2e::Host;
use harvest_proto::{SessionId, api::Session};
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
