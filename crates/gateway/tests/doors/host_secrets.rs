//! Secrets that are added to requests for their hosts: TLS is ended, requests are sent anew.

use std::sync::{Arc, Mutex};

use harvest_gateway::{
    Authority, GatewayConfig, PrivateHosts,
    ledger::{HostSecret, ResolvedPolicy},
    vault::Vault,
};
use harvest_proto::{
    EventBody, NetworkPolicy, RuleScope, RuleVerdict, Secret, SecretScope,
    api::NetworkRule,
    door::{DoorReply, DoorRequest},
};
use rustls::{ClientConfig, RootCertStore};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::{TcpListener, UnixStream},
    sync::watch,
};
use tokio_rustls::{TlsAcceptor, TlsConnector, client::TlsStream};

use crate::{RecordingLedger, TestDoor, policy};

pub(crate) const HOST: &str = "api.example.com";
const OTHER: &str = "other.example.com";
const KEY: &str = "key-planted-7bb2f3";

type Inside = BufReader<TlsStream<BufReader<UnixStream>>>;

pub(crate) fn authority() -> Authority {
    let folder = tempfile::tempdir().unwrap();
    let vault = Vault::open(&folder.path().join("key")).unwrap();
    Authority::open(&vault, &Authority::create(&vault).unwrap()).unwrap()
}

/// A server behind TLS that returns the head of each request as the response's body. Its
/// certificate is of a CA that only the gateway knows.
struct RealServer {
    address: std::net::SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl RealServer {
    /// `respond` makes the status line and headers from a request's head.
    async fn start(ca: &Authority, respond: fn(&str) -> String) -> Self {
        let acceptor = TlsAcceptor::from(ca.server_config(HOST).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::<Mutex<Vec<String>>>::default();
        let seen = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen) = (acceptor.clone(), Arc::clone(&seen));
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let mut stream = BufReader::new(stream);
                    while let Some(head) = read_head(&mut stream).await {
                        let length = content_length(&head);
                        let mut body = vec![0; length];
                        stream.read_exact(&mut body).await.unwrap();
                        seen.lock().unwrap().push(head.clone());
                        let response = format!(
                            "HTTP/1.1 {}content-length: {}\r\n\r\n{head}",
                            respond(&head),
                            head.len()
                        );
                        stream.write_all(response.as_bytes()).await.unwrap();
                    }
                });
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

fn ok(_: &str) -> String {
    "200 OK\r\n".to_owned()
}

async fn read_head(stream: &mut (impl tokio::io::AsyncBufRead + Unpin)) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

fn content_length(head: &str) -> usize {
    let line = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse().unwrap())
    });
    line.unwrap_or(0)
}

fn secret(name: &str, header: &str, value: &str) -> HostSecret {
    let (name, header) = (name.to_owned(), header.parse().unwrap());
    HostSecret { name, scope: SecretScope::Session, header, value: Secret::new(value.to_owned()) }
}

/// A door to the real server, whose secrets are for [`HOST`].
struct Setup {
    door: TestDoor,
    ours: Arc<Authority>,
    network: watch::Sender<ResolvedPolicy>,
}

fn setup(server: &RealServer, ca: &Authority, secrets: Vec<HostSecret>) -> Setup {
    let ours = Arc::new(authority());
    let names = [HOST, OTHER].map(str::to_owned);
    let config = GatewayConfig {
        private_hosts: PrivateHosts::new(names.to_vec()),
        pinned: names.into_iter().map(|name| (name, server.address)).collect(),
        authority: Some(Arc::clone(&ours)),
        extra_roots: vec![ca.certificate().clone()],
        ..GatewayConfig::default()
    };
    let (network, receiver) =
        watch::channel(ResolvedPolicy::of(NetworkPolicy::Trusted, &[HOST, OTHER]));
    let policy = crate::DoorPolicy { network: receiver, ..policy(&[]) };
    let ledger = RecordingLedger::default();
    *ledger.host_secrets.lock().unwrap() = secrets;
    Setup { door: TestDoor::new(ledger, config, policy), ours, network }
}

impl Setup {
    /// A TLS connection from inside that trusts this authority only.
    async fn try_connect(
        &self,
        name: &'static str,
        trusted: &Authority,
    ) -> std::io::Result<Inside> {
        let request = DoorRequest::Connect { name: name.to_owned(), port: 443 };
        let (reply, stream) = self.door.request(&request).await;
        assert_eq!(reply, DoorReply::Open);
        let mut roots = RootCertStore::empty();
        roots.add(trusted.certificate().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let connector = TlsConnector::from(Arc::new(config));
        Ok(BufReader::new(connector.connect(name.try_into().unwrap(), stream).await?))
    }

    async fn connect(&self) -> Inside {
        self.try_connect(HOST, &self.ours).await.unwrap()
    }

    fn set_secrets(&self, secrets: Vec<HostSecret>) {
        *self.door.ledger.host_secrets.lock().unwrap() = secrets;
    }

    fn uses(&self) -> Vec<String> {
        let uses = self.door.ledger.uses.lock().unwrap();
        let line = |one: &harvest_gateway::ledger::HostSecretUse| {
            let names: Vec<_> = one.secrets.iter().map(|(name, _)| name.as_str()).collect();
            format!("{} {} {}{}", names.join("+"), one.method, one.host, one.path)
        };
        uses.iter().map(line).collect()
    }
}

/// Sends a request and reads the response: its head and its body.
async fn exchange(stream: &mut Inside, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).await.unwrap();
    let head = read_head(stream).await.expect("a response");
    let mut body = vec![0; content_length(&head)];
    stream.read_exact(&mut body).await.unwrap();
    (head, String::from_utf8(body).unwrap())
}

fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nhost: {HOST}\r\nauthorization: Bearer dummy\r\n\r\n")
}

fn bearer() -> Vec<HostSecret> {
    vec![secret("API_KEY", "Authorization: Bearer {}", KEY)]
}

#[tokio::test(flavor = "multi_thread")]
async fn secret_replaces_header_and_is_masked_in_response() {
    let ca = authority();
    let server =
        RealServer::start(&ca, |_| format!("200 OK\r\nx-echo: {KEY}\r\nx-kept: 1\r\n")).await;
    let setup = setup(&server, &ca, bearer());
    let mut inside = setup.connect().await;
    let (head, body) = exchange(&mut inside, &get(&format!("/v1/{KEY}/items?page=2"))).await;
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("x-kept") && !head.contains("x-echo")
    );
    assert!(body.contains("authorization: Bearer ******"), "{body}");
    assert!(!body.contains(KEY) && !body.contains("dummy"), "{body}");
    assert!(body.contains("accept-encoding: identity"), "{body}");
    let seen = server.requests().remove(0);
    assert!(seen.contains(&format!("authorization: Bearer {KEY}")) && !seen.contains("dummy"));
    assert_eq!(setup.uses(), ["API_KEY GET api.example.com/v1/***/items"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn other_hosts_stay_spliced() {
    let ca = authority();
    let server = RealServer::start(&ca, ok).await;
    let setup = setup(&server, &ca, bearer());
    // The real certificate, of another name: nothing was ended.
    let error = setup.try_connect(OTHER, &ca).await.unwrap_err();
    assert!(error.to_string().contains("not valid for name"), "{error}");
    setup.set_secrets(Vec::new());
    let mut spliced = setup.try_connect(HOST, &ca).await.unwrap();
    let (_, body) = exchange(&mut spliced, &get("/")).await;
    assert!(body.contains("Bearer dummy") && setup.uses().is_empty(), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_of_a_connection_is_judged() {
    let ca = authority();
    let server = RealServer::start(&ca, ok).await;
    let setup = setup(&server, &ca, bearer());
    let mut inside = setup.connect().await;
    exchange(&mut inside, &get("/one")).await;
    // The value that is stored now.
    setup.set_secrets(vec![secret("API_KEY", "X-Key: {}", "key-planted-second")]);
    let (_, body) = exchange(&mut inside, &get("/two")).await;
    assert!(body.contains("x-key: ******") && body.contains("Bearer dummy"), "{body}");
    let elsewhere = format!("GET / HTTP/1.1\r\nhost: {OTHER}\r\n\r\n");
    inside.write_all(elsewhere.as_bytes()).await.unwrap();
    assert_eq!(read_head(&mut inside).await, None, "the connection is cut");
    assert_eq!(server.requests().len(), 2);
    assert_eq!(
        setup.uses(),
        ["API_KEY GET api.example.com/one", "API_KEY GET api.example.com/two"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn rule_that_denies_cuts_intercepted_connections() {
    let ca = authority();
    let server = RealServer::start(&ca, ok).await;
    let setup = setup(&server, &ca, bearer());
    let mut inside = setup.connect().await;
    exchange(&mut inside, &get("/one")).await;
    setup.network.send_modify(|policy| {
        let (verdict, scope) = (RuleVerdict::Deny, RuleScope::Session);
        let name = HOST.to_owned();
        policy.rules.push(NetworkRule { name, verdict, ports: Vec::new(), private: false, scope });
    });
    let _ = inside.write_all(get("/two").as_bytes()).await;
    let answer = read_head(&mut inside).await.unwrap_or_default();
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 403"), "{answer}");
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn smuggled_headers_and_upgrades_are_refused() {
    let ca = authority();
    let server = RealServer::start(&ca, ok).await;
    let setup = setup(&server, &ca, bearer());
    for request in [
        format!("GET / HTTP/1.1\r\nhost: {HOST}\r\nhost: {OTHER}\r\n\r\n"),
        format!("GET https://{OTHER}/ HTTP/1.1\r\nhost: {HOST}\r\n\r\n"),
        format!("CONNECT {OTHER}:443 HTTP/1.1\r\nhost: {HOST}\r\n\r\n"),
        "GET / HTTP/1.0\r\n\r\n".to_owned(),
    ] {
        let mut inside = setup.connect().await;
        inside.write_all(request.as_bytes()).await.unwrap();
        assert_eq!(read_head(&mut inside).await, None, "{request}");
    }
    let refused = [
        (
            format!(
                "GET / HTTP/1.1\r\nhost: {HOST}\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n"
            ),
            "501",
        ),
        (format!("TRACE / HTTP/1.1\r\nhost: {HOST}\r\n\r\n"), "405"),
    ];
    for (request, status) in refused {
        let mut inside = setup.connect().await;
        let (head, _) = exchange(&mut inside, &request).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status}")), "{head}");
    }
    assert_eq!(server.requests(), Vec::<String>::new());
    // Neither a named hop-by-hop header nor two lengths change the request that is sent.
    let mut inside = setup.connect().await;
    let request = format!(
        "POST / HTTP/1.1\r\nhost: {HOST}\r\nconnection: authorization\r\nrange: bytes=1-2\r\n\
         authorization: a\r\nAuthorization: b\r\ncontent-length: 2\r\n\r\nok"
    );
    let (_, body) = exchange(&mut inside, &request).await;
    let sent: Vec<_> = body.lines().filter(|line| line.starts_with("authorization")).collect();
    assert_eq!(sent, [format!("authorization: Bearer {}", "*".repeat(KEY.len()))]);
    assert!(!body.contains("range") && !body.contains("connection"), "{body}");
}

#[tokio::test(flavor = "multi_thread")]
async fn body_with_two_lengths_hides_no_request() {
    let ca = authority();
    let server = RealServer::start(&ca, ok).await;
    let setup = setup(&server, &ca, bearer());
    let hidden = format!("GET /hidden HTTP/1.1\r\nhost: {HOST}\r\n\r\n");
    let lengths = [
        format!("content-length: {}\r\ntransfer-encoding: chunked", hidden.len() + 5),
        format!("transfer-encoding: chunked\r\ncontent-length: {}", hidden.len() + 5),
        "content-length: 5\r\ncontent-length: 0".to_owned(),
        "transfer-encoding: chunked, identity".to_owned(),
    ];
    for lengths in lengths {
        let mut inside = setup.connect().await;
        let post = format!("POST /seen HTTP/1.1\r\nhost: {HOST}\r\n{lengths}\r\n\r\n");
        inside.write_all(format!("{post}0\r\n\r\n{hidden}").as_bytes()).await.unwrap();
        let _ = inside.shutdown().await;
        let _ = inside.read_to_end(&mut Vec::new()).await;
        // What the server reads as a request was judged and logged as one.
        let seen = server.requests();
        let requests = seen.iter().filter(|head| head.contains(" HTTP/1.1\r\n"));
        assert_eq!(requests.count(), setup.uses().len(), "{lengths}: {seen:?}");
        let both =
            |head: &String| head.contains("content-length") && head.contains("transfer-encoding");
        assert!(!seen.iter().any(both), "{lengths}: {seen:?}");
    }
    assert!(!server.requests().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn redirect_is_left_to_the_client() {
    let ca = authority();
    let redirect = |_: &str| format!("302 Found\r\nlocation: https://{OTHER}/\r\n");
    let server = RealServer::start(&ca, redirect).await;
    let setup = setup(&server, &ca, bearer());
    let mut inside = setup.connect().await;
    let (head, _) = exchange(&mut inside, &get("/")).await;
    assert!(head.contains(&format!("location: https://{OTHER}/")), "{head}");
    assert_eq!((server.requests().len(), setup.uses().len()), (1, 1));
}

#[tokio::test(flavor = "multi_thread")]
async fn server_of_unknown_authority_gets_no_request() {
    let (ca, stranger) = (authority(), authority());
    let server = RealServer::start(&stranger, ok).await;
    let setup = setup(&server, &ca, bearer());
    let mut inside = setup.connect().await;
    let (head, body) = exchange(&mut inside, &get("/")).await;
    assert!(head.starts_with("HTTP/1.1 502"), "{head}");
    assert!(body.contains("TLS to the host failed") && body.contains("certificate"), "{body}");
    assert_eq!((server.requests().len(), setup.uses().len()), (0, 0));
    drop(inside);
    let events = setup.door.ledger.wait_for_events(1).await;
    assert!(matches!(&events[0], EventBody::EgressRefused { name, .. } if name == HOST));
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_response_is_not_returned() {
    let ca = authority();
    let gzip = |_: &str| "200 OK\r\ncontent-encoding: gzip\r\n".to_owned();
    // The first of two headers must not hide the second.
    let both =
        |_: &str| "200 OK\r\ncontent-encoding: identity\r\ncontent-encoding: gzip\r\n".to_owned();
    for respond in [gzip as fn(&str) -> String, both] {
        let server = RealServer::start(&ca, respond).await;
        let setup = setup(&server, &ca, bearer());
        let (head, body) = exchange(&mut setup.connect().await, &get("/")).await;
        assert!(head.starts_with("HTTP/1.1 502") && body.contains("compressed"), "{head}{body}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn use_that_cannot_be_logged_is_refused() {
    let ca = authority();
    let server = RealServer::start(&ca, ok).await;
    let setup = setup(&server, &ca, bearer());
    *setup.door.ledger.log_fails.lock().unwrap() = true;
    let (head, _) = exchange(&mut setup.connect().await, &get("/")).await;
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    assert_eq!(server.requests(), Vec::<String>::new());
}
