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

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    PromptId, SessionId, Timestamp, TurnId,
    event::{BootPhase, EventBody},
};

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
    /// Run a command.
    Exec {
        /// The request's number; also names the command until its `Exited`.
        id: RequestId,
        /// What to run.
        command: Box<Command>,
    },
    /// Kill a command and everything it started.
    Kill {
        /// The request's number.
        id: RequestId,
        /// The command, by the number of its `Exec`.
        exec: RequestId,
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
    /// Sent to the owner every 30 seconds.
    Heartbeat {
        /// Whether a turn is in progress.
        busy: bool,
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

/// How things stand inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The boot phase reached, once `Boot` has arrived.
    pub phase: Option<BootPhase>,
    /// Whether that phase failed.
    pub failed: bool,
    /// Prompts seen in this sandbox, oldest first.
    pub prompts: Vec<(PromptId, PromptProgress)>,
    /// The highest outbox number given out.
    pub last_event: u64,
}

/// How far a prompt has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptProgress {
    /// Its turn is in progress.
    Running,
    /// Its turn has ended; `TurnEnded` is in the outbox or stored.
    Ended,
}

/// An event on its way out, with the supervisor's own number: 1, 2, 3… without a gap per epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxEvent {
    /// The outbox number.
    pub number: u64,
    /// When it happened, by the sandbox's clock.
    pub at: Timestamp,
    /// The turn it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnId>,
    /// What happened.
    pub body: EventBody,
}

/// What a request gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done, or accepted.
    Done,
    /// How things stand.
    Status(Status),
    /// The command runs.
    Started {
        /// Its pid inside.
        pid: u32,
    },
    /// What a path is.
    Stat(FileStat),
    /// What a folder holds, by name.
    List {
        /// The entries.
        entries: Vec<FileStat>,
        /// Whether there are more after the last of them.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        more: bool,
    },
    /// Where a symbolic link points.
    Link {
        /// As it is.
        target: String,
    },
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// A word that programs may compare.
    pub code: FaultCode,
    /// In words.
    pub message: String,
}

impl Fault {
    /// A fault with its words.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// The kinds of [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultCode {
    /// No such file, command or turn.
    NotFound,
    /// The file is there but may not be used so.
    Denied,
    /// The command's file is not a program.
    NotExecutable,
    /// Something else is in progress.
    Busy,
    /// `Boot` has not come, or has failed.
    NotReady,
    /// This connection's role does not allow it.
    NotOwner,
    /// The request makes no sense.
    Invalid,
    /// The machine said no: disk full, too many processes…
    System,
}

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; looked up in the PATH of `env`.
    pub argv: Vec<String>,
    /// Variables on top of the image's.
    pub env: BTreeMap<String, String>,
    /// Working folder; the image's when absent.
    pub cwd: Option<String>,
    /// `harvest` (uid 10001), `root`, or a number; the image's user when absent.
    pub user: Option<String>,
    /// Killed after this.
    pub timeout_millis: Option<u64>,
    /// Carries stdin when given; else the command reads from an empty one.
    pub stdin: Option<StreamId>,
    /// Carries stdout.
    pub stdout: StreamId,
    /// Carries stderr.
    pub stderr: StreamId,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", content = "value", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// The memory limit.
    Oom,
    /// The time limit.
    Timeout,
    /// Somebody asked for it.
    Killed,
}

/// What to do with a file. Paths are absolute, inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum FileRequest {
    /// Send the file's bytes on `stream`, then `End`. The reply comes first, so that a dialer may wait
    /// for it; when reading fails midway the connection closes, since an `End` would look like the file's.
    Read {
        /// Which.
        path: String,
        /// Where to.
        stream: StreamId,
    },
    /// Write what comes on `stream` until its `End`; the reply comes when it is on disk under its name.
    Write {
        /// Which.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Owner, as in [`Command::user`].
        user: Option<String>,
        /// Where from.
        stream: StreamId,
    },
    /// What is it?
    Stat {
        /// Which.
        path: String,
    },
    /// What is in it?
    List {
        /// Which.
        path: String,
        /// Only what comes after this name, and no more than fits a reply; all of it or a fault when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<String>,
    },
    /// Make a folder. One that is there already is left as it is.
    Mkdir {
        /// Which.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Owner, as in [`Command::user`].
        user: Option<String>,
    },
    /// Make a symbolic link, in the place of a file or link of that name.
    Symlink {
        /// Which.
        path: String,
        /// What it points to, as it is.
        target: String,
        /// Owner, as in [`Command::user`].
        user: Option<String>,
    },
    /// Where does a symbolic link point?
    ReadLink {
        /// Which.
        path: String,
    },
    /// Remove a file or a link.
    Remove {
        /// Which.
        path: String,
    },
    /// What a later version asks for; answered with a fault.
    #[serde(other)]
    Unknown,
}

/// What a path is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileStat {
    /// The last part of the path.
    pub name: String,
    /// `file`, `folder`, `link` or `other`.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner inside.
    pub uid: u32,
    /// When it was last written.
    pub modified: Timestamp,
}

/// What kind of thing a path is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A socket, a pipe, a device.
    Other,
}

/// What a sandbox gets ready for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// The session.
    pub session: SessionId,
    /// The session's count of sandboxes.
    pub epoch: u64,
    /// What the disk holds already.
    pub start: BootStart,
    /// The checkouts; the first is the primary one and the agent's working folder.
    pub repositories: Vec<Checkout>,
    /// The agent; a repository build has none.
    pub agent: Option<AgentLaunch>,
    /// Variables for hooks, agent and commands. Never a secret.
    pub env: BTreeMap<String, String>,
}

/// What the disk of a booting sandbox holds already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootStart {
    /// A base image: clone, `setup.sh`, then `start.sh`.
    Fresh,
    /// A repository image: fetch, start the session's branch from the newest base, `start.sh`.
    Image,
    /// An earlier state of this session or of the one it was forked from: the checkout stays as it
    /// is, `start.sh`.
    Restore,
    /// A repository build: clone or fetch, `setup.sh`. The builder then runs the check once.
    Build,
}

/// One repository inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkout {
    /// Lives in `/workspace/{name}`.
    pub name: String,
    /// The remote as the sandbox sees it: a URL of the door, without a credential.
    pub remote: String,
    /// The branch work starts from; the remote's default when absent.
    pub base: Option<String>,
    /// The branch the session works on; a build stays on the base.
    pub branch: Option<String>,
    /// Clone it when a restored disk does not hold it. Otherwise its absence is the work of a turn.
    #[serde(default)]
    pub clone_missing: bool,
}

/// Which agent, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentLaunch {
    /// `claude`.
    pub name: String,
    /// The agent's own id of the conversation, chosen by us (a UUID).
    pub conversation: String,
    /// Whether the disk holds that conversation already.
    pub resume: bool,
    /// The model to ask for; the agent's default when absent.
    pub model: Option<String>,
}

/// A prompt to carry out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptOrder {
    /// The prompt.
    pub prompt: PromptId,
    /// The turn that carries it out.
    pub turn: TurnId,
    /// The turn's number in its session.
    pub number: u32,
    /// What it says.
    pub text: String,
    /// Whose name commits get: `"{name} (Harvest)" <email>`.
    pub author: Author,
}

/// The person behind a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Author {
    /// Their name.
    pub name: String,
    /// Their e-mail address.
    pub email: String,
}

/// One frame, either way.
#[derive(Debug, Clone, PartialEq)]
pub enum Frame<Message> {
    /// A message.
    Control(Message),
    /// Bytes of a stream.
    Data {
        /// Which.
        stream: StreamId,
        /// At most [`MAX_DATA_BYTES`].
        bytes: Vec<u8>,
    },
}

/// Why bytes are not frames. The connection is of no use afterwards.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// A length beyond the limits: garbage, or not our protocol.
    #[error("a bridge frame of {length} bytes is longer than any we send")]
    TooLong {
        /// The length it gave.
        length: usize,
    },
    /// A kind we do not know, or a frame too short for its kind.
    #[error("a bridge frame has the unknown kind {kind}")]
    Kind {
        /// The byte.
        kind: u8,
    },
    /// A message we do not know.
    #[error("a bridge message cannot be read")]
    Message(#[from] serde_json::Error),
}

impl<Message: Serialize> Frame<Message> {
    /// The frame's bytes.
    ///
    /// # Panics
    /// When a data frame is longer than [`MAX_DATA_BYTES`], which is a mistake of the caller.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let (kind, head, body) = match self {
            Self::Control(message) => {
                (0, Vec::new(), serde_json::to_vec(message).expect("messages hold only maps with text keys"))
            }
            Self::Data { stream, bytes } => {
                assert!(bytes.len() <= MAX_DATA_BYTES, "a data frame is cut by its sender");
                (1, stream.to_be_bytes().to_vec(), bytes.clone())
            }
        };
        let length = u32::try_from(1 + head.len() + body.len()).expect("frames are far below 4 GiB");
        [&length.to_be_bytes()[..], &[kind], &head, &body].concat()
    }
}

/// Turns bytes into frames, whatever pieces they arrive in.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
}

impl Decoder {
    /// Adds bytes as they came.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame, if it has arrived.
    ///
    /// # Errors
    /// When the bytes are not ours.
    pub fn take<Message: DeserializeOwned>(&mut self) -> Result<Option<Frame<Message>>, FrameError> {
        let Some(head) = self.buffer.first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_be_bytes(*head) as usize;
        if length > MAX_CONTROL_BYTES + 5 {
            return Err(FrameError::TooLong { length });
        }
        let Some(body) = self.buffer.get(4..4 + length) else { return Ok(None) };
        let frame = match body.split_first() {
            Some((0, message)) => Frame::Control(serde_json::from_slice(message)?),
            Some((1, data)) if data.len() >= 4 => Frame::Data {
                stream: u32::from_be_bytes([data[0], data[1], data[2], data[3]]),
                bytes: data[4..].to_vec(),
            },
            other => return Err(FrameError::Kind { kind: other.map_or(255, |(kind, _)| *kind) }),
        };
        self.buffer.drain(..4 + length);
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_length_nobody_sends_is_refused_before_it_is_waited_for() {
        let mut decoder = Decoder::default();
        decoder.push(&[0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(decoder.take::<ToSupervisor>(), Err(FrameError::TooLong { .. })));
    }

    #[test]
    fn a_file_request_of_a_later_version_is_understood_as_such() {
        let text = r#"{"say":"file","id":7,"request":{"do":"chown_tree","path":"/x"}}"#;
        let message: ToSupervisor = serde_json::from_str(text).unwrap();
        assert_eq!(message, ToSupervisor::File { id: 7, request: FileRequest::Unknown });
    }

    #[test]
    fn an_unknown_message_is_an_error_not_a_panic() {
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0, 0, 3, 0, b'{', b'}']);
        assert!(matches!(decoder.take::<ToSupervisor>(), Err(FrameError::Message(_))));
    }

    fn any_frame() -> impl Strategy<Value = Frame<ToSupervisor>> {
        prop_oneof![
            (any::<u32>(), any::<u32>())
                .prop_map(|(stream, bytes)| Frame::Control(ToSupervisor::Credit { stream, bytes })),
            (any::<u64>(), ".*").prop_map(|(id, path)| Frame::Control(ToSupervisor::File {
                id,
                request: FileRequest::Stat { path }
            })),
            (any::<u32>(), proptest::collection::vec(any::<u8>(), 0..300))
                .prop_map(|(stream, bytes)| Frame::Data { stream, bytes }),
        ]
    }

    proptest! {
        #[test]
        fn frames_survive_being_cut_anywhere(
            frames in proptest::collection::vec(any_frame(), 0..8),
            cut in 1usize..64,
        ) {
            let bytes: Vec<u8> = frames.iter().flat_map(Frame::encode).collect();
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.push(piece);
                while let Some(frame) = decoder.take::<ToSupervisor>().unwrap() {
                    seen.push(frame);
                }
            }
            prop_assert_eq!(seen, frames);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            decoder.push(&bytes);
            while let Ok(Some(_)) = decoder.take::<FromSupervisor>() {}
        }
    }
}
