//! The server's end of the bridge: one connection to a supervisor, shared by all its users.
//!
//! Requests are sent in the order they are posted. The reader never blocks on the receiver of a
//! stream: a stream may carry only the credit it was granted, so at most [`INITIAL_CREDIT_BYTES`]
//! of it wait in memory. Redialling is up to the driver.

mod exec;
mod files;
mod git;
mod input;
mod liveness;
mod reader;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use harvest_proto::bridge::{
    BridgeRole, Decoder, Fault, FaultCode, Frame, FromSupervisor, INITIAL_CREDIT_BYTES,
    OutboxEvent, Reply, RequestId, Status, StreamId, ToSupervisor, VERSION,
};
use tokio::{
    io::{AsyncWriteExt, ReadHalf, WriteHalf},
    sync::{Semaphore, mpsc, oneshot},
    task::AbortHandle,
};

pub use exec::{CommandOutput, Exec, ExecInput, ExecOutput};
pub use files::{FileReader, FileWriter};
pub(crate) use git::QueryOutput;
pub use input::{InputAborted, InputStream, InputTask};

use crate::{
    sandboxes::BridgeStream,
    timeouts::{LivenessTimeouts, millis},
};
use liveness::LivenessMonitor;

// The supervisor answers its first frame at once; a host under load may take a while.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// A sandbox that stays unreachable counts as lost: time must remain for further attempts.
fn handshake_timeout(liveness: Option<&LivenessTimeouts>) -> Duration {
    liveness.map_or(HANDSHAKE_TIMEOUT, |timeouts| HANDSHAKE_TIMEOUT.min(timeouts.silence / 4))
}

// Events wait here while the driver writes a batch; further ones stay in the supervisor's outbox.
const EVENTS_IN_FLIGHT: usize = 512;

#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The connection is gone, and the outcome of the request is unknown.
    #[error("the connection to the sandbox was lost")]
    Lost,
    #[error("the sandbox did not answer: {reason}")]
    HandshakeFailed { reason: String },
    #[error("the sandbox refused: {0}")]
    Fault(Fault),
    #[error("the sandbox sent an unexpected reply")]
    UnexpectedReply,
    #[error("longer than {limit} bytes")]
    TooLong { limit: usize },
    #[error(
        "the sandbox was started by another version of Harvest (bridge {theirs}, not {VERSION})"
    )]
    OtherVersion { theirs: u32 },
}

/// The error code for a refusal of the supervisor.
pub(crate) fn fault_code(fault: &Fault) -> &'static str {
    match fault.code {
        _ if fault.full => "no_room",
        FaultCode::NotFound => "not_found",
        FaultCode::Denied => "denied",
        FaultCode::NotExecutable => "not_executable",
        FaultCode::Busy => "busy",
        FaultCode::NotReady => "not_ready",
        FaultCode::NeedsHistory => "needs_history",
        FaultCode::NotOwner => "not_owner",
        FaultCode::Invalid => "invalid",
        FaultCode::System => "system",
    }
}

/// A message for the owner of a connection.
#[derive(Debug)]
pub enum OwnerMessage {
    /// An event to store and acknowledge. Boxed: channels reserve space for many messages.
    Event(Box<OutboxEvent>),
    Heartbeat {
        /// The number of detached commands that run.
        detached: u32,
    },
}

/// A connection to a supervisor. Cheap to clone; closed when the last clone is dropped.
#[derive(Clone)]
pub struct Bridge {
    inner: Arc<BridgeInner>,
}

/// A new connection, with the supervisor's status at its start.
pub struct OpenedBridge {
    pub bridge: Bridge,
    pub status: Status,
    /// Messages for the owner; ends with the connection.
    pub events: mpsc::Receiver<OwnerMessage>,
}

struct BridgeInner {
    out: mpsc::UnboundedSender<Vec<u8>>,
    next_request: AtomicU64,
    next_stream: AtomicU32,
    table: Arc<Mutex<PendingTable>>,
    reader: AbortHandle,
}

impl Drop for BridgeInner {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// The receivers that wait for replies, exits and stream data.
#[derive(Default)]
struct PendingTable {
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
    /// Performs the handshake. Owners receive heartbeats and send pings, and close a connection
    /// that times out; guests, which have no `liveness`, wait without limit.
    ///
    /// # Errors
    /// When the supervisor does not answer, or speaks another version.
    pub async fn open(
        stream: Box<dyn BridgeStream>,
        role: BridgeRole,
        liveness: Option<LivenessTimeouts>,
    ) -> Result<OpenedBridge, BridgeError> {
        let (mut read, mut write) = tokio::io::split(stream);
        let heartbeat_millis = liveness.map(|timeouts| millis(timeouts.heartbeat));
        let hello = ToSupervisor::Hello { version: VERSION, role, heartbeat_millis };
        let hello = Frame::Control(hello).encode();
        let mut decoder = Decoder::default();
        let limit = handshake_timeout(liveness.as_ref());
        let welcome = tokio::time::timeout(limit, async {
            write.write_all(&hello).await.map_err(|_| BridgeError::Lost)?;
            read_welcome(&mut read, &mut decoder).await
        });
        let timed_out = |_| BridgeError::HandshakeFailed { reason: "timeout".to_owned() };
        let status = welcome.await.map_err(timed_out)??;
        Ok(Self::spawn(read, write, decoder, status, liveness))
    }

    /// Opens a guest connection without waiting for the welcome. Saves a round trip for a single
    /// command, when the supervisor is known to be of this version.
    #[must_use]
    pub fn open_without_welcome(stream: Box<dyn BridgeStream>) -> Self {
        let (read, write) = tokio::io::split(stream);
        let bridge = Self::spawn(read, write, Decoder::default(), Status::default(), None).bridge;
        bridge.send(ToSupervisor::Hello {
            version: VERSION,
            role: BridgeRole::Client,
            heartbeat_millis: None,
        });
        bridge
    }

    fn spawn(
        read: ReadHalf<Box<dyn BridgeStream>>,
        write: WriteHalf<Box<dyn BridgeStream>>,
        decoder: Decoder,
        status: Status,
        liveness: Option<LivenessTimeouts>,
    ) -> OpenedBridge {
        let (out, outbox) = mpsc::unbounded_channel();
        let (events_in, events) = mpsc::channel(EVENTS_IN_FLIGHT);
        let table = Arc::new(Mutex::new(PendingTable::default()));
        let liveness =
            liveness.map(|timeouts| LivenessMonitor::new(timeouts, tokio::time::Instant::now()));
        let reading = reader::Reader {
            read,
            decoder,
            table: Arc::clone(&table),
            events: events_in,
            out: out.clone(),
            liveness,
        };
        let reader = tokio::spawn(reading.run()).abort_handle();
        tokio::spawn(write_out(write, outbox, reader.clone(), Arc::clone(&table)));
        let inner = BridgeInner {
            out,
            next_request: AtomicU64::new(1),
            next_stream: AtomicU32::new(1),
            table,
            reader,
        };
        OpenedBridge { bridge: Self { inner: Arc::new(inner) }, status, events }
    }

    /// Sends a request now; the reply may be awaited later.
    ///
    /// # Errors
    /// When the connection is closed.
    pub fn post(
        &self,
        make: impl FnOnce(RequestId) -> ToSupervisor,
    ) -> Result<PendingReply, BridgeError> {
        let (reply, answer) = oneshot::channel();
        let id = self.next_request();
        {
            let mut table = self.table();
            if table.closed {
                return Err(BridgeError::Lost);
            }
            table.replies.insert(id, reply);
        }
        self.send(make(id));
        Ok(PendingReply { id, answer })
    }

    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// When the supervisor refuses, or the connection is lost before the reply.
    pub async fn request(
        &self,
        make: impl FnOnce(RequestId) -> ToSupervisor,
    ) -> Result<Reply, BridgeError> {
        self.post(make)?.reply().await
    }

    /// Sends a message that has no reply.
    pub fn send(&self, message: ToSupervisor) {
        // When the connection is gone, the receivers fail.
        let _ = self.inner.out.send(Frame::Control(message).encode());
    }

    fn table(&self) -> std::sync::MutexGuard<'_, PendingTable> {
        lock(&self.inner.table)
    }

    fn next_request(&self) -> RequestId {
        self.inner.next_request.fetch_add(1, Ordering::Relaxed)
    }

    fn new_stream(&self) -> StreamId {
        self.inner.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    /// Opens a stream on which a request returns bytes.
    fn open_incoming(&self) -> (StreamId, mpsc::UnboundedReceiver<ExecOutput>) {
        let (stream, (to, output)) = (self.new_stream(), mpsc::unbounded_channel());
        self.receive(stream, StreamKind::File, to);
        (stream, output)
    }

    fn receive(&self, stream: StreamId, kind: StreamKind, to: mpsc::UnboundedSender<ExecOutput>) {
        let allowance = u64::from(INITIAL_CREDIT_BYTES);
        self.table().incoming.insert(stream, Incoming { to, kind, allowance });
    }

    fn grant(&self, stream: StreamId, bytes: u32) {
        if let Some(incoming) = self.table().incoming.get_mut(&stream) {
            incoming.allowance += u64::from(bytes);
            self.send(ToSupervisor::Credit { stream, bytes });
        }
    }
}

impl std::fmt::Debug for Bridge {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Bridge")
    }
}

/// A request that waits for its reply.
#[derive(Debug)]
pub struct PendingReply {
    pub id: RequestId,
    answer: oneshot::Receiver<Result<Reply, Fault>>,
}

impl PendingReply {
    /// # Errors
    /// When the supervisor refuses, or the connection is lost before the reply.
    pub async fn reply(self) -> Result<Reply, BridgeError> {
        self.answer.await.map_err(|_| BridgeError::Lost)?.map_err(BridgeError::Fault)
    }
}

fn lock(table: &Mutex<PendingTable>) -> std::sync::MutexGuard<'_, PendingTable> {
    table.lock().expect("no holder of this lock can panic")
}

async fn read_welcome(
    read: &mut ReadHalf<Box<dyn BridgeStream>>,
    decoder: &mut Decoder,
) -> Result<Status, BridgeError> {
    loop {
        let failed = |reason: &str| BridgeError::HandshakeFailed { reason: reason.to_owned() };
        match decoder
            .take::<FromSupervisor>()
            .map_err(|_| failed("it does not speak this protocol"))?
        {
            Some(Frame::Control(FromSupervisor::Welcome { version, .. })) if version != VERSION => {
                return Err(BridgeError::OtherVersion { theirs: version });
            }
            Some(Frame::Control(FromSupervisor::Welcome { status, .. })) => return Ok(status),
            Some(_) => return Err(failed("it does not speak this protocol")),
            None => {}
        }
        if !reader::read_more(read, decoder).await {
            return Err(failed("it closed the connection"));
        }
    }
}

async fn write_out(
    mut write: WriteHalf<Box<dyn BridgeStream>>,
    mut outbox: mpsc::UnboundedReceiver<Vec<u8>>,
    reader: AbortHandle,
    table: Arc<Mutex<PendingTable>>,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handshakes_end_well_before_a_sandbox_is_lost() {
        let owner = |seconds| LivenessTimeouts {
            heartbeat: Duration::from_secs(1),
            silence: Duration::from_secs(seconds),
        };
        assert_eq!(handshake_timeout(Some(&owner(2))), Duration::from_millis(500));
        assert_eq!(handshake_timeout(Some(&owner(90))), HANDSHAKE_TIMEOUT);
        assert_eq!(handshake_timeout(None), HANDSHAKE_TIMEOUT);
    }
}
