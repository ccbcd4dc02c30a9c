//! The bridge: the one connection into a sandbox, spoken between its supervisor and whoever dials it.
//!
//! A frame is four bytes of length (big endian, of what follows), one byte of kind, and the rest:
//! kind 0 is one [`ToSupervisor`] or [`FromSupervisor`] as JSON, kind 1 is four bytes of stream
//! number (big endian) and raw bytes. The frames are the same over a Unix socket, where the host
//! dials, and over anything a remote supervisor dials out with.
//!
//! The dialer speaks first with [`ToSupervisor::Hello`]; the supervisor answers
//! [`FromSupervisor::Welcome`] or closes. An *owner* (the server, with its lease) drives prompts and
//! receives events; a *guest* (the CLI without a server) may run commands and move files. A newer
//! lease takes ownership over; an older one is refused.
//!
//! Streams carry bytes of commands and files. A sender may have at most the credit its receiver
//! granted in flight: [`INITIAL_CREDIT_BYTES`] at first, more by `Credit`. So a slow reader stalls
//! its own stream and nothing else.

mod boot;
mod command;
mod file;
mod frame;
mod prompt;
mod reply;
mod status;

pub use boot::{AgentLaunch, Boot, BootStart, Checkout, Restarts};
pub use command::{Command, Exit, Terminal};
pub use file::{FileKind, FileRequest, FileStat};
pub use frame::{Decoder, Frame, FrameError};
pub use prompt::{Author, PromptOrder};
pub use reply::{Fault, FaultCode, Reply};
pub use status::{OutboxEvent, PromptProgress, Status};

use serde::{Deserialize, Serialize};

use crate::{BlobId, TurnId};

/// Raised when a frame changes its meaning. A server adopts supervisors of this and the last version.
pub const VERSION: u32 = 1;

/// What a sender may send on a stream before the first `Credit`.
pub const INITIAL_CREDIT_BYTES: u32 = 256 * 1024;

/// The longest data frame. 64 KiB: Linux's default pipe capacity, so one read fills one frame.
pub const MAX_DATA_BYTES: usize = 64 * 1024;

/// The longest control frame: a prompt of 64,000 characters or an event of 64 KiB, escaped, and room.
pub const MAX_CONTROL_BYTES: usize = 1024 * 1024;

/// A number the dialer gives each request; the reply carries it back.
pub type RequestId = u64;

/// A stream's number, chosen by the dialer, unique on its connection.
pub type StreamId = u32;

/// What the dialer says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum ToSupervisor {
    /// The first frame of a connection.
    Hello {
        /// [`VERSION`] of the dialer.
        version: u32,
        /// What it may do.
        role: Role,
        /// How often an owner wants to hear that the supervisor is there; every 30 seconds when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        heartbeat_millis: Option<u64>,
    },
    /// Get ready for a session. Idempotent: the second time it only answers.
    Boot {
        /// The request's number.
        id: RequestId,
        /// What for.
        boot: Box<Boot>,
    },
    /// Carry out a prompt. The reply means that it is accepted; an id seen before is not run again.
    Prompt {
        /// The request's number.
        id: RequestId,
        /// What to do.
        prompt: Box<PromptOrder>,
    },
    /// Stop the turn in progress: its processes are dead when `TurnEnded` arrives.
    Stop {
        /// The request's number.
        id: RequestId,
        /// The turn meant, so that a late stop cannot hit the next one.
        turn: TurnId,
    },
    /// Answer a question the agent asked.
    Answer {
        /// The request's number.
        id: RequestId,
        /// The agent's request.
        request: String,
        /// The answer.
        answer: String,
    },
    /// What do you know of these prompts?
    Status {
        /// The request's number.
        id: RequestId,
    },
    /// Every event up to this outbox number is stored.
    EventsStored {
        /// The number.
        upto: u64,
    },
    /// Send a blob's bytes on `stream`, then `End`; the reply comes first. Only asked for blobs that an
    /// event named; they are there until `EventsStored` covers that event.
    Blob {
        /// The request's number.
        id: RequestId,
        /// Which.
        blob: BlobId,
        /// Where to.
        stream: StreamId,
    },
    /// Run a command.
    Exec {
        /// The request's number; also names the command until its `Exited`.
        id: RequestId,
        /// What to run.
        command: Box<Command>,
    },
    /// Kill a command and everything it started, or give the reading or writing of a file up; an older
    /// supervisor goes on with a file until the connection ends.
    Kill {
        /// The request's number.
        id: RequestId,
        /// The command, by the number of its `Exec`, or of the `File`.
        exec: RequestId,
    },
    /// A command's terminal has another size. Only to a supervisor whose `Started` said `terminal`.
    Resize {
        /// The request's number.
        id: RequestId,
        /// The command, by the number of its `Exec`.
        exec: RequestId,
        /// The new height.
        rows: u16,
        /// The new width.
        cols: u16,
    },
    /// Do something with a file.
    File {
        /// The request's number.
        id: RequestId,
        /// What.
        request: FileRequest,
    },
    /// The receiver of a stream grants its sender more.
    Credit {
        /// The stream.
        stream: StreamId,
        /// How many more bytes.
        bytes: u32,
    },
    /// No more bytes come on this stream.
    End {
        /// The stream.
        stream: StreamId,
    },
    /// End everything in an orderly way: agent first, then the rest; then pid 1 exits.
    Shutdown {
        /// The request's number.
        id: RequestId,
    },
}

/// What the supervisor says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "say", rename_all = "snake_case")]
pub enum FromSupervisor {
    /// The answer to `Hello`.
    Welcome {
        /// [`VERSION`] of the supervisor.
        version: u32,
        /// How things stand.
        status: Status,
    },
    /// The answer to a request.
    Reply {
        /// The request's number.
        id: RequestId,
        /// How it went.
        result: Result<Reply, Fault>,
    },
    /// Something happened. Sent again after every reconnect until `EventsStored` covers it.
    Event(OutboxEvent),
    /// A command ended; its streams have ended before.
    Exited {
        /// The command, by the number of its `Exec`.
        exec: RequestId,
        /// How.
        exit: Exit,
        /// From start to end.
        millis: u64,
    },
    /// The receiver of a stream grants its sender more.
    Credit {
        /// The stream.
        stream: StreamId,
        /// How many more bytes.
        bytes: u32,
    },
    /// No more bytes come on this stream.
    End {
        /// The stream.
        stream: StreamId,
    },
    /// Sent to the owner as often as its `Hello` asked for, and when another number of detached commands runs.
    Heartbeat {
        /// Whether a turn is in progress.
        busy: bool,
        /// As in [`Status::detached`].
        #[serde(default, skip_serializing_if = "status::is_none")]
        detached: u32,
    },
}

/// What a connection may do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case")]
pub enum Role {
    /// Drives the session; receives events. There is one, the one with the highest lease.
    Owner {
        /// Rises when another server process takes the session.
        lease: u64,
        /// Names the session's sandbox; a supervisor that was booted for another refuses.
        epoch: u64,
        /// The highest outbox number that is stored; the supervisor sends what follows.
        stored: u64,
    },
    /// Runs commands and moves files, nothing else.
    Guest,
}
