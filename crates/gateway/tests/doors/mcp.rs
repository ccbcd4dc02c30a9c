//! The tools door: MCP over plain HTTP, one message per request.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use async_trait::async_trait;
use harvest_gateway::{
    GatewayConfig,
    ledger::{ToolResult, Tools},
};
use harvest_proto::door::MCP_NAME;
use serde_json::{Value, json};
use tokio::sync::Semaphore;

use crate::{RecordingLedger, TestDoor, policy};

/// One tool that returns its arguments.
#[derive(Default)]
struct Echo(Mutex<Vec<Value>>);

#[async_trait]
impl Tools for Echo {
    fn list(&self) -> Vec<Value> {
        vec![json!({ "name": "echo", "inputSchema": { "type": "object" } })]
    }

    async fn call(&self, name: &str, arguments: Value) -> Option<ToolResult> {
        self.0.lock().unwrap().push(arguments.clone());
        let (text, structured) = (arguments.to_string(), Some(arguments));
        (name == "echo").then_some(ToolResult { text, structured, failed: false })
    }
}

/// One tool that waits until it may return.
struct Slow {
    running: AtomicUsize,
    most: AtomicUsize,
    started: Semaphore,
    released: Semaphore,
}

impl Slow {
    fn new() -> Arc<Self> {
        let (running, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let (started, released) = (Semaphore::new(0), Semaphore::new(0));
        Arc::new(Self { running, most, started, released })
    }
}

#[async_trait]
impl Tools for Slow {
    fn list(&self) -> Vec<Value> {
        Vec::new()
    }

    async fn call(&self, _: &str, _: Value) -> Option<ToolResult> {
        self.most.fetch_max(self.running.fetch_add(1, SeqCst) + 1, SeqCst);
        self.started.add_permits(1);
        self.released.acquire().await.unwrap().forget();
        self.running.fetch_sub(1, SeqCst);
        Some(ToolResult { text: String::new(), structured: None, failed: false })
    }
}

struct Client {
    door: TestDoor,
    url: String,
    http: reqwest::Client,
}

impl Client {
    async fn new(tools: Option<Arc<dyn Tools>>) -> Self {
        let config = GatewayConfig::default();
        let door = TestDoor::with_tools(RecordingLedger::default(), config, policy(&[]), tools);
        let url = format!("http://{}", door.inside(MCP_NAME, 80).await);
        Self { door, url, http: reqwest::Client::builder().no_proxy().build().unwrap() }
    }

    async fn post(&self, body: &Value) -> (u16, Value) {
        let sent = self.http.post(format!("{}/mcp", self.url)).json(body).send().await.unwrap();
        let status = sent.status().as_u16();
        (status, serde_json::from_str(&sent.text().await.unwrap()).unwrap_or(Value::Null))
    }

    async fn call(&self, method: &str, params: Value) -> Value {
        let body = json!({ "jsonrpc": "2.0", "id": "7", "method": method, "params": params });
        let (status, answer) = self.post(&body).await;
        assert_eq!((status, &answer["jsonrpc"], &answer["id"]), (200, &json!("2.0"), &json!("7")));
        answer
    }
}

#[tokio::test]
async fn tools_are_listed_and_called_without_a_session() {
    let client = Client::new(Some(Arc::new(Echo::default()))).await;
    // No handshake is needed: a server that restarted knows nothing of it.
    let listed = client.call("tools/list", json!({})).await;
    assert_eq!(listed["result"]["tools"][0]["name"], "echo");
    let called =
        client.call("tools/call", json!({ "name": "echo", "arguments": { "a": 1 } })).await;
    let expected = json!({
        "content": [{ "type": "text", "text": "{\"a\":1}" }],
        "structuredContent": { "a": 1 },
        "isError": false,
    });
    assert_eq!(called["result"], expected);
    let version = json!({ "protocolVersion": "2025-06-18", "capabilities": {} });
    let shaken = client.call("initialize", version).await;
    assert_eq!(shaken["result"]["protocolVersion"], "2025-06-18");
    assert_eq!(shaken["result"]["serverInfo"]["name"], "harvest");
    assert_eq!(client.call("ping", json!({})).await["result"], json!({}));
}

#[tokio::test]
async fn unknown_tools_and_methods_are_errors() {
    let client = Client::new(Some(Arc::new(Echo::default()))).await;
    let unknown = client.call("tools/call", json!({ "name": "nope" })).await;
    assert_eq!(unknown["error"]["code"], -32602);
    let unsupported = client.call("resources/list", json!({})).await;
    assert_eq!(unsupported["error"]["code"], -32601);
    let notified = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
    assert_eq!(client.post(&notified).await, (202, Value::Null));
    assert_eq!(client.post(&json!([])).await.0, 400);
}

#[tokio::test]
async fn streams_and_authorization_servers_do_not_exist() {
    let client = Client::new(Some(Arc::new(Echo::default()))).await;
    let status = async |method: reqwest::Method, path: &str| {
        let request = client.http.request(method, format!("{}{path}", client.url));
        request.send().await.unwrap().status().as_u16()
    };
    assert_eq!(status(reqwest::Method::GET, "/mcp").await, 405);
    assert_eq!(status(reqwest::Method::DELETE, "/mcp").await, 405);
    for path in ["oauth-protected-resource", "oauth-authorization-server", "openid-configuration"] {
        assert_eq!(status(reqwest::Method::GET, &format!("/.well-known/{path}")).await, 404);
    }
    assert_eq!(status(reqwest::Method::POST, "/register").await, 404);
}

#[tokio::test]
async fn door_without_tools_serves_none() {
    let client = Client::new(None).await;
    let listed = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    assert_eq!(client.post(&listed).await.0, 404);
    assert!(client.door.ledger.events().is_empty());
}

#[tokio::test]
async fn running_tool_calls_are_limited_per_door() {
    let (slow, other) = (Slow::new(), Slow::new());
    let client = Client::new(Some(Arc::clone(&slow) as Arc<dyn Tools>)).await;
    let second = Client::new(Some(Arc::clone(&other) as Arc<dyn Tools>)).await;
    let call = json!({ "name": "slow" });
    let calls = (0..20).map(|_| client.call("tools/call", call.clone()));
    let steps = async {
        slow.started.acquire_many(16).await.unwrap().forget();
        // The calls of another door do not wait for these.
        other.released.add_permits(1);
        second.call("tools/call", call.clone()).await;
        assert_eq!(slow.running.load(SeqCst), 16);
        slow.released.add_permits(20);
    };
    futures_util::future::join(futures_util::future::join_all(calls), steps).await;
    assert_eq!((slow.most.load(SeqCst), slow.running.load(SeqCst)), (16, 0));
}

#[tokio::test]
async fn large_request_is_refused() {
    let echo = Arc::new(Echo::default());
    let client = Client::new(Some(Arc::clone(&echo) as Arc<dyn Tools>)).await;
    for (length, status) in [(1_000_000, 200), (1_100_000, 413)] {
        let params = json!({ "name": "echo", "arguments": { "a": "x".repeat(length) } });
        let body = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params });
        let request = client.http.post(format!("{}/mcp", client.url)).json(&body);
        // The door may close the connection before everything is sent.
        if let Ok(answered) = request.send().await {
            assert_eq!(answered.status().as_u16(), status, "{length}");
        }
    }
    assert_eq!(echo.0.lock().unwrap().len(), 1);
}
