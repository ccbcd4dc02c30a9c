//! The bridge: the protocol between a sandbox's supervisor and the server or CLI that dials it.
//!
//! A frame is a length (four bytes, big endian, of everything after it), one byte of kind, and the
//! payload: kind 0 is one [`ToSupervisor`] or [`FromSupervisor`] as JSON, kind 1 is a stream number
//! (four bytes, big endian) and raw bytes. The frames are the same over a Unix socket, which the
//! server dials, and over any connection that a remote supervisor dials.
//!
//! The dialer starts with [`ToSupervisor::Hello`]; the supervisor replies with
//! [`FromSupervisor::Welcome`] or closes. An *owner* (the server, with its lease) sends prompts and
//! receives events; a *client* (the CLI without a server) runs commands and copies files. A newer
//! lease takes over ownership; an older one is refused.
//!
//! Streams carry the bytes of commands and files. Flow control is by credit: a sender may have at
//! most the granted bytes in flight, [`INITIAL_CREDIT_BYTES`] at first and more with each `Credit`.
//! So a slow reader stalls only its own stream.

mod boot;
mod command;
mod file;
mod frame;
mod git;

pub use boot::{
    AgentLaunch, AgentProgram, Boot, BootStart, Checkout, ModelProtocol, RestartPolicy,
};
pub use command::{Command, Exit, Terminal};
pub use file::{FileKind, FileRequest, FileStat};
pub use frame::{Decoder, Frame, FrameError};
pub use git::{DiffFormat, DiffStat, GitQuery, GitRequest, SyncRequest, SyncTarget, Truncation};

use serde::{Deserialize, Serialize};

use crate::{
    BlobId, PromptId, Timestamp, TurnId,
    event::{BootPhase, EventBody},
    image::ImageType,
};

/// Version of the protocol, raised when a frame is added or changes its meaning.
pub const VERSION: u32 = 10;

/// Credit of a stream before the first `Credit` frame.
pub const INITIAL_CREDIT_BYTES: u32 = 256 * 1024;

/// Maximum payload of a data frame. 64 KiB: Linux's default pipe capacity, so one read fills one
/// frame.
pub const MAX_DATA_BYTES: usize = 64 * 1024;

/// Maximum size of a control frame: a prompt of 64,000 characters or an event of 64 KiB, escaped,
/// with room to spare.
pub const MAX_CONTROL_BYTES: usize = 1024 * 1024;

/// Number of a request, chosen by the dialer; the reply repeats it.
pub type RequestId = u64;

/// Number of a stream, chosen by the dialer and unique on its connection.
pub type StreamId = u32;

/// A message of the dialer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToSupervisor {
    /// The first frame of a connection.
    Hello {
        /// [`VERSION`] of the dialer.
        version: u32,
        /// Permissions of this connection.
        role: BridgeRole,
        /// Interval of the owner's heartbeats; 30 seconds when absent.
        heartbeat_millis: Option<u64>,
    },
    /// Boot the sandbox for a session. Idempotent: a repeated boot only replies.
    Boot {
        /// Number of the request.
        id: RequestId,
        /// What to prepare.
        boot: Box<Boot>,
    },
    /// Run a prompt. The reply means that it is accepted; a known prompt id is not run again.
    Prompt {
        /// Number of the request.
        id: RequestId,
        /// The turn to run.
        prompt: Box<TurnRequest>,
    },
    /// Stop the turn in progress. Its processes are dead when `TurnEnded` arrives.
    Stop {
        /// Number of the request.
        id: RequestId,
        /// The turn to stop, so that a late stop cannot hit the next turn.
        turn: TurnId,
    },
    /// Answer a question of the agent.
    Answer {
        /// Number of the request.
        id: RequestId,
        /// The agent's id of the question.
        request: String,
        /// The answer.
        answer: String,
    },
    /// Commit, fetch and rebase all checkouts. Refused while a turn is in progress; prompts wait
    /// for it. It goes on without the connection, and ends with the event `SyncEnded`; the reply
    /// follows that event.
    Sync {
        /// Number of the request.
        id: RequestId,
        /// What to sync.
        sync: Box<SyncRequest>,
    },
    /// Request the supervisor's [`Status`].
    Status {
        /// Number of the request.
        id: RequestId,
    },
    /// Acknowledges events: all up to this outbox number are stored.
    EventsStored {
        /// The highest stored number.
        upto: u64,
    },
    /// Send a blob's bytes on `stream`, then `End`; the reply comes first. Only for blobs named by
    /// an event; the supervisor keeps them until `EventsStored` covers that event.
    Blob {
        /// Number of the request.
        id: RequestId,
        /// Id of the blob.
        blob: BlobId,
        /// Stream to send on.
        stream: StreamId,
    },
    /// Run a command.
    Exec {
        /// Number of the request; identifies the command until its `Exited`.
        id: RequestId,
        /// The command.
        command: Box<Command>,
    },
    /// Kill a command and every process it started, or cancel a file transfer or a git operation.
    Kill {
        /// Number of the request.
        id: RequestId,
        /// Number of the `Exec`, `File` or `Git` request.
        exec: RequestId,
    },
    /// Resize a command's terminal.
    Resize {
        /// Number of the request.
        id: RequestId,
        /// Number of the `Exec` request.
        exec: RequestId,
        /// New height in rows.
        rows: u16,
        /// New width in columns.
        cols: u16,
    },
    /// Run a file operation.
    File {
        /// Number of the request.
        id: RequestId,
        /// The user whose access applies and who owns new files, as in [`Command::user`].
        user: Option<String>,
        /// The operation.
        request: FileRequest,
    },
    /// Run a git operation on a checkout.
    Git {
        /// Number of the request.
        id: RequestId,
        /// The operation.
        request: GitRequest,
    },
    /// Grants the sender of a stream more credit.
    Credit {
        /// Number of the stream.
        stream: StreamId,
        /// Additional bytes.
        bytes: u32,
    },
    /// End of a stream.
    End {
        /// Number of the stream.
        stream: StreamId,
    },
    /// Liveness probe; answered with `Pong` at once.
    Ping,
    /// Shut down in order: the agent first, then all other processes; then pid 1 exits.
    Shutdown {
        /// Number of the request.
        id: RequestId,
    },
}

/// A message of the supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromSupervisor {
    /// Reply to `Hello`.
    Welcome {
        /// [`VERSION`] of the supervisor.
        version: u32,
        /// Current status.
        status: Status,
    },
    /// Reply to a request.
    Reply {
        /// Number of the request.
        id: RequestId,
        /// Result of the request.
        result: Result<Reply, Fault>,
    },
    /// An event. Sent again after every reconnect until `EventsStored` covers it.
    Event(OutboxEvent),
    /// A command ended; its streams have ended before.
    Exited {
        /// Number of the `Exec` request.
        exec: RequestId,
        /// Exit status.
        exit: Exit,
        /// Duration of the command.
        millis: u64,
    },
    /// Grants the sender of a stream more credit.
    Credit {
        /// Number of the stream.
        stream: StreamId,
        /// Additional bytes.
        bytes: u32,
    },
    /// End of a stream.
    End {
        /// Number of the stream.
        stream: StreamId,
    },
    /// Answer to `Ping`.
    Pong,
    /// Sent to the owner at the interval of its `Hello`, and when the number of detached commands
    /// changes.
    Heartbeat {
        /// True while a turn is in progress.
        busy: bool,
        /// Number of running detached commands.
        detached: u32,
    },
}

/// Permissions of a connection.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum BridgeRole {
    /// Drives the session and receives its events. At most one: the one with the highest lease.
    Owner {
        /// Lease of the server; rises when another server process takes over.
        lease: u64,
        /// Number of the session's sandbox. A supervisor booted for another epoch refuses.
        epoch: u64,
        /// The highest stored outbox number; the supervisor sends all later events.
        stored: u64,
    },
    /// Runs commands and copies files, nothing else.
    Client,
}

/// A prompt to run as a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnRequest {
    /// Id of the prompt.
    pub prompt: PromptId,
    /// Id of the turn.
    pub turn: TurnId,
    /// Number of the turn in its session.
    pub number: u32,
    /// Text of the prompt.
    pub text: String,
    /// Its images, which are files in the sandbox.
    pub images: Vec<ImageFile>,
    /// Author of the turn's commits: `"{name} (Harvest)" <email>`.
    pub author: Author,
    /// The agent that runs the turn, if another one may be running, or with another model.
    pub agent: Option<Box<AgentLaunch>>,
    /// The messages before it, oldest first, for an agent that does not remember them: see
    /// [`FaultCode::NeedsHistory`].
    pub history: Option<Vec<PastMessage>>,
    /// Checkouts whose work is committed and pushed at the end of the turn, if the agent has not.
    pub save_work: Vec<Checkout>,
}

/// An image of a prompt, in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageFile {
    /// Absolute path; the agent's user can read it.
    pub path: String,
    /// Type of its content.
    pub media_type: ImageType,
}

/// An earlier message of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PastMessage {
    /// Who wrote it.
    pub from: Speaker,
    /// The text.
    pub text: String,
}

/// A side of a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Speaker {
    /// A user, with a prompt.
    User,
    /// The agent, with the text of a turn.
    Agent,
}

/// A user: author of prompts and commits, owner of tokens and sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Author {
    /// Name of the user.
    pub name: String,
    /// E-mail address of the user.
    pub email: String,
}

impl Author {
    /// The user of a token that was created where git knows no name and address. It is the author
    /// of nothing.
    #[must_use]
    pub const fn unknown() -> Self {
        Self { name: String::new(), email: String::new() }
    }

    /// Whether commits can be made in this user's name.
    #[must_use]
    pub fn is_known(&self) -> bool {
        !self.name.is_empty() && !self.email.is_empty()
    }
}

/// Status of a supervisor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The boot phase reached; absent before `Boot`.
    pub phase: Option<BootPhase>,
    /// True when that phase failed.
    pub failed: bool,
    /// Prompts accepted in this sandbox, oldest first.
    pub prompts: Vec<(PromptId, PromptProgress)>,
    /// The highest outbox number assigned.
    pub last_event: u64,
    /// Number of running detached commands.
    pub detached: u32,
}

/// Progress of an accepted prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptProgress {
    /// The turn is in progress.
    Running,
    /// The turn has ended; `TurnEnded` is in the outbox or stored.
    Ended,
}

/// An event in the supervisor's outbox. Numbers are 1, 2, 3… per epoch, without gaps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxEvent {
    /// Outbox number.
    pub number: u64,
    /// Time of the event by the sandbox's clock.
    pub at: Timestamp,
    /// The turn the event belongs to.
    pub turn: Option<TurnId>,
    /// The event.
    pub body: EventBody,
}

impl OutboxEvent {
    /// A warning in place of an event whose content cannot be parsed: it has the event's number,
    /// so that the events after it can be stored. `None` when the message is not an event, or not
    /// text: such bytes were corrupted on the way, and the supervisor sends the event again.
    #[must_use]
    pub fn unreadable(message: &[u8]) -> Option<Self> {
        #[derive(Deserialize)]
        struct Head {
            say: String,
            number: u64,
            at: Timestamp,
            turn: Option<TurnId>,
        }
        let message = std::str::from_utf8(message).ok()?;
        let Head { say, number, at, turn } = serde_json::from_str(message).ok()?;
        let text = "the sandbox sent an event that cannot be read; it is left out";
        let body = EventBody::Warning { message: text.to_owned() };
        (say == "event").then_some(Self { number, at, turn, body })
    }
}

/// Result of a successful request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The request is done or accepted.
    Done,
    /// Reply to `Status`.
    Status(Status),
    /// The command has started.
    Started {
        /// Pid inside the sandbox.
        pid: u32,
    },
    /// Reply to `Stat`.
    Stat(FileStat),
    /// Reply to `List`: the folder's entries, sorted by name.
    List {
        /// The entries.
        entries: Vec<FileStat>,
        /// True when there are more entries after the last one.
        more: bool,
    },
    /// Reply to `Head`.
    Head {
        /// The commit that is checked out; absent without a commit or a checkout.
        commit: Option<String>,
        /// The remote's default branch, as of the last fetch.
        default_branch: Option<String>,
        /// The checkout has a setup hook, which may have left files behind.
        has_setup: bool,
    },
    /// Reply to `CheckOut`.
    CheckedOut {
        /// The commit that was checked out before; null in an empty repository.
        base: Option<String>,
        /// The check that `.harvest/config.toml` of that commit declares.
        declared: Option<String>,
        /// Names of files below `.harvest` that were changed since the two commits have parted; the
        /// first ones, without control characters.
        changed: Vec<String>,
        /// The number of all of them.
        changed_count: u64,
    },
    /// Reply to `SaveTree`.
    SavedTree {
        /// Full id of the tree.
        tree: String,
        /// Changes since the tree or commit of the request; zero without one.
        stat: DiffStat,
    },
    /// Reply to `Query`.
    Queried {
        /// Why the output is incomplete; absent when it is complete.
        truncated: Option<Truncation>,
    },
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// Kind of the fault.
    pub code: FaultCode,
    /// Error message for people.
    pub message: String,
    /// True when space ran out: the disk or a quota is full, or a file has its maximum size.
    pub full: bool,
}

impl Fault {
    /// Creates a fault; `full` is false.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), full: false }
    }

    /// The request is invalid.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FaultCode::Invalid, message)
    }

    /// There is no such file, command or turn.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(FaultCode::NotFound, message)
    }

    /// A system call failed.
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(FaultCode::System, message)
    }
}

/// Kinds of [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultCode {
    /// No such file, command or turn.
    NotFound,
    /// The file exists, but permissions forbid the operation.
    Denied,
    /// The file of the command is not executable.
    NotExecutable,
    /// Another operation is in progress.
    Busy,
    /// The sandbox has not booted, or its boot failed.
    NotReady,
    /// The agent does not remember the session's earlier turns: the prompt is accepted with its
    /// history.
    NeedsHistory,
    /// The connection's role does not allow the request.
    NotOwner,
    /// The request is invalid.
    Invalid,
    /// A system call failed: disk full, too many processes…
    System,
}
