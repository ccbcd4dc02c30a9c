//! Doors as a sandbox uses them: through their sockets, with the real git and hand-made upstreams, all on
//! loopback.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops where it stands")]

mod egress;
mod git;
mod model;

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use harvest_gateway::{
    DoorHandle, Gateway, GatewayConfig,
    ledger::{Ledger, Pass, Policy, Refusal, Upstream},
};
use harvest_proto::{
    EventBody, Secret, SessionId,
    door::{Answer, Ask},
    event::Usage,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, copy_bidirectional},
    net::{TcpListener, UnixStream},
    sync::Notify,
};

/// A ledger that remembers everything.
#[derive(Default)]
struct Books {
    secrets: HashMap<&'static str, &'static str>,
    refusal: Option<&'static str>,
    events: Mutex<Vec<EventBody>>,
    settled: Mutex<Vec<Usage>>,
    changed: Notify,
}

#[async_trait]
impl Ledger for Books {
    async fn secret(&self, name: &str) -> Option<Secret<String>> {
        self.secrets.get(name).map(|value| Secret::new((*value).to_owned()))
    }

    async fn reserve(&self, _: &SessionId) -> Result<(), Refusal> {
        self.refusal.map_or(Ok(()), |reason| Err(Refusal { reason: reason.to_owned() }))
    }

    async fn settle(&self, _: &SessionId, usage: Usage) {
        self.settled.lock().unwrap().push(usage);
    }

    async fn log(&self, _: &SessionId, event: EventBody) {
        self.events.lock().unwrap().push(event);
        self.changed.notify_waiters();
    }
}

impl Books {
    fn events(&self) -> Vec<EventBody> {
        self.events.lock().unwrap().clone()
    }

    /// Waits for so many events.
    async fn count(&self, count: usize) -> Vec<EventBody> {
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
            .expect("the events did not come")
    }
}

/// One gateway with one open door.
struct House {
    books: Arc<Books>,
    socket: PathBuf,
    handle: DoorHandle,
    folder: TempDir,
}

impl House {
    fn new(books: Books, config: GatewayConfig, pass: Pass) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (books, socket) = (Arc::new(books), folder.path().join("door.sock"));
        let gateway = Gateway::new(Arc::clone(&books) as Arc<dyn Ledger>, config);
        let handle = gateway.open(&socket, pass).unwrap();
        Self { books, socket, handle, folder }
    }

    async fn ask(&self, ask: &Ask) -> (Answer, BufReader<UnixStream>) {
        dial(&self.socket, ask).await
    }

    /// What the supervisor does: a listener whose connections come out of the door.
    async fn inside(&self, name: &'static str, port: u16) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, socket) = (listener.local_addr().unwrap(), self.socket.clone());
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let socket = socket.clone();
                tokio::spawn(async move {
                    let ask = Ask::Connect { name: name.to_owned(), port };
                    let (answer, mut door) = dial(&socket, &ask).await;
                    assert_eq!(answer, Answer::Open);
                    let _ = copy_bidirectional(&mut stream, &mut door).await;
                });
            }
        });
        address
    }
}

async fn dial(socket: &std::path::Path, ask: &Ask) -> (Answer, BufReader<UnixStream>) {
    let mut stream = BufReader::new(UnixStream::connect(socket).await.unwrap());
    let line = format!("{}\n", serde_json::to_string(ask).unwrap());
    stream.write_all(line.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_line(&mut answer).await.unwrap();
    (serde_json::from_str(&answer).unwrap(), stream)
}

fn pass(policy: &[&str]) -> Pass {
    Pass {
        session: SessionId::random(),
        policy: Policy::Trusted(policy.iter().map(|name| (*name).to_owned()).collect()),
        upstream: Upstream::Scripted,
        repositories: Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_door_works_under_a_path_longer_than_a_socket_address_and_leaves_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    let long = folder.path().join("a".repeat(90)).join("b".repeat(90));
    std::fs::create_dir_all(&long).unwrap();
    let socket = long.join("door.sock");
    std::fs::write(&socket, "stale").unwrap();
    let gateway = Gateway::new(Arc::new(Books::default()), GatewayConfig::default());
    let door = gateway.open(&socket, pass(&[])).unwrap();
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o777, 0o666);
    // The short way in, as the supervisor has it.
    let near = folder.path().join("n");
    std::os::unix::fs::symlink(&long, &near).unwrap();
    let ask = Ask::Lookup { name: harvest_proto::door::MODEL_NAME.into() };
    assert_eq!(dial(&near.join("door.sock"), &ask).await.0, Answer::Open);
    drop(door);
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_door_under_the_same_path_outlives_the_older_one() {
    let house = House::new(Books::default(), GatewayConfig::default(), pass(&[]));
    let gateway =
        Gateway::new(Arc::clone(&house.books) as Arc<dyn Ledger>, GatewayConfig::default());
    let newer = gateway.open(&house.socket, pass(&["example.org"])).unwrap();
    house.handle.close();
    let ask = Ask::Lookup { name: "example.org".into() };
    assert_eq!(dial(&house.socket, &ask).await.0, Answer::Open);
    newer.close();
    assert!(!house.socket.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_door_cuts_its_connections() {
    let house = House::new(Books::default(), GatewayConfig::default(), pass(&[]));
    let ask = Ask::Connect { name: harvest_proto::door::MODEL_NAME.into(), port: 80 };
    let (_, mut stream) = house.ask(&ask).await;
    house.handle.close();
    let mut line = String::new();
    assert_eq!(stream.read_line(&mut line).await.unwrap_or(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_no_question_or_never_ends_is_hung_up_on() {
    let house = House::new(Books::default(), GatewayConfig::default(), pass(&[]));
    for line in ["{\"ask\":\"open_sesame\"}\n".to_owned(), "x".repeat(4096)] {
        let mut stream = BufReader::new(UnixStream::connect(&house.socket).await.unwrap());
        // The door may hang up before it has read all of it.
        let _ = stream.write_all(line.as_bytes()).await;
        let mut answer = String::new();
        assert_eq!(stream.read_line(&mut answer).await.unwrap_or(0), 0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_beyond_the_limit_are_refused_and_the_door_goes_on() {
    let house = House::new(Books::default(), GatewayConfig::default(), pass(&[]));
    let mut held = Vec::new();
    for _ in 0..512 {
        let ask = Ask::Connect { name: harvest_proto::door::MODEL_NAME.into(), port: 80 };
        held.push(house.ask(&ask).await);
    }
    let mut stream = BufReader::new(UnixStream::connect(&house.socket).await.unwrap());
    let mut line = String::new();
    stream.read_line(&mut line).await.unwrap();
    assert!(line.contains("too many connections"), "{line}");
    held.clear();
    let again = async {
        loop {
            let mut stream = BufReader::new(UnixStream::connect(&house.socket).await.unwrap());
            let _ =
                stream.write_all(b"{\"ask\":\"lookup\",\"name\":\"git.harvest.internal\"}\n").await;
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            if line.contains("open") {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(30), again).await.expect("the door stayed shut");
}
