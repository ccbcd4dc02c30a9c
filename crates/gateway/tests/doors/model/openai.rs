//! The model door with a fake OpenAI API.

use axum::routing::get;
use harvest_proto::UpstreamKind;

use super::*;

const OPENAI_KEY: &str = "sk-proj-never-inside";
const TOKENS: &str = r#"{"prompt_tokens":20,"completion_tokens":6,"total_tokens":26,"prompt_tokens_details":{"cached_tokens":5}}"#;
const CONTENT: &str = "data: {\"id\":\"c\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\"hi\"}}],\"usage\":null}\n\n";
const RESPONSE: &str = r#"{"id":"r","output":[],"usage":{"input_tokens":20,"output_tokens":6,"input_tokens_details":{"cached_tokens":5}}}"#;

fn used() -> Usage {
    Usage { input_tokens: 15, output_tokens: 6, cache_read_tokens: 5, cache_write_tokens: 0 }
}

fn chat_stream(with_usage: bool) -> String {
    let usage = format!("data: {{\"id\":\"c\",\"choices\":[],\"usage\":{TOKENS}}}\n\n");
    format!("{CONTENT}{}data: [DONE]\n\n", if with_usage { usage } else { String::new() })
}

fn answer(path: &str, body: &[u8]) -> Response<Body> {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    let streamed = body["stream"] == true;
    let text = match path {
        "/api/v1/chat/completions" if streamed => {
            chat_stream(body["stream_options"]["include_usage"] == true)
        }
        "/api/v1/chat/completions" => format!("{{\"choices\":[],\"usage\":{TOKENS}}}"),
        "/api/v1/responses" if streamed => format!(
            "event: response.completed\ndata: {{\"type\":\"response.completed\",\"response\":{RESPONSE}}}\n\n"
        ),
        "/api/v1/responses" => RESPONSE.to_owned(),
        _ => r#"{"object":"list","data":[{"id":"gpt"}]}"#.to_owned(),
    };
    let kind = if streamed { "text/event-stream" } else { "application/json" };
    Response::builder().header("content-type", kind).body(Body::from(text)).unwrap()
}

/// An agent with a fake API of this kind, whose base URL has a path.
async fn agent(kind: UpstreamKind, ledger: RecordingLedger) -> (Agent, Seen) {
    let seen = Seen::default();
    let kept = Arc::clone(&seen);
    let handler = move |uri: Uri, headers: HeaderMap, body: Bytes| {
        let response = answer(uri.path(), &body);
        kept.lock().unwrap().push((uri.to_string(), headers, body));
        async move { response }
    };
    let router = Router::new().fallback(get(handler.clone()).post(handler));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/api/v1/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await });
    let (name, secret) = (UpstreamName::openai(), Some("OPENAI_API_KEY".to_owned()));
    let upstream = Upstream { kind, url, secret, oauth_secret: None };
    let upstreams = Upstreams::default().with(name.clone(), upstream);
    let config = GatewayConfig { upstreams, ..GatewayConfig::default() };
    (Agent::new(ledger, config, name).await, seen)
}

fn with_key() -> RecordingLedger {
    let secrets = HashMap::from([("OPENAI_API_KEY", OPENAI_KEY)]);
    RecordingLedger { secrets, ..RecordingLedger::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_calls_are_forwarded_and_counted() {
    let (agent, seen) = agent(UpstreamKind::Openai, with_key()).await;
    let calls = ["/v1/responses", "/v1/chat/completions", "/openai/v1/responses?a=b"];
    for (path, stream) in calls.into_iter().flat_map(|path| [(path, false), (path, true)]) {
        let body = json!({"model": "gpt", "stream": stream});
        let answered = agent.send(path, &body).await.unwrap();
        assert_eq!(answered.status(), 200);
        answered.text().await.unwrap();
        let (uri, headers, _) = seen.lock().unwrap().remove(0);
        assert_eq!(uri, format!("/api{}", path.trim_start_matches("/openai")));
        assert_eq!(headers["authorization"], format!("Bearer {OPENAI_KEY}"));
        assert!(!headers.contains_key("x-api-key"));
    }
    let events = agent.door.ledger.wait_for_events(6).await;
    assert!(
        events.iter().all(|event| matches!(event,
        EventBody::ModelCall { upstream, model, usage, .. }
            if upstream == "openai" && model == "gpt" && *usage == used())),
        "{events:?}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_chunk_is_requested_and_removed_again() {
    let (agent, seen) = agent(UpstreamKind::OpenaiChat, with_key()).await;
    for asked in [false, true] {
        let mut body = json!({"model": "gpt", "stream": true, "messages": []});
        if asked {
            body["stream_options"] = json!({"include_usage": true});
        }
        let answered = agent.send("/v1/chat/completions", &body).await.unwrap();
        assert_eq!(answered.text().await.unwrap(), chat_stream(asked));
        let (_, _, sent) = seen.lock().unwrap().remove(0);
        let sent: Value = serde_json::from_slice(&sent).unwrap();
        assert_eq!(sent["stream_options"], json!({"include_usage": true}));
    }
    agent.door.ledger.wait_for_events(2).await;
    assert_eq!(*agent.door.ledger.settled.lock().unwrap(), [used(), used()]);
}

#[tokio::test(flavor = "multi_thread")]
async fn model_list_is_forwarded_without_budget() {
    let refusal = Some(Refusal::Final("the budget is used up".into()));
    let (agent, seen) =
        agent(UpstreamKind::Openai, RecordingLedger { refusal, ..with_key() }).await;
    let url = format!("{}/v1/models", agent.base);
    let listed = agent.client.get(url).send().await.unwrap().text().await.unwrap();
    assert!(listed.contains("gpt"), "{listed}");
    assert_eq!(seen.lock().unwrap()[0].0, "/api/v1/models");
    let refused = agent.send("/v1/responses", &json!({"model": "gpt"})).await.unwrap();
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("\"insufficient_quota\""));
    assert_eq!(agent.door.ledger.events(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_paths_of_the_service_are_unreachable() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let (agent, seen) = agent(UpstreamKind::Openai, with_key()).await;
    let address = agent.base.trim_start_matches("http://");
    for id in ["../files", "%2e%2e/files", "a/..%2f..", "..\\files"] {
        // Without a client that would normalize the path.
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let head = format!("GET /openai/v1/models/{id} HTTP/1.1\r\nhost: m\r\n");
        stream.write_all(format!("{head}connection: close\r\n\r\n").as_bytes()).await.unwrap();
        let mut answered = String::new();
        stream.read_to_string(&mut answered).await.unwrap();
        assert!(answered.starts_with("HTTP/1.1 404 ") || answered.starts_with("HTTP/1.1 400 "));
    }
    assert_eq!(seen.lock().unwrap().len(), 0, "nothing was sent to the service");
}

#[tokio::test(flavor = "multi_thread")]
async fn services_with_a_key_list_their_models() {
    let (agent, seen) = agent(UpstreamKind::Openai, with_key()).await;
    let listed = agent.door.gateway.models(&[], None).await;
    let models: Vec<_> = listed
        .iter()
        .map(|one| (one.service.name.as_str(), one.models.as_slice(), one.problem.as_deref()))
        .collect();
    let (gpt, scripted) = (["gpt".to_owned()], ["scripted".to_owned()]);
    let expected = [
        ("anthropic", &[][..], None),
        ("gemini", &[][..], None),
        ("openai", &gpt[..], None),
        ("scripted", &scripted[..], None),
    ];
    assert_eq!(models, expected);
    let (uri, headers, _) = seen.lock().unwrap().remove(0);
    assert_eq!(
        (uri.as_str(), &headers["authorization"]),
        ("/api/v1/models", &format!("Bearer {OPENAI_KEY}").parse().unwrap())
    );
    let one = agent.door.gateway.models(&[], Some(&UpstreamName::scripted())).await;
    assert_eq!(one.iter().map(|one| one.service.name.as_str()).collect::<Vec<_>>(), ["scripted"]);
    assert_eq!(seen.lock().unwrap().len(), 0, "no other service was asked");
    let unreachable =
        Agent::new(anthropic_key(), at("http://127.0.0.1:1"), UpstreamName::anthropic()).await;
    let problem = unreachable.door.gateway.models(&[], None).await[0].problem.clone();
    assert_eq!(problem.as_deref(), Some("cannot be reached from this machine"));
}

fn anthropic_key() -> RecordingLedger {
    let secrets = HashMap::from([("ANTHROPIC_API_KEY", KEY)]);
    RecordingLedger { secrets, ..RecordingLedger::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn unserved_protocol_and_missing_key_are_explained() {
    let (agent, seen) = agent(UpstreamKind::OpenaiChat, RecordingLedger::default()).await;
    for (path, status, words) in [
        ("/v1/responses", 404, "upstream `openai` (openai_chat) does not serve /v1/responses"),
        ("/v1/messages", 404, "does not serve /v1/messages"),
        ("/v1/chat/completions", 400, "harvest secret set OPENAI_API_KEY"),
    ] {
        let answered = agent.send(path, &json!({"model": "gpt", "messages": []})).await.unwrap();
        assert_eq!(answered.status(), status);
        let body = answered.text().await.unwrap();
        assert!(body.contains(words), "{body}");
    }
    assert_eq!(seen.lock().unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn openai_fetches_nothing_outside_the_policy() {
    let (agent, seen) = agent(UpstreamKind::Openai, with_key()).await;
    let image = json!({"type": "input_image", "image_url": "https://evil.example/?x"});
    let remote = json!({"type": "mcp", "server_label": "m", "server_url": "https://mcp.example/"});
    for body in [
        json!({"input": [{"role": "user", "content": [image]}]}),
        json!({"tools": [remote]}),
        json!({"tools": [{"type": "web_search"}]}),
    ] {
        let refused = agent.send("/v1/responses", &body).await.unwrap();
        assert_eq!(refused.status(), 400, "{body}");
    }
    let events = agent.door.ledger.events();
    let names = events.iter().map(|event| match event {
        EventBody::EgressRefused { name, .. } => name.as_str(),
        other => panic!("{other:?}"),
    });
    let expected = ["evil.example", "mcp.example", "tool `web_search`"];
    assert_eq!(names.collect::<Vec<_>>(), expected);
    assert_eq!(seen.lock().unwrap().len(), 0, "nothing was sent to the service");
}
