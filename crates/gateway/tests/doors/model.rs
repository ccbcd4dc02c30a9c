//! The model door with the scripted upstream and with a fake Anthropic API.

mod openai;
mod outside;
mod redaction;
mod scripted;
pub(crate) mod sdks;
mod upstreams;

use std::{
    collections::HashMap,
    convert::Infallible,
    sync::{Arc, Mutex},
};

use axum::{
    Router,
    body::{Body, Bytes},
    http::{HeaderMap, Response, Uri},
    routing::post,
};
use futures_util::{StreamExt, stream};
use harvest_gateway::{
    GatewayConfig, Upstream, Upstreams,
    ledger::{DoorPurpose, MostTokens, Refusal},
};
use harvest_proto::{
    EventBody, UpstreamName,
    door::{MCP_NAME, MODEL_NAME},
    event::Usage,
};
use serde_json::{Value, json};
use tokio::{net::TcpListener, sync::watch};

use crate::{RecordingLedger, TestDoor, policy};

const KEY: &str = "sk-ant-never-inside";
const MESSAGES: &str = "/v1/messages?beta=true";

struct Agent {
    door: TestDoor,
    base: String,
    client: reqwest::Client,
}

impl Agent {
    async fn new(ledger: RecordingLedger, config: GatewayConfig, upstream: UpstreamName) -> Self {
        let upstream = watch::channel(upstream).1;
        Self::with_policy(ledger, config, crate::DoorPolicy { upstream, ..policy(&[]) }).await
    }

    async fn with_policy(
        ledger: RecordingLedger,
        config: GatewayConfig,
        policy: crate::DoorPolicy,
    ) -> Self {
        let door = TestDoor::new(ledger, config, policy);
        let base = format!("http://{}", door.inside(MODEL_NAME, 80).await);
        Self { door, base, client: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    async fn scripted() -> Self {
        Self::new(RecordingLedger::default(), GatewayConfig::default(), UpstreamName::scripted())
            .await
    }

    async fn send(&self, path: &str, body: &Value) -> Result<reqwest::Response, reqwest::Error> {
        let request = self.client.post(format!("{}{path}", self.base));
        request
            .header("x-api-key", "sk-from-inside")
            .header("authorization", "Bearer from-inside")
            .header("cookie", "c=1")
            .header("anthropic-version", "2023-06-01")
            .header("anthropic-beta", "some-beta")
            .header("accept-encoding", "gzip, br")
            .body(body.to_string())
            .send()
            .await
    }

    async fn json(&self, body: &Value) -> (u16, Value) {
        let answered = self.send(MESSAGES, body).await.unwrap();
        let status = answered.status().as_u16();
        (status, serde_json::from_str(&answered.text().await.unwrap()).unwrap())
    }
}

fn request(messages: &[Value], stream: bool) -> Value {
    let tool = |name: &str, properties: &[&str]| {
        let properties: serde_json::Map<_, _> =
            properties.iter().map(|name| ((*name).to_owned(), json!({"type": "string"}))).collect();
        json!({"name": name, "input_schema": {"type": "object", "properties": properties}})
    };
    json!({"model": "claude-x", "max_tokens": 99, "stream": stream, "messages": messages, "tools": [
        tool("Bash", &["command", "description", "timeout"]), tool("Write", &["file_path", "content"]),
        tool("Read", &["file_path", "limit"]), tool("Edit", &["file_path", "old_string", "new_string"]),
        tool("AskUserQuestion", &["questions"]),
    ]})
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": [
        {"type": "text", "text": "<system-reminder>\nscript: [{\"text\":\"not this\"}]\n</system-reminder>"},
        {"type": "text", "text": text},
    ]})
}

/// Assembles a message from its events, like a client.
fn assemble(events: &str) -> Value {
    let mut message = Value::Null;
    let mut partial = String::new();
    for data in events.lines().filter_map(|line| line.strip_prefix("data: ")) {
        let event: Value = serde_json::from_str(data).unwrap();
        let index = event["index"].as_u64().unwrap_or(0) as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().unwrap().len(), index);
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                partial.clear();
            }
            "content_block_delta" => match event["delta"]["type"].as_str().unwrap() {
                "input_json_delta" => {
                    partial.push_str(event["delta"]["partial_json"].as_str().unwrap())
                }
                kind => {
                    let field = kind.strip_suffix("_delta").unwrap();
                    let block = &mut message["content"][index][field];
                    *block = json!(format!(
                        "{}{}",
                        block.as_str().unwrap(),
                        event["delta"][field].as_str().unwrap()
                    ));
                }
            },
            "content_block_stop" if !partial.is_empty() => {
                message["content"][index]["input"] = serde_json::from_str(&partial).unwrap();
            }
            "message_delta" => {
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["usage"] = event["usage"].clone();
            }
            _ => {}
        }
    }
    assert!(events.ends_with("data: {\"type\":\"message_stop\"}\n\n"), "{events}");
    message
}

#[tokio::test(flavor = "multi_thread")]
async fn script_is_played_step_by_step() {
    let agent = Agent::scripted().await;
    let mut messages = vec![user(
        r#"Do it.
script: [
  [{"thinking": "hm"}, {"text": "Working on it.", "chunks": 3}, {"bash": "make"}],
  {"write": {"path": "/w/a", "content": "x"}},
  {"read": "/w/a"},
  {"edit": {"path": "/w/a", "old": "x", "new": "y"}},
  {"ask": {"question": "Which?", "options": ["red", "blue"]}},
  {"tool": {"name": "mcp__m__t", "input": {"k": 1}}},
  [{"usage": {"input": 7, "output": 8, "cache_read": 9}}, {"text": "All done."}]
]"#,
    )];
    let mut seen = Vec::new();
    for stream in [true, false, true, true, true, false, true, true] {
        let answered = agent.send(MESSAGES, &request(&messages, stream)).await.unwrap();
        assert_eq!(answered.headers()["x-harvest-upstream"], "scripted");
        let text = answered.text().await.unwrap();
        let message = if stream { assemble(&text) } else { serde_json::from_str(&text).unwrap() };
        assert_eq!(message["model"], "claude-x");
        messages.push(json!({"role": "assistant", "content": message["content"]}));
        if message["stop_reason"] == "tool_use" {
            let id = &message["content"].as_array().unwrap().last().unwrap()["id"];
            messages.push(json!({"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": id, "content": "ok"},
                {"type": "text", "text": "<system-reminder>keep going</system-reminder>"}]}));
        }
        seen.push(message);
    }
    let kinds = |index: usize| {
        let content = seen[index]["content"].as_array().unwrap();
        content.iter().map(|block| block["type"].as_str().unwrap()).collect::<Vec<_>>()
    };
    let call = |index: usize| {
        let block = seen[index]["content"].as_array().unwrap().last().unwrap();
        (block["name"].as_str().unwrap(), block["input"].clone())
    };
    assert_eq!(kinds(0), ["thinking", "text", "tool_use"]);
    assert_eq!(seen[0]["content"][1]["text"], "Working on it.");
    assert_eq!(
        call(0),
        ("Bash", json!({"command": "make", "description": "Run a scripted command"}))
    );
    assert_eq!(call(1), ("Write", json!({"file_path": "/w/a", "content": "x"})));
    assert_eq!(call(2), ("Read", json!({"file_path": "/w/a"})));
    assert_eq!(
        call(3),
        ("Edit", json!({"file_path": "/w/a", "old_string": "x", "new_string": "y"}))
    );
    assert_eq!(call(4).1["questions"][0]["options"][1]["label"], "blue");
    assert_eq!(call(5), ("mcp__m__t", json!({"k": 1})));
    assert_eq!(
        (&seen[6]["content"][0]["text"], &seen[6]["stop_reason"]),
        (&json!("All done."), &json!("end_turn"))
    );
    assert_eq!(seen[7]["content"][0]["text"], "done");
    let events = agent.door.ledger.wait_for_events(8).await;
    let settled = agent.door.ledger.settled.lock().unwrap().clone();
    assert_eq!(
        settled[6],
        Usage { input_tokens: 7, output_tokens: 8, cache_read_tokens: 9, cache_write_tokens: 0 }
    );
    assert_eq!(settled.len(), 8);
    assert!(matches!(&events[0], EventBody::ModelCall { upstream, model, status: 200, usage, .. }
        if upstream == "scripted" && model == "claude-x" && usage.input_tokens == 100 && usage.output_tokens == 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn scripted_error_stops_after_its_count() {
    let agent = Agent::scripted().await;
    let prompt = user(
        r#"script: [[{"error": {"status": 529, "type": "overloaded_error", "message": "busy", "times": 2}}, {"text": "ok now"}]]"#,
    );
    for messages in [
        vec![prompt.clone()],
        vec![prompt.clone(), json!({"role": "assistant", "content": "a"}), prompt],
    ] {
        for _ in 0..2 {
            let (status, body) = agent.json(&request(&messages, true)).await;
            assert_eq!((status, &body["error"]["type"]), (529, &json!("overloaded_error")));
        }
        let (status, body) = agent.json(&request(&messages, false)).await;
        assert_eq!((status, &body["content"][0]["text"]), (200, &json!("ok now")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_response_is_cut_and_retry_succeeds() {
    let agent = Agent::scripted().await;
    let messages = [user(r#"script: [[{"text": "before"}, {"drop": 2}, {"text": "after"}]]"#)];
    let cut = agent.send(MESSAGES, &request(&messages, true)).await.unwrap().text().await;
    assert!(cut.is_err());
    assert!(agent.send(MESSAGES, &request(&messages, false)).await.is_err());
    let whole =
        agent.send(MESSAGES, &request(&messages, true)).await.unwrap().text().await.unwrap();
    assert_eq!(assemble(&whole)["content"][1]["text"], "after");
    assert_eq!(agent.door.ledger.wait_for_events(3).await.len(), 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn hang_ends_when_the_agent_disconnects() {
    let agent = Agent::scripted().await;
    let messages = [user(r#"script: [[{"text": "hello there"}, {"hang": 86400}]]"#)];
    let mut chunks = agent.send(MESSAGES, &request(&messages, true)).await.unwrap().bytes_stream();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("content_block_stop") {
        seen.extend_from_slice(&chunks.next().await.unwrap().unwrap());
    }
    drop(chunks);
    agent.door.ledger.wait_for_events(1).await;
    assert_eq!(agent.door.ledger.settled.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_step_is_named_in_the_response() {
    let agent = Agent::scripted().await;
    let (status, body) = agent.json(&request(&[user(r#"script: [{"dance": 1}]"#)], true)).await;
    assert_eq!(status, 400);
    assert!(body["error"]["message"].as_str().unwrap().contains("unknown field `dance`"), "{body}");
    let mut no_bash = request(&[user(r#"script: [{"bash": "ls"}]"#)], true);
    no_bash["tools"] = json!([{"name": "Read"}]);
    let (status, body) = agent.json(&no_bash).await;
    assert!(
        status == 400 && body["error"]["message"].as_str().unwrap().contains("`bash`"),
        "{body}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn auxiliary_requests_get_a_response() {
    let agent = Agent::scripted().await;
    let mut titles = request(&[user(r#"script: [{"bash": "ls"}]"#)], false);
    titles["tools"] = json!([]);
    assert_eq!(agent.json(&titles).await.1["content"][0]["text"], "Scripted title");
    let counted =
        agent.send("/v1/messages/count_tokens", &titles).await.unwrap().text().await.unwrap();
    assert!(serde_json::from_str::<Value>(&counted).unwrap()["input_tokens"].as_u64().unwrap() > 0);
    for path in ["/v1/models", "/", "/v1/messages/batches"] {
        let answered = agent.send(path, &titles).await.unwrap();
        assert_eq!(answered.status(), 404);
        assert!(answered.text().await.unwrap().contains("not_found_error"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn oversized_request_is_refused() {
    let agent = Agent::scripted().await;
    let long = json!({"model": "x", "padding": "x".repeat(33 << 20)});
    // The door may close the connection before everything is sent.
    if let Ok(answered) = agent.send(MESSAGES, &long).await {
        assert_eq!(answered.status(), 413);
    }
    assert_eq!(agent.json(&request(&[user("hi")], false)).await.0, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn call_refused_for_now_can_be_retried() {
    let refusal = Some(Refusal::Retry("held by calls in progress".into()));
    let ledger = RecordingLedger { refusal, ..RecordingLedger::default() };
    let agent = Agent::new(ledger, GatewayConfig::default(), UpstreamName::scripted()).await;
    let (status, body) = agent.json(&request(&[user("hi")], true)).await;
    assert_eq!((status, &body["error"]["type"]), (429, &json!("rate_limit_error")));
    assert_eq!(body["error"]["code"], "rate_limit_exceeded");
}

#[tokio::test(flavor = "multi_thread")]
async fn call_is_reserved_with_its_bounds() {
    let ledger = RecordingLedger::default();
    let agent = Agent::new(ledger, GatewayConfig::default(), UpstreamName::scripted()).await;
    let mut asked = request(&[user("hi")], false);
    asked["max_tokens"] = json!(77);
    agent.json(&asked).await;
    let planned = agent.door.ledger.planned.lock().unwrap().remove(0);
    let expected = MostTokens {
        input: Some((asked.to_string().len() as u64).div_ceil(3)),
        output: Some(77),
        responses: 1,
    };
    assert_eq!((planned.most, planned.keyed), (expected, false));
    let (status, body) = agent.json(&json!({"model": "scripted", "messages": [], "n": "8"})).await;
    assert_eq!((status, &body["error"]["type"]), (400, &json!("invalid_request_error")));
    assert_eq!(agent.door.ledger.planned.lock().unwrap().len(), 0, "nothing was reserved");
}

#[tokio::test(flavor = "multi_thread")]
async fn call_refused_by_ledger_is_invalid_request() {
    let refusal = Some(Refusal::Final("the budget of 5 USD is used up".into()));
    let ledger = RecordingLedger { refusal, ..RecordingLedger::default() };
    let agent = Agent::new(ledger, GatewayConfig::default(), UpstreamName::scripted()).await;
    let (status, body) = agent.json(&request(&[user("hi")], true)).await;
    assert_eq!((status, &body["type"]), (400, &json!("error")));
    let error = &body["error"];
    assert_eq!(error["type"], "invalid_request_error");
    assert_eq!(error["message"], "the budget of 5 USD is used up");
    // Clients of OpenAI take this code as final.
    assert_eq!(error["code"], "insufficient_quota");
}

const EVENTS: [&str; 4] = [
    "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":11,\"output_tokens\":1,\"cache_creation_input_tokens\":3}}}\n\n",
    "event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hello setup, hello\"}}\n\n",
    "event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":33}}\n\n",
    "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n",
];

type Seen = Arc<Mutex<Vec<(String, HeaderMap, Bytes)>>>;

/// A fake of the API; the requested model selects its behaviour.
async fn fake_api() -> (String, Seen) {
    let seen = Seen::default();
    let kept = Arc::clone(&seen);
    let answer = move |uri: Uri, headers: HeaderMap, body: Bytes| {
        let model = serde_json::from_slice::<Value>(&body).unwrap()["model"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        kept.lock().unwrap().push((uri.to_string(), headers, body));
        let kept = Arc::clone(&kept);
        async move {
            if model == "silent" {
                std::future::pending::<()>().await;
            }
            play(&model, kept)
        }
    };
    let router = Router::new()
        .route("/v1/messages", post(answer.clone()))
        .route("/v1/messages/count_tokens", post(answer));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    (url, seen)
}

/// Waits for the next request.
async fn second_request(seen: Seen) {
    while seen.lock().unwrap().len() < 2 {
        tokio::task::yield_now().await;
    }
}

fn play(model: &str, seen: Seen) -> Response<Body> {
    let events = |list: Vec<&'static str>| {
        stream::iter(list).map(|event| Ok::<_, Infallible>(Bytes::from(event)))
    };
    let response = Response::builder().header("request-id", "req_1").header("set-cookie", "s=1");
    match model {
        "stream" => response
            .header("content-type", "text/event-stream; charset=utf-8")
            .body(Body::from_stream(events(EVENTS.to_vec()))),
        "slow" => response.header("content-type", "text/event-stream; charset=utf-8").body(
            Body::from_stream(events(EVENTS[..2].to_vec()).chain(
                stream::once(second_request(seen)).flat_map(move |()| events(EVENTS[2..].to_vec())),
            )),
        ),
        "busy" => response
            .status(429)
            .header("retry-after", "7")
            .header("x-echo", KEY)
            .body(Body::from(format!("{{\"error\":\"no, {KEY}\"}}"))),
        "elsewhere" => response
            .status(307)
            .header("location", "http://127.0.0.1:1/v1/messages")
            .body(Body::empty()),
        _ => response
            .header("content-type", "application/json")
            .body(Body::from(r#"{"input_tokens":5,"usage":{"input_tokens":5,"output_tokens":6}}"#)),
    }
    .unwrap()
}

async fn anthropic() -> (Agent, Seen) {
    let (anthropic_url, seen) = fake_api().await;
    let ledger = RecordingLedger {
        secrets: HashMap::from([("ANTHROPIC_API_KEY", KEY)]),
        ..RecordingLedger::default()
    };
    let config = at(&anthropic_url);
    (Agent::new(ledger, config, UpstreamName::anthropic()).await, seen)
}

/// The Anthropic API is at this URL.
fn at(url: &str) -> GatewayConfig {
    let (name, upstreams) = (UpstreamName::anthropic(), Upstreams::default());
    let anthropic = Upstream { url: url.to_owned(), ..upstreams.get(&name).unwrap().clone() };
    GatewayConfig { upstreams: upstreams.with(name, anthropic), ..GatewayConfig::default() }
}

fn model(name: &str) -> Value {
    json!({"model": name, "messages": []})
}

#[tokio::test(flavor = "multi_thread")]
async fn key_is_added_and_response_is_unchanged() {
    let (agent, seen) = anthropic().await;
    let answered = agent.send(MESSAGES, &model("stream")).await.unwrap();
    assert_eq!(answered.headers()["request-id"], "req_1");
    assert!(!answered.headers().contains_key("set-cookie"));
    assert_eq!(answered.text().await.unwrap(), EVENTS.concat());
    let (uri, headers, body) = seen.lock().unwrap().remove(0);
    assert_eq!((uri.as_str(), body), (MESSAGES, Bytes::from(model("stream").to_string())));
    assert_eq!(
        (&headers["x-api-key"], headers.get_all("x-api-key").iter().count()),
        (&KEY.parse().unwrap(), 1)
    );
    assert!(!headers.contains_key("authorization") && !headers.contains_key("cookie"));
    assert_eq!(
        (&headers["anthropic-version"], &headers["anthropic-beta"]),
        (&"2023-06-01".parse().unwrap(), &"some-beta".parse().unwrap())
    );
    assert_eq!(headers["accept-encoding"], "identity");
    let events = agent.door.ledger.wait_for_events(1).await;
    let used =
        Usage { input_tokens: 11, output_tokens: 33, cache_read_tokens: 0, cache_write_tokens: 3 };
    assert!(
        matches!(&events[..], [EventBody::ModelCall { upstream, model, status: 200, usage, .. }]
        if upstream == "anthropic" && model == "stream" && *usage == used)
    );
    assert_eq!(*agent.door.ledger.settled.lock().unwrap(), [used]);
}

#[tokio::test(flavor = "multi_thread")]
async fn response_is_counted_after_agent_disconnects() {
    let (agent, _) = anthropic().await;
    let mut chunks = agent.send(MESSAGES, &model("slow")).await.unwrap().bytes_stream();
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains("hello setup") {
        seen.extend_from_slice(&chunks.next().await.unwrap().unwrap());
    }
    drop(chunks);
    agent.send("/v1/messages/count_tokens", &model("json")).await.unwrap();
    agent.door.ledger.wait_for_events(1).await;
    let settled = agent.door.ledger.settled.lock().unwrap().clone();
    assert_eq!((settled.len(), settled[0].input_tokens, settled[0].output_tokens), (1, 11, 33));
}

/// Asks the model that gives no response, and leaves once the API has the request.
async fn ask_and_leave(agent: &Agent, seen: &Seen) {
    let (count, body) = (seen.lock().unwrap().len(), model("silent"));
    let arrived = async {
        while seen.lock().unwrap().len() == count {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        answered = agent.send(MESSAGES, &body) => panic!("{answered:?}"),
        () = arrived => {}
    }
}

/// What is known of a call without a response.
fn only_input() -> Usage {
    let input_tokens = model("silent").to_string().len().div_ceil(4) as u64;
    Usage { input_tokens, ..Usage::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn service_without_key_is_cut_with_the_agent() {
    let (url, seen) = fake_api().await;
    let name = UpstreamName::anthropic();
    let mut config = at(&url);
    let (secret, oauth_secret) = (None, None);
    let upstream =
        Upstream { secret, oauth_secret, ..config.upstreams.get(&name).unwrap().clone() };
    config.upstreams = config.upstreams.with(name.clone(), upstream);
    let agent = Agent::new(RecordingLedger::default(), config, name).await;
    ask_and_leave(&agent, &seen).await;
    let events = agent.door.ledger.wait_for_events(1).await;
    assert!(matches!(events[..], [EventBody::ModelCall { status: 499, .. }]), "{events:?}");
    assert_eq!(*agent.door.ledger.unread.lock().unwrap(), [only_input()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn few_cut_responses_are_read_on() {
    let (agent, seen) = anthropic().await;
    for _ in 0..17 {
        ask_and_leave(&agent, &seen).await;
    }
    agent.door.ledger.wait_for_events(1).await;
    assert_eq!(*agent.door.ledger.unread.lock().unwrap(), [only_input()]);
    assert_eq!(agent.door.ledger.settled.lock().unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn api_error_passes_without_the_key() {
    let (agent, _) = anthropic().await;
    let answered = agent.send(MESSAGES, &model("busy")).await.unwrap();
    assert_eq!(
        (answered.status().as_u16(), &answered.headers()["retry-after"]),
        (429, &"7".parse().unwrap())
    );
    assert!(!answered.headers().contains_key("x-echo"));
    assert_eq!(answered.text().await.unwrap(), r#"{"error":"no, ***"}"#);
    assert!(matches!(
        agent.door.ledger.wait_for_events(1).await[..],
        [EventBody::ModelCall { status: 429, .. }]
    ));
    assert_eq!(agent.door.ledger.settled.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn redirect_is_neither_followed_nor_forwarded() {
    let (agent, seen) = anthropic().await;
    let answered = agent.send(MESSAGES, &model("elsewhere")).await.unwrap();
    assert_eq!(answered.status(), 502);
    assert!(!answered.headers().contains_key("location"));
    assert_eq!(seen.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn json_responses_are_counted_and_count_tokens_free() {
    let (agent, seen) = anthropic().await;
    agent.send("/v1/messages/count_tokens", &model("json")).await.unwrap().text().await.unwrap();
    agent.send(MESSAGES, &model("json")).await.unwrap().text().await.unwrap();
    let events = agent.door.ledger.wait_for_events(1).await;
    assert!(
        matches!(&events[..], [EventBody::ModelCall { usage, .. }] if usage.output_tokens == 6)
    );
    assert_eq!(agent.door.ledger.settled.lock().unwrap().len(), 1);
    assert_eq!(seen.lock().unwrap()[0].0, "/v1/messages/count_tokens");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_key_or_api_is_explained() {
    let agent =
        Agent::new(RecordingLedger::default(), GatewayConfig::default(), UpstreamName::anthropic())
            .await;
    let (status, body) = agent.json(&model("x")).await;
    assert!(
        status == 400
            && body["error"]["message"]
                .as_str()
                .unwrap()
                .contains("harvest secret set ANTHROPIC_API_KEY")
    );
    let ledger = RecordingLedger {
        secrets: HashMap::from([("ANTHROPIC_API_KEY", KEY)]),
        ..RecordingLedger::default()
    };
    // Nothing listens on port 1 of loopback.
    let config = at("http://127.0.0.1:1");
    let agent = Agent::new(ledger, config, UpstreamName::anthropic()).await;
    let (status, body) = agent.json(&model("x")).await;
    assert_eq!((status, &body["error"]["type"]), (502, &json!("api_error")));
    assert!(!body.to_string().contains(KEY));
}

#[tokio::test]
async fn check_calls_no_model_and_no_tools() {
    let policy = crate::DoorPolicy { purpose: DoorPurpose::Check, ..policy(&[]) };
    let (ledger, config) = (RecordingLedger::default(), GatewayConfig::default());
    let agent = Agent::with_policy(ledger, config, policy).await;
    let (status, refused) = agent.json(&request(&[user("script: []")], false)).await;
    assert_eq!((status, refused["error"]["type"].as_str()), (403, Some("permission_error")));
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("a check calls no model"), "{message}");
    let events = agent.door.ledger.events.lock().unwrap().clone();
    assert!(
        matches!(&events[..], [EventBody::EgressRefused { name, .. }] if name == MODEL_NAME),
        "{events:?}"
    );
    let tools = format!("http://{}/mcp", agent.door.inside(MCP_NAME, 80).await);
    let answered = agent.client.post(tools).body("{}").send().await.unwrap();
    assert_eq!(answered.status().as_u16(), 403);
    assert_eq!(answered.text().await.unwrap().trim(), "a check has no tools");
}
