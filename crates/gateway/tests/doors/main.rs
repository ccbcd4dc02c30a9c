//! Doors as a sandbox uses them: through their sockets, with real git and fake upstreams on
//! loopback.
#![expect(clippy::unwrap_used, reason = "a failed test panics")]

mod attacks;
mod egress;
mod forge_api;
mod git;
mod host_secrets;
mod mcp;
mod model;
mod proxy;
mod remote_mcp;
mod rules;

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use harvest_forge::LocalForge;
use harvest_gateway::{
    DoorHandle, DoorSocket, Gateway, GatewayConfig,
    ledger::{
        BegunPush, DoorPolicy, DoorPurpose, HostSecret, HostSecretUse, Ledger, NamedSecret,
        PlannedCall, Refusal, ResolvedPolicy, SecretsUnavailable, Tools, Used,
    },
};
use harvest_proto::{
    EventBody, NetworkPolicy, RepositoryName, Secret, SecretOwner, SessionId, TrafficCount,
    UpstreamName,
    api::KeySource,
    door::{DoorReply, DoorRequest},
    event::Usage,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional},
    net::{TcpListener, UnixStream},
    sync::{Notify, watch},
};

/// A ledger that records everything.
#[derive(Default)]
struct RecordingLedger {
    secrets: HashMap<&'static str, &'static str>,
    host_secrets: Mutex<Vec<HostSecret>>,
    uses: Mutex<Vec<HostSecretUse>>,
    log_fails: Mutex<bool>,
    refusal: Option<Refusal>,
    planned: Mutex<Vec<PlannedCall>>,
    events: Mutex<Vec<EventBody>>,
    settled: Mutex<Vec<Usage>>,
    unread: Mutex<Vec<Usage>>,
    traffic: Mutex<Vec<TrafficCount>>,
    changed: Notify,
    /// Gets a new token before each request of git.
    rotated: Mutex<Option<LocalForge>>,
    /// For which requests a credential was asked for: whether they push.
    asked: Mutex<Vec<bool>>,
    refused: Mutex<Vec<String>>,
    /// The commits that the session pushed or began to push.
    pushed: Mutex<Vec<String>>,
    /// The commits that it replaced.
    replaced: Mutex<Vec<String>>,
    /// Pushes that have begun and that the remote did not refuse yet.
    open_pushes: AtomicUsize,
    most_open_pushes: Mutex<usize>,
}

#[async_trait]
impl Ledger for RecordingLedger {
    async fn secret(&self, _: &[SecretOwner], name: &str) -> Option<Secret<String>> {
        self.secrets.get(name).map(|value| Secret::new((*value).to_owned()))
    }

    async fn secret_source(&self, _: &[SecretOwner], name: &str) -> KeySource {
        if self.secrets.contains_key(name) { KeySource::Stored } else { KeySource::Missing }
    }

    async fn secret_values(
        &self,
        _: &[SecretOwner],
    ) -> Result<Vec<NamedSecret>, SecretsUnavailable> {
        Ok(Vec::new())
    }

    async fn host_secrets(&self, _: &[SecretOwner], host: &str) -> Vec<HostSecret> {
        let secrets = self.host_secrets.lock().unwrap().clone();
        if host == host_secrets::HOST { secrets } else { Vec::new() }
    }

    async fn git_credential(
        &self,
        _url: &str,
        push: bool,
    ) -> Result<Option<Secret<String>>, String> {
        let Some(forge) = self.rotated.lock().unwrap().clone() else { return Ok(None) };
        let mut asked = self.asked.lock().unwrap();
        asked.push(push);
        let token = Secret::new(format!("t0ken-{}", asked.len()));
        if self.refusal.is_some() {
            return Ok(Some(token));
        }
        forge.set_token("app", &token).map_err(|error| error.to_string())?;
        Ok(Some(token))
    }

    fn git_credential_refused(&self, _url: &str, refused: &Secret<String>) {
        self.refused.lock().unwrap().push(refused.expose().clone());
    }

    async fn has_pushed(
        &self,
        _: &SessionId,
        _: &RepositoryName,
        commit: &str,
    ) -> Result<bool, Refusal> {
        Ok(self.pushed.lock().unwrap().iter().any(|pushed| pushed == commit))
    }

    async fn push_begins(
        &self,
        _: &SessionId,
        _: &RepositoryName,
        push: BegunPush<'_>,
    ) -> Result<(), Refusal> {
        self.pushed.lock().unwrap().push(push.new.to_owned());
        let replaced = push.replaces.then(|| push.old.to_owned());
        self.replaced.lock().unwrap().extend(replaced);
        let mut most = self.most_open_pushes.lock().unwrap();
        *most = (*most).max(self.open_pushes.fetch_add(1, Ordering::SeqCst) + 1);
        Ok(())
    }

    async fn push_refused(&self, _: &SessionId, _: &RepositoryName, commit: &str) {
        let mut pushed = self.pushed.lock().unwrap();
        let last = pushed.iter().rposition(|pushed| pushed == commit).unwrap();
        pushed.remove(last);
        self.open_pushes.fetch_sub(1, Ordering::SeqCst);
    }

    async fn record_use(&self, _: &SessionId, used: HostSecretUse) -> Result<(), Refusal> {
        if *self.log_fails.lock().unwrap() {
            return Err(Refusal::Retry("no log".to_owned()));
        }
        self.uses.lock().unwrap().push(used);
        Ok(())
    }

    async fn reserve(&self, _: &SessionId, call: &PlannedCall) -> Result<(), Refusal> {
        self.refusal.clone().map_or(Ok(()), Err)?;
        self.planned.lock().unwrap().push(call.clone());
        Ok(())
    }

    async fn settle(&self, _: &SessionId, call: &PlannedCall, used: Used) -> Usage {
        assert!(self.planned.lock().unwrap().contains(call), "{call:?} was not reserved");
        let (settled, usage) = match used {
            Used::Counted(usage) => (&self.settled, usage),
            Used::AtLeast(usage) => (&self.unread, usage),
        };
        settled.lock().unwrap().push(usage);
        usage
    }

    async fn count_traffic(&self, _: &SessionId, counts: Vec<TrafficCount>) {
        self.traffic.lock().unwrap().extend(counts);
        self.changed.notify_waiters();
    }

    async fn log(&self, _: &SessionId, event: EventBody) {
        if matches!(event, EventBody::Pushed { .. }) {
            self.open_pushes.fetch_sub(1, Ordering::SeqCst);
        }
        self.events.lock().unwrap().push(event);
        self.changed.notify_waiters();
    }
}

impl RecordingLedger {
    fn events(&self) -> Vec<EventBody> {
        self.events.lock().unwrap().clone()
    }

    async fn wait_for_events(&self, count: usize) -> Vec<EventBody> {
        let enough = async {
            loop {
                let changed = self.changed.notified();
                if self.events().len() >= count {
                    return self.events();
                }
                changed.await;
            }
        };
        tokio::time::timeout(Duration::from_secs(30), enough)
            .await
            .expect("timed out waiting for events")
    }
}

/// A gateway with one open door.
struct TestDoor {
    ledger: Arc<RecordingLedger>,
    socket: PathBuf,
    handle: DoorHandle,
    gateway: Gateway,
    folder: TempDir,
}

impl TestDoor {
    fn new(ledger: RecordingLedger, config: GatewayConfig, policy: DoorPolicy) -> Self {
        Self::with_tools(ledger, config, policy, None)
    }

    fn with_tools(
        ledger: RecordingLedger,
        config: GatewayConfig,
        policy: DoorPolicy,
        tools: Option<Arc<dyn Tools>>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (ledger, socket) = (Arc::new(ledger), folder.path().join("door.sock"));
        let gateway = Gateway::new(Arc::clone(&ledger) as Arc<dyn Ledger>, config);
        let handle =
            gateway.open(Box::new(DoorSocket::bind(&socket).unwrap()), policy, None, tools);
        Self { ledger, socket, handle, gateway, folder }
    }

    async fn request(&self, request: &DoorRequest) -> (DoorReply, BufReader<UnixStream>) {
        dial(&self.socket, request).await
    }

    /// Like the supervisor: a listener whose connections go through the door.
    async fn inside(&self, name: &'static str, port: u16) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, socket) = (listener.local_addr().unwrap(), self.socket.clone());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let socket = socket.clone();
                tokio::spawn(async move {
                    let request = DoorRequest::Connect { name: name.to_owned(), port };
                    let (reply, mut door) = dial(&socket, &request).await;
                    assert_eq!(reply, DoorReply::Open);
                    let _ = copy_bidirectional(&mut stream, &mut door).await;
                });
            }
        });
        address
    }
}

async fn dial(
    socket: &std::path::Path,
    request: &DoorRequest,
) -> (DoorReply, BufReader<UnixStream>) {
    let mut stream = BufReader::new(UnixStream::connect(socket).await.unwrap());
    let line = format!("{}\n", serde_json::to_string(request).unwrap());
    stream.write_all(line.as_bytes()).await.unwrap();
    let mut reply = String::new();
    stream.read_line(&mut reply).await.unwrap();
    (serde_json::from_str(&reply).unwrap(), stream)
}

fn policy(names: &[&str]) -> DoorPolicy {
    DoorPolicy {
        session: SessionId::random(),
        network: ResolvedPolicy::of(NetworkPolicy::Trusted, names).fixed(),
        upstream: watch::channel(UpstreamName::scripted()).1,
        repositories: Vec::new(),
        secrets: vec![SecretOwner::Global],
        purpose: DoorPurpose::Work,
    }
}

/// Waits until a closed door's socket is removed.
async fn removed(socket: &std::path::Path) {
    while socket.exists() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn door_works_with_long_path_and_removes_socket() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("a".repeat(90)).join("b".repeat(90));
    std::fs::create_dir_all(&long).unwrap();
    let socket = long.join("door.sock");
    std::fs::write(&socket, "stale").unwrap();
    let gateway = Gateway::new(Arc::new(RecordingLedger::default()), GatewayConfig::default());
    let door = gateway.open(Box::new(DoorSocket::bind(&socket).unwrap()), policy(&[]), None, None);
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o666);
    // A short path, like that of the supervisor.
    let near = folder.path().join("n");
    std::os::unix::fs::symlink(&long, &near).unwrap();
    let request = DoorRequest::Lookup { name: harvest_proto::door::MODEL_NAME.into() };
    assert_eq!(dial(&near.join("door.sock"), &request).await.0, DoorReply::Open);
    drop(door);
    removed(&socket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn newer_door_survives_closing_the_older() {
    let door = TestDoor::new(RecordingLedger::default(), GatewayConfig::default(), policy(&[]));
    let gateway =
        Gateway::new(Arc::clone(&door.ledger) as Arc<dyn Ledger>, GatewayConfig::default());
    let listener = Box::new(DoorSocket::bind(&door.socket).unwrap());
    let newer = gateway.open(listener, policy(&["example.org"]), None, None);
    drop(door.handle);
    let request = DoorRequest::Lookup { name: "example.org".into() };
    assert_eq!(dial(&door.socket, &request).await.0, DoorReply::Open);
    drop(newer);
    removed(&door.socket).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn observer_receives_events_instead_of_ledger() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, socket) = (Arc::new(RecordingLedger::default()), folder.path().join("door.sock"));
    let gateway = Gateway::new(Arc::clone(&ledger) as Arc<dyn Ledger>, GatewayConfig::default());
    let (sender, mut events) = tokio::sync::mpsc::unbounded_channel();
    let observer = Box::new(move |event| sender.send(event).unwrap());
    let listener = Box::new(DoorSocket::bind(&socket).unwrap());
    let _door = gateway.open(listener, policy(&[]), Some(observer), None);
    dial(&socket, &DoorRequest::Lookup { name: "example.org".into() }).await;
    let event = events.recv().await.unwrap();
    let EventBody::EgressRefused { name, hint: Some(hint), .. } = event else {
        panic!("{event:?}")
    };
    assert!(name == "example.org" && hint.contains("harvest net allow"), "{name}: {hint}");
    assert_eq!(ledger.events(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_door_cuts_its_connections() {
    let door = TestDoor::new(RecordingLedger::default(), GatewayConfig::default(), policy(&[]));
    let request = DoorRequest::Connect { name: harvest_proto::door::MODEL_NAME.into(), port: 80 };
    let (_, mut stream) = door.request(&request).await;
    drop(door.handle);
    let mut line = String::new();
    assert_eq!(stream.read_line(&mut line).await.unwrap_or(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_or_endless_request_closes_the_connection() {
    let door = TestDoor::new(RecordingLedger::default(), GatewayConfig::default(), policy(&[]));
    for line in ["{\"request\":\"open_sesame\"}\n".to_owned(), "x".repeat(4096)] {
        let mut stream = BufReader::new(UnixStream::connect(&door.socket).await.unwrap());
        // The door may close the connection before it has read everything.
        let _ = stream.write_all(line.as_bytes()).await;
        let mut answer = String::new();
        assert_eq!(stream.read_line(&mut answer).await.unwrap_or(0), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_are_refused() {
    let door = TestDoor::new(RecordingLedger::default(), GatewayConfig::default(), policy(&[]));
    let mut held = Vec::new();
    for _ in 0..512 {
        let request =
            DoorRequest::Connect { name: harvest_proto::door::MODEL_NAME.into(), port: 80 };
        held.push(door.request(&request).await);
    }
    let mut stream = BufReader::new(UnixStream::connect(&door.socket).await.unwrap());
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    assert!(line.contains("too many connections"), "{line}");
    held.clear();
    let again = async {
        loop {
            let mut stream = BufReader::new(UnixStream::connect(&door.socket).await.unwrap());
            let _ = stream
                .write_all(b"{\"request\":\"lookup\",\"name\":\"git.harvest.internal\"}\n")
                .await;
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            if line.contains("open") {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), again)
        .await
        .expect("the door accepts no connection");
}
