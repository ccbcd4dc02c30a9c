//! Our end of the bridge: one connection to a supervisor, shared by everyone who needs it.
//!
//! Requests are put on the wire in the order they are posted. The reader never waits for whoever runs
//! a command: a stream may bring only what was granted to it, so its bytes wait in memory at most
//! [`INITIAL_CREDIT_BYTES`] deep. Whether and when to dial again is the driver's.

mod blobs;
mod exec;
mod feed;
mod files;
mod reader;
mod vigil;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use harvest_proto::bridge::{
    Decoder, Fault, Frame, FromSupervisor, INITIAL_CREDIT_BYTES, OutboxEvent, Reply, RequestId,
    Role, Status, StreamId, ToSupervisor, VERSION,
};
use tokio::{
    io::{AsyncWriteExt, ReadHalf, WriteHalf},
    sync::{Semaphore, mpsc, oneshot},
    task::AbortHandle,
};

pub use exec::{Exec, ExecInput, ExecOutput, Output};
pub use feed::{Feed, FeedTorn, Feeding};
pub use files::{FileReading, FileWriting};

use crate::provider::{BridgeStream, ProviderError};

// The supervisor answers its first frame at once; a machine under load may take a while to get there.
const HELLO_LIMIT: Duration = Duration::from_secs(10);

// Events wait here while the driver writes the last batch; then the supervisor's outbox holds them.
const EVENTS_IN_FLIGHT: usize = 512;

/// Why something could not be done over the bridge.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The connection is gone; what became of the request is not known.
    #[error("the connection to the sandbox was lost")]
    Lost,
    /// The supervisor did not let us in.
    #[error("the supervisor did not answer: {reason}")]
    NotWelcome {
        /// In words.
        reason: String,
    },
    /// The supervisor says no.
    #[error("the supervisor refused: {0}")]
    Fault(Fault),
    /// The supervisor answered something else than was asked.
    #[error("the supervisor answered out of turn")]
    Confused,
    /// More came than the caller wants.
    #[error("it is longer than {limit} bytes")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// The supervisor speaks neither our version of the bridge nor the last one.
    #[error(
        "the sandbox's supervisor speaks version {theirs} of the bridge, this server {VERSION}"
    )]
    OtherVersion {
        /// Its version.
        theirs: u32,
    },
    /// The supervisor is of a version that cannot do this.
    #[error("the sandbox's supervisor is older than this server and has no terminals")]
    Outdated,
    /// It could not be dialled.
    #[error("cannot dial the sandbox")]
    Dial(#[from] ProviderError),
}

/// What the owner hears.
#[derive(Debug)]
pub enum FromBridge {
    /// An event to store and acknowledge. Boxed: channels have room for many of whatever they carry.
    Event(Box<OutboxEvent>),
    /// The supervisor is there.
    Heartbeat {
        /// Whether a turn is in progress.
        busy: bool,
        /// How many detached commands run.
        detached: u32,
    },
}

/// A connection to a supervisor. Cheap to clone; closed when the last clone is dropped.
#[derive(Clone)]
pub struct Bridge {
    wire: Arc<Wire>,
}

/// How an owner knows that the other side lives.
#[derive(Debug, Clone, Copy)]
pub struct Pulse {
    /// How often it is to say so.
    pub heartbeat: Duration,
    /// How long it may say nothing before the connection is taken for dead.
    pub silence: Duration,
}

/// A connection that has just been made.
pub struct Opened {
    /// The connection.
    pub bridge: Bridge,
    /// How things stand inside.
    pub status: Status,
    /// What the owner hears; ends with the connection.
    pub events: mpsc::Receiver<FromBridge>,
}

struct Wire {
    out: mpsc::UnboundedSender<Vec<u8>>,
    next_request: AtomicU64,
    next_stream: AtomicU32,
    table: Arc<Mutex<Table>>,
    reader: AbortHandle,
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Who waits for what.
#[derive(Default)]
struct Table {
    closed: bool,
    replies: HashMap<RequestId, oneshot::Sender<Result<Reply, Fault>>>,
    execs: HashMap<RequestId, mpsc::UnboundedSender<ExecOutput>>,
    incoming: HashMap<StreamId, Incoming>,
    outgoing: HashMap<StreamId, Arc<Semaphore>>,
}

struct Incoming {
    to: mpsc::UnboundedSender<ExecOutput>,
    kind: StreamKind,
    allowance: u64,
}

#[derive(Clone, Copy, PartialEq)]
enum StreamKind {
    Stdout,
    Stderr,
    File,
}

impl Bridge {
    /// Says hello. Owners get heartbeats and ask now and then whether they are heard; they take a connection
    /// without either for dead. Guests, which have no `pulse`, may hear nothing for ever.
    ///
    /// # Errors
    /// When the supervisor does not answer, or not as ours does.
    pub async fn open(
        stream: Box<dyn BridgeStream>,
        role: Role,
        pulse: Option<Pulse>,
    ) -> Result<Opened, BridgeError> {
        let (mut read, mut write) = tokio::io::split(stream);
        let heartbeat_millis =
            pulse.map(|pulse| u64::try_from(pulse.heartbeat.as_millis()).unwrap_or(u64::MAX));
        let hello =
            Frame::Control(ToSupervisor::Hello { version: VERSION, role, heartbeat_millis })
                .encode();
        let mut decoder = Decoder::default();
        let welcome = tokio::time::timeout(HELLO_LIMIT, async {
            write.write_all(&hello).await.map_err(|_| BridgeError::Lost)?;
            welcome(&mut read, &mut decoder).await
        });
        let not_in_time = |_| BridgeError::NotWelcome { reason: "not in time".to_owned() };
        let status = welcome.await.map_err(not_in_time)??;
        Ok(Self::run(read, write, decoder, status, pulse))
    }

    /// Says hello as a guest and does not wait for the answer: one way there and back less, for who has one
    /// command to run and knows that the supervisor is of this version.
    #[must_use]
    pub fn hail(stream: Box<dyn BridgeStream>) -> Self {
        let (read, write) = tokio::io::split(stream);
        let bridge = Self::run(read, write, Decoder::default(), Status::default(), None).bridge;
        bridge.say(ToSupervisor::Hello {
            version: VERSION,
            role: Role::Guest,
            heartbeat_millis: None,
        });
        bridge
    }

    fn run(
        read: ReadHalf<Box<dyn BridgeStream>>,
        write: WriteHalf<Box<dyn BridgeStream>>,
        decoder: Decoder,
        status: Status,
        pulse: Option<Pulse>,
    ) -> Opened {
        let (out, outbox) = mpsc::unbounded_channel();
        let (events_in, events) = mpsc::channel(EVENTS_IN_FLIGHT);
        let table = Arc::new(Mutex::new(Table::default()));
        let vigil = pulse.map(|pulse| vigil::Vigil::new(pulse, tokio::time::Instant::now()));
        let reading = reader::Reader {
            read,
            decoder,
            table: Arc::clone(&table),
            events: events_in,
            out: out.clone(),
            vigil,
        };
        let reader = tokio::spawn(reading.run()).abort_handle();
        tokio::spawn(write_out(write, outbox, reader.clone(), Arc::clone(&table)));
        let wire = Wire {
            out,
            next_request: AtomicU64::new(1),
            next_stream: AtomicU32::new(1),
            table,
            reader,
        };
        Opened { bridge: Self { wire: Arc::new(wire) }, status, events }
    }

    /// Puts a request on the wire now; the reply may be waited for later.
    ///
    /// # Errors
    /// When the connection is gone already.
    pub fn post(
        &self,
        make: impl FnOnce(RequestId) -> ToSupervisor,
    ) -> Result<Posted, BridgeError> {
        let (reply, answer) = oneshot::channel();
        let id = self.next_request();
        {
            let mut table = self.table();
            if table.closed {
                return Err(BridgeError::Lost);
            }
            table.replies.insert(id, reply);
        }
        self.say(make(id));
        Ok(Posted { id, answer })
    }

    /// Asks and waits for the answer.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost before it says anything.
    pub async fn request(
        &self,
        make: impl FnOnce(RequestId) -> ToSupervisor,
    ) -> Result<Reply, BridgeError> {
        self.post(make)?.reply().await
    }

    /// Says something that has no reply.
    pub fn say(&self, message: ToSupervisor) {
        // The connection may be gone; then whoever waits hears that.
        let _ = self.wire.out.send(Frame::Control(message).encode());
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        lock(&self.wire.table)
    }

    fn next_request(&self) -> RequestId {
        self.wire.next_request.fetch_add(1, Ordering::Relaxed)
    }

    fn new_stream(&self) -> StreamId {
        self.wire.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    fn receive(&self, stream: StreamId, kind: StreamKind, to: mpsc::UnboundedSender<ExecOutput>) {
        let allowance = u64::from(INITIAL_CREDIT_BYTES);
        self.table().incoming.insert(stream, Incoming { to, kind, allowance });
    }

    fn grant(&self, stream: StreamId, bytes: u32) {
        if let Some(incoming) = self.table().incoming.get_mut(&stream) {
            incoming.allowance += u64::from(bytes);
            self.say(ToSupervisor::Credit { stream, bytes });
        }
    }
}

impl std::fmt::Debug for Bridge {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Bridge")
    }
}

/// A request on its way.
#[derive(Debug)]
pub struct Posted {
    /// Its number.
    pub id: RequestId,
    answer: oneshot::Receiver<Result<Reply, Fault>>,
}

impl Posted {
    /// Waits for the reply.
    ///
    /// # Errors
    /// When the supervisor says no, or the connection is lost before it says anything.
    pub async fn reply(self) -> Result<Reply, BridgeError> {
        self.answer.await.map_err(|_| BridgeError::Lost)?.map_err(BridgeError::Fault)
    }
}

fn lock(table: &Mutex<Table>) -> std::sync::MutexGuard<'_, Table> {
    table.lock().expect("no holder of this lock can panic")
}

async fn welcome(
    read: &mut ReadHalf<Box<dyn BridgeStream>>,
    decoder: &mut Decoder,
) -> Result<Status, BridgeError> {
    loop {
        let refused = |reason: &str| BridgeError::NotWelcome { reason: reason.to_owned() };
        match decoder.take::<FromSupervisor>().map_err(|_| refused("not our protocol"))? {
            Some(Frame::Control(FromSupervisor::Welcome { version, .. }))
                if version > VERSION || version + 1 < VERSION =>
            {
                return Err(BridgeError::OtherVersion { theirs: version });
            }
            Some(Frame::Control(FromSupervisor::Welcome { status, .. })) => return Ok(status),
            Some(_) => return Err(refused("not our protocol")),
            None => {}
        }
        if !reader::more(read, decoder).await {
            return Err(refused("it closed the connection"));
        }
    }
}

async fn write_out(
    mut write: WriteHalf<Box<dyn BridgeStream>>,
    mut outbox: mpsc::UnboundedReceiver<Vec<u8>>,
    reader: AbortHandle,
    table: Arc<Mutex<Table>>,
) {
    while let Some(frame) = outbox.recv().await {
        if write.write_all(&frame).await.is_err() {
            break;
        }
    }
    let _ = write.shutdown().await;
    reader.abort();
    reader::close(&table);
}
