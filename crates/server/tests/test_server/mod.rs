//! A server for each test on its own port, and a raw HTTP/1.0 client that exposes every byte of a
//! response.

mod stubs;

use std::{net::SocketAddr, path::Path, sync::Arc};

use harvest_gateway::{PrivateHosts, vault::Vault};
use harvest_proto::{
    api::{AllowedName, NameSource, Role},
    bridge::Author,
};
use harvest_providers::{Fake, fake::FakeOp};
use harvest_server::{Limits, ServerState};
use harvest_session::{Claim, Config, Dependencies, ServerParts, Sessions, Store};
use serde_json::{Value, json};
use sqlx::Connection;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

use stubs::Stubs;
pub(crate) use stubs::WEBHOOK_SECRET;

/// A complete response.
#[derive(Debug)]
pub(crate) struct ApiResponse {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl ApiResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|header| header.0 == name).map(|header| header.1.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        &self.body
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The objects of a JSON lines response.
    pub(crate) fn lines(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("application/x-ndjson"), "{self:?}");
        self.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A server-sent event.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) event: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) data: Value,
}

/// A response in progress.
pub(crate) struct Stream(BufReader<TcpStream>);

impl Stream {
    /// The status and the headers.
    async fn head(&mut self) -> (u16, Vec<(String, String)>) {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            self.0.read_line(&mut line).await.unwrap();
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let status = lines[0].split(' ').nth(1).unwrap().parse().unwrap();
        let header = |line: &String| {
            line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()))
        };
        (status, lines[1..].iter().filter_map(header).collect())
    }

    async fn read_all(mut self) -> ApiResponse {
        let (status, headers) = self.head().await;
        let mut body = String::new();
        // The server may reject a long body and close before it has read all of it.
        let _ = self.0.read_to_string(&mut body).await;
        ApiResponse { status, headers, body }
    }

    /// The next event with data, or `None` at the end.
    pub(crate) async fn frame(&mut self) -> Option<Frame> {
        let (mut event, mut id, mut data) = (None, None, String::new());
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).await.ok()? == 0 {
                return None;
            }
            match line.trim_end().split_once(": ") {
                Some(("event", value)) => event = Some(value.to_owned()),
                Some(("id", value)) => id = Some(value.to_owned()),
                Some(("data", value)) => data += value,
                _ if line == "\n" && !data.is_empty() => {
                    return Some(Frame { event, id, data: serde_json::from_str(&data).unwrap() });
                }
                _ => {}
            }
        }
    }
}

/// A server with its own store.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) token: String,
    pub(crate) fake: Fake,
    pub(crate) sessions: Sessions,
    shutdown: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
    folder: tempfile::TempDir,
}

impl TestServer {
    pub(crate) async fn start() -> Self {
        Self::start_with(Limits::default()).await
    }

    /// A server whose provider fails.
    pub(crate) async fn start_broken() -> Self {
        let server = Self::start().await;
        server.fake.set_failing(FakeOp::List, true);
        server
    }

    pub(crate) async fn start_with(limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shutdown = CancellationToken::new();
        let fake = Fake::new();
        // Sessions can be created but fail to start.
        fake.break_image("agents");
        let parts = server_parts(folder.path(), fake.clone()).await;
        let user = Author { name: "Ada".into(), email: "ada@example.org".into() };
        let (_, token) = parts.accounts.token_create("first", user, Role::Admin).await.unwrap();
        let sessions = parts.sessions.clone();
        let state = ServerState::new(parts, &["agents.example.org".into()], shutdown.clone());
        let state = state.with_limits(limits);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(harvest_server::serve(listener, state));
        Self { address, token: token.expose().clone(), fake, sessions, shutdown, task, folder }
    }

    /// Makes every read of sessions fail.
    pub(crate) async fn break_sessions(&self) {
        let database = self.folder.path().join("harvest.db");
        let options = sqlx::sqlite::SqliteConnectOptions::new().filename(database);
        let mut connection = sqlx::SqliteConnection::connect_with(&options).await.unwrap();
        let rename = sqlx::query("ALTER TABLE sessions RENAME TO lost_sessions");
        rename.execute(&mut connection).await.unwrap();
    }

    /// Returns when the last response is sent.
    pub(crate) async fn shut_down(self) {
        self.shutdown.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// Claims an idempotency key, as a request in progress does.
    pub(crate) async fn claim(&self, key: &str, request: &str) {
        let claim = self.sessions.idempotency_claim(key, request.as_bytes()).await.unwrap();
        assert_eq!(claim, Claim::New);
    }

    /// Registers an unreachable repository named `local/calc`.
    pub(crate) async fn repository(&self) {
        let added =
            self.post("/v1/repositories", &[], json!({"url": "http://127.0.0.1:1/calc.git"})).await;
        assert_eq!((added.status, added.json()["name"].as_str()), (201, Some("local/calc")));
    }

    pub(crate) async fn request(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> ApiResponse {
        self.request_as(Some(&self.token), method, path, headers, body).await
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        body: Value,
    ) -> ApiResponse {
        let headers = [headers, &[("content-type", "application/json")]].concat();
        self.request("POST", path, &headers, &body.to_string()).await
    }

    /// For bodies that are not UTF-8.
    pub(crate) async fn request_bytes(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> ApiResponse {
        self.send(Some(&self.token), method, path, headers, body).await.read_all().await
    }

    pub(crate) async fn request_as(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> ApiResponse {
        self.send(token, method, path, headers, body.as_bytes()).await.read_all().await
    }

    /// The first `count` events of a stream.
    pub(crate) async fn frames(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        count: usize,
    ) -> Vec<Frame> {
        let mut stream = self.follow(path, headers).await;
        let mut frames = Vec::new();
        while frames.len() < count {
            frames.push(stream.frame().await.expect("the stream continues"));
        }
        frames
    }

    /// A stream opened with another token.
    pub(crate) async fn follow_as(&self, token: &str, path: &str) -> Stream {
        let mut stream =
            self.send(Some(token), "GET", path, &[("accept", "text/event-stream")], b"").await;
        let (status, headers) = stream.head().await;
        assert_eq!(status, 200, "{headers:?}");
        stream
    }

    pub(crate) async fn follow(&self, path: &str, headers: &[(&str, &str)]) -> Stream {
        let headers = [headers, &[("accept", "text/event-stream")]].concat();
        let mut stream = self.send(Some(&self.token), "GET", path, &headers, b"").await;
        let (status, headers) = stream.head().await;
        assert_eq!(status, 200, "{headers:?}");
        stream
    }

    /// Starts a chunked request; the caller sends the body.
    pub(crate) async fn begin(&self, path: &str, kind: &str) -> BufReader<TcpStream> {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {}\r\ncontent-type: {kind}\r\n\
             transfer-encoding: chunked\r\n\r\n",
            self.token
        );
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        BufReader::new(stream)
    }

    async fn send(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Stream {
        let mut request = format!("{method} {path} HTTP/1.0\r\n");
        if !headers.iter().any(|header| header.0 == "host") {
            request += "host: 127.0.0.1\r\n";
        }
        if let Some(token) = token {
            request += &format!("authorization: Bearer {token}\r\n");
        }
        for (name, value) in headers {
            request += &format!("{name}: {value}\r\n");
        }
        request += &format!("content-length: {}\r\n\r\n", body.len());
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        // The server may reject a body and close before it has read all of it.
        let _ = stream.write_all(&[request.as_bytes(), body].concat()).await;
        Stream(BufReader::new(stream))
    }
}

/// A real store, without doors and forge.
async fn server_parts(folder: &Path, fake: Fake) -> ServerParts {
    let store = Store::open(&folder.join("harvest.db")).await.unwrap();
    let lease = store.server_lease(std::time::SystemTime::now().into()).await.unwrap();
    let packages = AllowedName {
        ports: Vec::new(),
        name: "packages.example.org".to_owned(),
        source: NameSource::Config,
        tool: None,
    };
    ServerParts::open(Dependencies {
        store,
        lease,
        provider: Arc::new(fake),
        doors: Arc::new(Stubs),
        forge: Arc::new(stubs::forge()),
        vault: Arc::new(Vault::open(&folder.join("vault.key")).unwrap()),
        config: Config {
            trusted: vec![packages],
            private_hosts: PrivateHosts::new(vec!["127.0.0.1".to_owned()]),
            ..Config::default()
        },
    })
    .await
    .unwrap()
}
