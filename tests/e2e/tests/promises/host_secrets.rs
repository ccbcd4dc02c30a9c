//! Secrets for any host: programs inside use a key that they never see.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{Arc, Mutex},
};

use harvest_e2e::Host;
use harvest_proto::{
    EventBody, SessionId,
    api::{SecretUse, Session},
    bridge::Exit,
};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};
use serde_json::json;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncWrite, AsyncWriteExt as _, BufReader},
    net::{TcpListener, TcpStream},
};
use tokio_rustls::TlsAcceptor;

use crate::{completed, host_network::certificate_authority, secrets::set_secret};

const HOST: &str = "api.corp.example";
const API_KEY: &str = "api-planted-41c77d09b2ee5a30";

/// A service at a name that only the host's proxy knows, behind TLS with a company's certificate.
struct Service {
    folder: tempfile::TempDir,
    proxy: String,
    /// The heads of the requests that it got.
    heads: Arc<Mutex<Vec<String>>>,
}

impl Service {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        certificate_authority(folder.path());
        let heads = Arc::<Mutex<Vec<String>>>::default();
        let address = serve(acceptor(folder.path()), Arc::clone(&heads)).await;
        let proxy = format!("http://{}", proxy_to(address).await);
        Self { folder, proxy, heads }
    }

    /// The environment of a server that reaches it.
    fn env(&self) -> [(&'static str, String); 2] {
        let ca = self.folder.path().join("ca.pem").to_str().unwrap().to_owned();
        [("SSL_CERT_FILE", ca), ("HTTPS_PROXY", self.proxy.clone())]
    }

    fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }
}

fn acceptor(folder: &Path) -> TlsAcceptor {
    fs::write(folder.join("san"), format!("subjectAltName=DNS:{HOST}")).unwrap();
    let request =
        format!("req -newkey rsa:2048 -nodes -subj /CN={HOST} -keyout key.pem -out req.pem");
    let sign = "x509 -req -in req.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 \
        -extfile san -out leaf.pem";
    for arguments in [request.as_str(), sign] {
        let made = Command::new("openssl").args(arguments.split(' ')).current_dir(folder).output();
        assert!(made.as_ref().is_ok_and(|made| made.status.success()), "{made:?}");
    }
    let leaf = CertificateDer::from_pem_file(folder.join("leaf.pem")).unwrap();
    let key = PrivateKeyDer::from_pem_file(folder.join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![leaf], key)
        .unwrap();
    TlsAcceptor::from(Arc::new(config))
}

/// Returns the request's head, or to git an empty repository.
async fn serve(acceptor: TlsAcceptor, heads: Arc<Mutex<Vec<String>>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (acceptor, heads) = (acceptor.clone(), Arc::clone(&heads));
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let mut stream = BufReader::new(stream);
                while let Some(head) = read_head(&mut stream).await {
                    let (kind, body) = match head.contains("/info/refs") {
                        true => (
                            "application/x-git-upload-pack-advertisement",
                            "001e# service=git-upload-pack\n00000000".to_owned(),
                        ),
                        false => ("text/plain", head.clone()),
                    };
                    heads.lock().unwrap().push(head);
                    let length = body.len();
                    let response = format!(
                        "HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n{body}"
                    );
                    if stream.write_all(response.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    address
}

/// A proxy of the host that leads every name to one address.
async fn proxy_to(address: String) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let address = address.clone();
            tokio::spawn(async move {
                let mut inside = BufReader::new(stream);
                let _ = read_head(&mut inside).await;
                inside.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                let mut outside = TcpStream::connect(address).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut inside, &mut outside).await;
            });
        }
    });
    proxy
}

async fn read_head(stream: &mut BufReader<impl AsyncRead + AsyncWrite + Unpin>) -> Option<String> {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        if stream.read_line(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    Some(head)
}

/// A host on which the service's key is a global secret, and an idle session.
async fn start(service: &Service) -> (Host, SessionId) {
    let env = service.env();
    let host = Host::start_with(&env.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
    let arguments = ["API_KEY", "--host", HOST, "--header", "X-Api-Key: {}"];
    set_secret(&host, &arguments, API_KEY);
    let session = host.bare("Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;
    (host, session)
}

/// Prints what the service got: with a header of the program's own, which is replaced.
const CALL: &str = "curl -sS -H 'X-Api-Key: mine' https://api.corp.example/v1/items?page=2";

#[tokio::test]
async fn programs_inside_use_keys_they_never_see() {
    let service = Service::start().await;
    let (mut host, session) = start(&service).await;
    let python = "python3 -c 'import urllib.request as u; \
        print(u.urlopen(\"https://api.corp.example/python\").read().decode())'";
    let node =
        "node -e 'fetch(\"https://api.corp.example/node\").then(r => r.text()).then(console.log)'";
    let git = "git ls-remote https://api.corp.example/team/lib.git";
    for command in [CALL, python, node, git] {
        let (exit, printed) = host.exec(&session, "harvest", command).await;
        assert_eq!(exit, Exit::Code(0), "{command}: {printed}");
        assert!(!printed.contains(API_KEY) && !printed.contains("mine"), "{printed}");
        let head = service.heads().pop().unwrap();
        assert!(head.contains(API_KEY), "{command}: {head}");
    }
    // An adopted sandbox trusts the same authority.
    host.kill();
    host.up().await;
    let (exit, printed) = host.exec(&session, "harvest", CALL).await;
    assert_eq!(exit, Exit::Code(0), "{printed}");
    // The session's own value, while it exists.
    let own = ["API_KEY", "--session", &session.to_string(), "--host", HOST];
    set_secret(&host, &own, "api-planted-of-session");
    host.exec(&session, "harvest", CALL).await;
    let head = service.heads().pop().unwrap();
    assert!(head.contains("authorization: Bearer api-planted-of-session"), "{head}");
    let removed = host.harvest(["secret", "rm", "API_KEY", "--session", &session.to_string()]);
    assert_eq!(removed.code, 0, "{removed:?}");
    host.exec(&session, "harvest", CALL).await;
    assert!(service.heads().pop().unwrap().contains(API_KEY));

    let uses = host.harvest(["secret", "uses", "API_KEY", "--json"]);
    let uses: Vec<SecretUse> = serde_json::from_str(&uses.stdout).unwrap();
    let logged = |one: &&SecretUse| one.path == "/v1/items" && one.session == Some(session.clone());
    assert_eq!(uses.iter().filter(logged).count(), 4, "{uses:?}");
    assert!(!format!("{uses:?}").contains("page=2"), "{uses:?}");
}

/// Serves an empty registry, and asks the service for what it does not have.
const GO_CLIENT: &str = "printf 'version: 0.1\\nstorage: {inmemory: {}}\\nproxy: {remoteurl: \
    \"https://api.corp.example\"}\\nhttp: {addr: 127.0.0.1:5000}\\n' > /tmp/registry.yml; \
    /tmp/registry serve /tmp/registry.yml > /tmp/registry.log 2>&1 & \
    curl -s -o /dev/null --retry 100 --retry-delay 1 --retry-all-errors \
    http://127.0.0.1:5000/v2/tools/manifests/latest; kill $!; cat /tmp/registry.log";

#[tokio::test]
async fn go_program_uses_key_it_never_sees() {
    let service = Service::start().await;
    let (host, session) = start(&service).await;
    // Debian's container registry is written in Go, and fetches what it does not have.
    let copied =
        host.harvest(["cp", "/usr/bin/docker-registry", &format!("{session}:/tmp/registry")]);
    assert_eq!(copied.code, 0, "{copied:?}");
    let (_, printed) = host.exec(&session, "harvest", GO_CLIENT).await;
    let heads = service.heads();
    let from_go = heads.iter().find(|head| head.to_lowercase().contains("user-agent: go-http"));
    let head = from_go.unwrap_or_else(|| panic!("no request of a Go program: {heads:?} {printed}"));
    assert!(head.contains(API_KEY), "{head}");
    assert!(!printed.contains(API_KEY), "{printed}");
}

#[tokio::test]
async fn request_names_the_secrets_of_its_session() {
    let service = Service::start().await;
    let env = service.env();
    let host = Host::start_with(&env.each_ref().map(|(name, value)| (*name, value.as_str()))).await;
    let create = json!({
        "prompt": "Begin.", "agent": "scripted", "secrets": { "API_KEY": "api-planted-with-request" },
    });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", create).await).unwrap();
    let listed = host.harvest(["secret", "ls"]);
    assert!(listed.stdout.contains("API_KEY") && listed.stdout.contains("session"), "{listed:?}");
    let deleted = host.harvest(["rm", "-y", &session.id.to_string()]);
    assert_eq!(deleted.code, 0, "{deleted:?}");
    assert_eq!(host.harvest(["secret", "ls"]).stdout, "");
}

/// The parts make a value only when the shell has joined them.
const PRINT: &str = "printf 'api-planted-%s\\n' 41c77d09b2ee5a30";

#[tokio::test]
async fn values_in_events_are_masked() {
    let service = Service::start().await;
    let (host, session) = start(&service).await;
    let script = json!([{ "bash": PRINT }, { "bash": format!("{PRINT}; yes | head -c 200000") }]);
    let prompt = host.prompt(&session, "Print it.", &script).await;
    let ended = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id);
    host.follow(session.clone()).until("the turn to end", ended).await;
    let events = format!("{:?}", host.events(&session).await);
    assert!(events.contains(&"*".repeat(API_KEY.len())), "{events}");
    assert!(!events.contains(API_KEY), "{events}");
    for file in ["harvest.db", "harvest.db-wal"] {
        let bytes = fs::read(host.home().join(file)).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&bytes).contains(API_KEY), "{file}");
    }
}
