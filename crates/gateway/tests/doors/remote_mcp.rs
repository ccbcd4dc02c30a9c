//! MCP servers to which the gateway adds a key. The remote is a server of the official SDK, which
//! `.ci/model-sdks` installs.

use std::{
    io::{BufRead as _, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
};

use async_trait::async_trait;
use harvest_gateway::{
    GatewayConfig, McpServer, McpServerKind, McpServers,
    ledger::{ResolvedPolicy, ToolResult, Tools},
};
use harvest_proto::{api::KeySource, door::MCP_NAME};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
};

use crate::{
    RecordingLedger, TestDoor,
    model::sdks::{repository, sdks},
    policy,
};

const KEY: &str = "ghp-planted-77aa01";

/// A session without tools of its own.
struct NoTools;

#[async_trait]
impl Tools for NoTools {
    fn list(&self) -> Vec<Value> {
        Vec::new()
    }

    async fn call(&self, _: &str, _: Value) -> Option<ToolResult> {
        None
    }
}

/// A remote server that accepts one token. Dropping it ends it.
struct Remote {
    program: Child,
    port: String,
}

impl Remote {
    fn start(sdks: &Path, token: &str) -> Self {
        let mut python = Command::new(sdks.join("venv/bin/python"));
        python.arg(script("mcp_server.py")).arg(token).stdout(Stdio::piped());
        let mut program = python.spawn().unwrap();
        let mut port = String::new();
        BufReader::new(program.stdout.as_mut().unwrap()).read_line(&mut port).unwrap();
        Self { program, port: port.trim().to_owned() }
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

fn script(name: &str) -> PathBuf {
    repository().join("crates/gateway/tests/sdks").join(name)
}

/// A door with the server `github` at this URL.
fn door(kind: McpServerKind, url: &str, key: Option<&'static str>, session: bool) -> TestDoor {
    let server = McpServer { kind, url: url.to_owned(), secret: Some("GITHUB_TOKEN".into()) };
    let mcp_servers = McpServers::default().with("github".parse().unwrap(), server);
    let ledger = RecordingLedger {
        secrets: key.map(|key| ("GITHUB_TOKEN", key)).into_iter().collect(),
        ..RecordingLedger::default()
    };
    let config = GatewayConfig { mcp_servers, ..GatewayConfig::default() };
    let tools = session.then(|| Arc::new(NoTools) as Arc<dyn Tools>);
    TestDoor::with_tools(ledger, config, policy(&[]), tools)
}

async fn post(door: &TestDoor, name: &str, message: &Value) -> (u16, String) {
    let url = format!("http://{}/{name}", door.inside(MCP_NAME, 80).await);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let accepted = "application/json, text/event-stream";
    let sent = client.post(url).header("accept", accepted).json(message).send().await.unwrap();
    assert!(!sent.headers().contains_key("www-authenticate"), "{:?}", sent.headers());
    (sent.status().as_u16(), sent.text().await.unwrap())
}

fn initialize() -> Value {
    let client = json!({ "name": "test", "version": "1" });
    let params =
        json!({ "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client });
    json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params })
}

#[tokio::test(flavor = "multi_thread")]
async fn official_client_uses_remote_server_without_key() {
    let sdks = tokio::task::spawn_blocking(sdks).await.unwrap();
    let remote = Remote::start(&sdks, KEY);
    let door = door(McpServerKind::Remote, &remote.url("/mcp"), Some(KEY), true);
    let inside = door.inside(MCP_NAME, 80).await;
    let mut client = Command::new(sdks.join("venv/bin/python"));
    client.arg(script("mcp_client.py")).arg(format!("http://{inside}/github"));
    client.stderr(Stdio::inherit());
    let output = tokio::task::spawn_blocking(move || client.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", output.status);
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let masked = format!("the token is {}", "*".repeat(KEY.len()));
    assert_eq!(seen["texts"], json!(["hello Ada", masked, "counted to 3"]));
    assert_eq!(seen["progress"], json!([0.0, 1.0, 2.0]), "notifications arrive in the stream");
    assert_eq!(seen["tools"], json!(["count", "greet", "leak"]));
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_key_and_redirect_reach_no_agent() {
    let sdks = tokio::task::spawn_blocking(sdks).await.unwrap();
    let remote = Remote::start(&sdks, "another-token");
    for (path, words) in [("/mcp", "rejected the key"), ("/moved", "redirect")] {
        let door = door(McpServerKind::Remote, &remote.url(path), Some(KEY), true);
        let (status, text) = post(&door, "github", &initialize()).await;
        assert_eq!(status, 502, "{text}");
        assert!(text.contains(words) && !text.contains(KEY), "{text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_is_absent_without_key_or_session() {
    let url = "http://127.0.0.1:1/mcp";
    let missing = door(McpServerKind::Remote, url, None, true);
    let (status, text) = post(&missing, "github", &initialize()).await;
    assert!(status == 404 && text.contains("harvest secret set GITHUB_TOKEN"), "{text}");
    let keys: Vec<_> =
        missing.gateway.mcp_services(&[]).await.into_iter().map(|one| one.key).collect();
    assert_eq!(keys, [KeySource::Missing; 4]);
    // Builds and checks have no session, and run code of strangers.
    let build = door(McpServerKind::Remote, url, Some(KEY), false);
    assert_eq!(post(&build, "github", &initialize()).await.0, 404);
    assert_eq!(post(&missing, "unknown", &initialize()).await.0, 404);
}

/// A stand-in for the Gemini API: answers one call and returns its request.
async fn gemini() -> (String, tokio::task::JoinHandle<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1beta/models/gemini-x", listener.local_addr().unwrap());
    let served = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let (mut request, mut chunk) = (String::new(), [0; 4096]);
        while !request.contains("Is it safe?") {
            let read = stream.read(&mut chunk).await.unwrap();
            request += &String::from_utf8_lossy(&chunk[..read]);
        }
        let answer = json!({
            "candidates": [{ "content": { "parts": [{ "text": format!("No. {KEY}") }] } }],
            "usageMetadata": { "promptTokenCount": 5, "candidatesTokenCount": 2 },
        });
        let (answer, head) = (answer.to_string(), "HTTP/1.1 200 OK\r\nconnection: close\r\n");
        let length = answer.len();
        let all = format!("{head}content-length: {length}\r\n\r\n{answer}");
        stream.write_all(all.as_bytes()).await.unwrap();
        request
    });
    (url, served)
}

#[tokio::test(flavor = "multi_thread")]
async fn gemini_reviews_with_key_and_counted_tokens() {
    let (url, served) = gemini().await;
    let door = door(McpServerKind::Gemini, &url, Some(KEY), true);
    let arguments = json!({ "plan": "Is it safe?" });
    let params = json!({ "name": "gemini_review", "arguments": arguments });
    let call = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params });
    let (status, text) = post(&door, "github", &call).await;
    assert!(status == 200 && text.contains("No. ***") && !text.contains(KEY), "{text}");
    let request = served.await.unwrap();
    assert!(request.starts_with("POST /v1beta/models/gemini-x:generateContent "), "{request}");
    assert!(request.contains(&format!("x-goog-api-key: {KEY}")), "{request}");
    let settled = door.ledger.settled.lock().unwrap().clone();
    assert_eq!((settled[0].input_tokens, settled[0].output_tokens), (5, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn research_is_not_offered_under_policy_none() {
    let list = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    let url = "http://127.0.0.1:1";
    let trusted = door(McpServerKind::Gemini, url, Some(KEY), true);
    assert!(post(&trusted, "github", &list).await.1.contains("gemini_research"));
    let none = harvest_gateway::ledger::DoorPolicy {
        network: ResolvedPolicy::of(harvest_proto::NetworkPolicy::None, &[]).fixed(),
        ..policy(&[])
    };
    let (ledger, tools) = (RecordingLedger::default(), Arc::new(NoTools) as Arc<dyn Tools>);
    let none = TestDoor::with_tools(ledger, GatewayConfig::default(), none, Some(tools));
    let listed = post(&none, "gemini", &list).await.1;
    assert!(listed.contains("gemini_review") && !listed.contains("research"), "{listed}");
}
