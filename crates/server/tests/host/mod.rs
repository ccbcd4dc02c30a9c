//! A server of one's own for each test, on a port of its own, and a client that hides nothing: HTTP/1.0
//! by hand, so that every byte of an answer and of a stream is seen.

mod bare;

use std::{net::SocketAddr, path::Path, sync::Arc};

use harvest_gateway::vault::Vault;
use harvest_proto::{api::Role, bridge::Author};
use harvest_providers::Fake;
use harvest_server::{Limits, ServerState};
use harvest_session::{Claim, Config, Parts, Sessions, Store, machines::Commands};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;

/// An answer read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|header| header.0 == name).map(|header| header.1.as_str())
    }

    pub(crate) fn text(&self) -> &str {
        &self.body
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// An answer of JSON lines.
    pub(crate) fn lines(&self) -> Vec<Value> {
        assert_eq!(self.header("content-type"), Some("application/x-ndjson"), "{self:?}");
        self.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// A server-sent frame.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) event: Option<String>,
    pub(crate) id: Option<String>,
    pub(crate) data: Value,
}

/// An answer that has not ended.
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

    /// The whole of it.
    async fn answer(mut self) -> Answer {
        let (status, headers) = self.head().await;
        let mut body = String::new();
        // A server that refused a long body may close before it has read all of it.
        let _ = self.0.read_to_string(&mut body).await;
        Answer { status, headers, body }
    }

    /// The next frame with data, or `None` at the end.
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

/// A server with a store of its own.
pub(crate) struct Host {
    address: SocketAddr,
    token: String,
    /// The machines it offers.
    pub(crate) fake: Fake,
    pub(crate) sessions: Sessions,
    machine: Arc<bare::Bare>,
    shutdown: CancellationToken,
    task: JoinHandle<std::io::Result<()>>,
    _folder: tempfile::TempDir,
}

impl Host {
    pub(crate) async fn start() -> Self {
        Self::start_with(Limits::default()).await
    }

    /// A server whose machine does not answer any more.
    pub(crate) async fn start_broken() -> Self {
        let host = Self::start().await;
        host.machine.break_down();
        host
    }

    pub(crate) async fn start_with(limits: Limits) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let shutdown = CancellationToken::new();
        let machine = Arc::new(bare::Bare::default());
        let sessions = sessions(folder.path(), Arc::clone(&machine)).await;
        let user = Author { name: "Ada".into(), email: "ada@example.org".into() };
        let token =
            sessions.token_create("first", user, Role::Admin).await.unwrap().1.expose().clone();
        let state =
            ServerState::new(sessions.clone(), &["agents.example.org".into()], shutdown.clone());
        let fake = Fake::new();
        let state = state.with_limits(limits).with_machines(Commands::new(Arc::new(fake.clone())));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(harvest_server::serve(listener, state));
        Self { address, token, fake, sessions, machine, shutdown, task, _folder: folder }
    }

    /// Ends the server; returns when the last answer is out.
    pub(crate) async fn end(self) {
        self.shutdown.cancel();
        self.task.await.unwrap().unwrap();
    }

    /// Claims an idempotency key, as a request under way has.
    pub(crate) async fn claim(&self, key: &str, request: &str) {
        let claim = self.sessions.idempotency_claim(key, request.as_bytes()).await.unwrap();
        assert_eq!(claim, Claim::New);
    }

    /// Registers a repository that nothing can be fetched from.
    pub(crate) async fn repository(&self) {
        let added =
            self.post("/v1/repositories", &[], json!({"url": "http://127.0.0.1:1/calc.git"})).await;
        assert_eq!((added.status, added.json()["name"].as_str()), (201, Some("calc")));
    }

    pub(crate) async fn ask(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        self.ask_as(Some(&self.token), method, path, headers, body).await
    }

    pub(crate) async fn post(&self, path: &str, headers: &[(&str, &str)], body: Value) -> Answer {
        let headers = [headers, &[("content-type", "application/json")]].concat();
        self.ask("POST", path, &headers, &body.to_string()).await
    }

    /// The same, with a body that need not be text.
    pub(crate) async fn ask_bytes(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> Answer {
        self.send(Some(&self.token), method, path, headers, body).await.answer().await
    }

    pub(crate) async fn ask_as(
        &self,
        token: Option<&str>,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Answer {
        self.send(token, method, path, headers, body.as_bytes()).await.answer().await
    }

    /// The first so many frames of a stream.
    pub(crate) async fn frames(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        count: usize,
    ) -> Vec<Frame> {
        let mut stream = self.follow(path, headers).await;
        let mut frames = Vec::new();
        while frames.len() < count {
            frames.push(stream.frame().await.expect("the stream goes on"));
        }
        frames
    }

    /// A stream, as seen by the holder of another token.
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

    /// Begins a request whose body is sent by hand.
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
        // The server may answer, and close, before it has taken all of a body it refuses.
        let _ = stream.write_all(&[request.as_bytes(), body].concat()).await;
        Stream(BufReader::new(stream))
    }
}

/// Sessions on a real store, on a machine that can start nothing.
async fn sessions(folder: &Path, machine: Arc<bare::Bare>) -> Sessions {
    let store = Store::open(&folder.join("harvest.db")).await.unwrap();
    let lease = store.server_lease(std::time::SystemTime::now().into()).await.unwrap();
    Sessions::open(Parts {
        store,
        lease,
        provider: machine.clone(),
        doors: machine.clone(),
        pulls: machine,
        vault: Arc::new(Vault::open(&folder.join("vault.key")).unwrap()),
        config: Config::default(),
    })
    .await
    .unwrap()
}
