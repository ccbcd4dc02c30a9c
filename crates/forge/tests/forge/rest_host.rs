//! A forge on a port of its own, at the root of its URL as GitHub Enterprise Server, with a
//! recorder of every answer of its API.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{self, Next},
    response::Response,
    serve::Listener,
};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use harvest_forge::{App, Clock, LocalForge, NewApp, PermissionLevel, Permissions};
use harvest_proto::{Secret, Timestamp};
use ring::{rand::SystemRandom, rsa::KeyPair, signature::RSA_PKCS1_SHA256};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    process::Command,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use super::{TOKEN, git};

/// The time of the forge's clock when a test begins.
pub(super) const NOW: i64 = 1_800_000_000;

/// Programs that `.ci/github-peers` installs. Blocks while they are installed.
pub(super) fn peers() -> &'static Path {
    static PEERS: OnceLock<PathBuf> = OnceLock::new();
    PEERS.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let output = std::process::Command::new(root.join(".ci/github-peers"))
            .stderr(Stdio::inherit())
            .output()
            .unwrap();
        assert!(output.status.success(), "cannot install the peers");
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    })
}

pub(super) fn key(name: &str) -> Secret<String> {
    Secret::new(std::fs::read_to_string(peers().join(name)).unwrap())
}

type Records = Arc<Mutex<Vec<Value>>>;

pub(super) struct RestHost {
    pub(super) folder: TempDir,
    pub(super) forge: LocalForge,
    pub(super) url: String,
    pub(super) client: reqwest::Client,
    pub(super) records: Records,
    /// The next answer to a POST below `/pulls` is lost after the work was done.
    pub(super) loses_answer: Arc<AtomicBool>,
    seconds: Arc<AtomicI64>,
}

impl RestHost {
    /// A forge over plain HTTP.
    pub(super) async fn new() -> Self {
        Self::start(None).await
    }

    /// A forge with the certificate of `.ci/github-peers`.
    pub(super) async fn with_tls() -> Self {
        use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};
        let certificate = CertificateDer::from_pem_file(peers().join("localhost.pem")).unwrap();
        let key = PrivateKeyDer::from_pem_file(peers().join("localhost.key.pem")).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![certificate], key)
            .unwrap();
        Self::start(Some(TlsAcceptor::from(Arc::new(config)))).await
    }

    async fn start(tls: Option<TlsAcceptor>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let scheme = if tls.is_some() { "https" } else { "http" };
        let url = format!("{scheme}://localhost:{port}");
        let seconds = Arc::new(AtomicI64::new(NOW));
        let now = Arc::clone(&seconds);
        let clock = Clock::new(move || Timestamp::from_millis(now.load(Ordering::SeqCst) * 1000));
        let forge = LocalForge::open_with(folder.path().join("forge"), &url, clock).unwrap();
        forge.create("app", &Secret::new(TOKEN.to_owned())).await.unwrap();
        let records = Records::default();
        let recorder = Arc::clone(&records);
        let loses_answer = Arc::new(AtomicBool::new(false));
        let loses = Arc::clone(&loses_answer);
        let router = Router::new()
            .merge(forge.router())
            .layer(middleware::from_fn(move |request: Request, next: Next| {
                record(Arc::clone(&recorder), request, next)
            }))
            .layer(middleware::from_fn(move |request: Request, next: Next| {
                lose(Arc::clone(&loses), request, next)
            }));
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut client = reqwest::Client::builder().no_proxy();
        if tls.is_some() {
            let authority = std::fs::read(peers().join("ca.pem")).unwrap();
            let authority = reqwest::Certificate::from_pem(&authority).unwrap();
            client = client.tls_certs_only([authority]);
        }
        let client = client.build().unwrap();
        match tls {
            Some(acceptor) => {
                let listener = TlsListener { listener, acceptor };
                tokio::spawn(async move { axum::serve(listener, router).await });
            }
            None => {
                tokio::spawn(async move { axum::serve(listener, router).await });
            }
        }
        Self { folder, forge, url, client, records, loses_answer, seconds }
    }

    /// The forge's clock, for a client whose clock is ahead of it.
    pub(super) fn clock(&self, ahead: i64) -> Clock {
        let seconds = Arc::clone(&self.seconds);
        Clock::new(move || Timestamp::from_millis((seconds.load(Ordering::SeqCst) + ahead) * 1000))
    }

    /// Moves the forge's clock.
    pub(super) fn pass(&self, seconds: i64) {
        self.seconds.fetch_add(seconds, Ordering::SeqCst);
    }

    pub(super) fn set_time(&self, seconds: i64) {
        self.seconds.store(seconds, Ordering::SeqCst);
    }

    pub(super) fn git_url(&self, token: &str) -> String {
        let (scheme, host) = self.url.split_once("://").unwrap();
        format!("{scheme}://x-access-token:{token}@{host}/local/app.git")
    }

    pub(super) async fn git(&self, arguments: &[&str]) -> Result<String, String> {
        let work = self.folder.path().join("work");
        std::fs::create_dir_all(&work).unwrap();
        let certificate = format!("http.sslCAInfo={}", peers().join("ca.pem").display());
        git(&work, &[&["-c", &certificate], arguments].concat()).await
    }

    /// `main` with two commits, and the branch `harvest/a` with one more, which adds, changes,
    /// renames and removes files.
    pub(super) async fn with_branches() -> Self {
        let host = Self::new().await;
        host.push_branches().await;
        host
    }

    pub(super) async fn push_branches(&self) {
        let work = self.folder.path().join("work");
        self.git(&["init", "-q", "-b", "main"]).await.unwrap();
        let write = |name: &str, text: &str| std::fs::write(work.join(name), text).unwrap();
        std::fs::create_dir(work.join("docs")).unwrap();
        write("one", "one\n");
        write("docs/long name", &"line\n".repeat(40));
        write("gone", "gone\n");
        std::os::unix::fs::symlink("one", work.join("link")).unwrap();
        self.commit("Begin").await;
        write("one", "one\ntwo\n");
        self.commit("Add a line").await;
        self.git(&["checkout", "-q", "-b", "harvest/a"]).await.unwrap();
        write("one", "one\ntwo\nthree\n");
        write("bytes", "\0\u{1}\u{2}");
        self.git(&["mv", "docs/long name", "docs/renamed"]).await.unwrap();
        self.git(&["rm", "-q", "gone"]).await.unwrap();
        self.commit("Change files").await;
        self.git(&["push", "-q", &self.git_url(TOKEN), "main", "harvest/a"]).await.unwrap();
    }

    pub(super) async fn commit(&self, message: &str) -> String {
        self.git(&["add", "-A"]).await.unwrap();
        self.git(&["commit", "-q", "-m", message]).await.unwrap();
        self.git(&["rev-parse", "HEAD"]).await.unwrap().trim().to_owned()
    }

    pub(super) async fn register(&self, permissions: &[(&str, PermissionLevel)]) -> App {
        let permissions = Permissions::new(permissions.iter().copied()).unwrap();
        let (name, key) = ("Harvest".to_owned(), key("app.public.pem"));
        let new = NewApp { name, key, permissions, repositories: None };
        self.forge.register_app(new).await.unwrap()
    }

    pub(super) async fn send(
        &self,
        method: &str,
        path: &str,
        token: &str,
        body: Value,
    ) -> (u16, Value) {
        let method = method.parse().unwrap();
        let mut request =
            self.client.request(method, format!("{}/api/v3{path}", self.url)).bearer_auth(token);
        if !body.is_null() {
            request = request.json(&body);
        }
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        let text = answer.text().await.unwrap();
        (status, serde_json::from_str(&text).unwrap_or(Value::Null))
    }

    pub(super) async fn get(&self, path: &str) -> (u16, Value) {
        self.send("GET", path, TOKEN, Value::Null).await
    }

    /// An answer that must have this status.
    pub(super) async fn expect(&self, status: u16, method: &str, path: &str, body: Value) -> Value {
        let (got, answer) = self.send(method, path, TOKEN, body).await;
        assert_eq!(got, status, "{method} {path}: {answer}");
        answer
    }

    /// Checks all recorded answers against GitHub's description. Returns how often each operation
    /// was answered with which status.
    pub(super) async fn validate(&self) -> Value {
        let lines: String = {
            let records = self.records.lock().unwrap();
            records.iter().map(|record| format!("{record}\n")).collect()
        };
        validate(lines).await.unwrap_or_else(|problems| panic!("{problems}"))
    }
}

/// Runs the validator on recorded answers and webhooks, one JSON object a line. The error is what
/// it complains about.
pub(super) async fn validate(lines: String) -> Result<Value, String> {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/peers/validate.mjs");
    let mut validator = Command::new(peers().join("node"))
        .arg(program)
        .current_dir(peers())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    validator.stdin.take().unwrap().write_all(lines.as_bytes()).await.unwrap();
    let output = validator.wait_with_output().await.unwrap();
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    Ok(serde_json::from_slice(&output.stdout).unwrap())
}

/// A JSON web token of an App. `offset` moves its times.
pub(super) fn jwt(issuer: u64, key_file: &str, offset: i64) -> String {
    let pem = key(key_file);
    let der: String = pem.expose().lines().filter(|line| !line.starts_with('-')).collect();
    let der = base64::prelude::BASE64_STANDARD.decode(der).unwrap();
    let key = KeyPair::from_pkcs8(&der).unwrap();
    let (issued, expires) = (NOW - 60 + offset, NOW + 540 + offset);
    let claims = json!({"iat": issued, "exp": expires, "iss": issuer.to_string()});
    let encode = |value: Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    let signed = format!("{}.{}", encode(json!({"alg": "RS256", "typ": "JWT"})), encode(claims));
    let mut signature = vec![0; key.public().modulus_len()];
    key.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), signed.as_bytes(), &mut signature).unwrap();
    format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature))
}

async fn record(records: Records, request: Request, next: Next) -> Response {
    let method = request.method().to_string();
    let uri = request.uri().path_and_query().unwrap().to_string();
    let response = next.run(request).await;
    let Some(path) = uri.strip_prefix("/api/v3") else { return response };
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    let is_json =
        parts.headers.get("content-type").is_some_and(|kind| kind.as_bytes().ends_with(b"/json"));
    if is_json || bytes.is_empty() {
        let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let status = parts.status.as_u16();
        let record = json!({"method": method, "path": path, "status": status, "body": body});
        records.lock().unwrap().push(record);
    }
    Response::from_parts(parts, Body::from(bytes))
}

async fn lose(loses: Arc<AtomicBool>, request: Request, next: Next) -> Response {
    let opens = request.method() == "POST" && request.uri().path().ends_with("/pulls");
    let response = next.run(request).await;
    if opens && loses.swap(false, Ordering::SeqCst) {
        let mut lost = Response::new(Body::empty());
        *lost.status_mut() = axum::http::StatusCode::BAD_GATEWAY;
        return lost;
    }
    response
}

struct TlsListener {
    listener: TcpListener,
    acceptor: TlsAcceptor,
}

impl Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            if let Ok((stream, address)) = self.listener.accept().await
                && let Ok(stream) = self.acceptor.accept(stream).await
            {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}
