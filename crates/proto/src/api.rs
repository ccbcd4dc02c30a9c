//! Bodies of the HTTP API, shared by the server, the CLI and the tests.

use serde::{Deserialize, Serialize};

use crate::{
    PromptId, SandboxId, SessionId, SnapshotId, Timestamp, TurnId,
    bridge::Author,
    event::{SnapshotKind, TurnOutcome, Usage},
};

/// What a session is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SessionState {
    /// Waits for a place on the machine.
    Queued,
    /// Its sandbox is being made ready.
    Starting,
    /// A turn is in progress.
    Running,
    /// Ready; nothing to do.
    Idle,
    /// The agent asked a question.
    NeedsInput,
    /// Kept on disk; a prompt wakes it.
    Paused,
    /// Could not go on by itself; the reason says what to do.
    Failed,
    /// Put away.
    Archived,
}

impl SessionState {
    /// The word users and programs see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Idle => "idle",
            Self::NeedsInput => "needs_input",
            Self::Paused => "paused",
            Self::Failed => "failed",
            Self::Archived => "archived",
        }
    }
}

/// `POST /v1/sessions`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSession {
    /// A registered repository's name, or a git URL.
    pub repository: String,
    /// The first prompt; a session without one waits idle.
    #[serde(default)]
    pub prompt: Option<String>,
    /// The branch to start from; the remote's default when absent.
    #[serde(default)]
    pub base: Option<String>,
    /// `claude`, the default.
    #[serde(default)]
    pub agent: Option<String>,
    /// `scripted`, or a model's name.
    #[serde(default)]
    pub model: Option<String>,
    /// `none` or `trusted`, the default.
    #[serde(default)]
    pub network: Option<String>,
    /// Whose name commits get; the token's user when absent.
    #[serde(default)]
    pub author: Option<Author>,
}

/// A session as it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// The first line of its first prompt.
    pub title: String,
    /// What it is doing.
    pub state: SessionState,
    /// Why it is in this state.
    pub reason: String,
    /// The repository's name.
    pub repository: String,
    /// The branch it works on.
    pub branch: String,
    /// The agent.
    pub agent: String,
    /// The model asked for.
    pub model: Option<String>,
    /// `none` or `trusted`.
    pub network: String,
    /// Who created it.
    pub author: Author,
    /// Its sandbox, while it has one.
    pub sandbox: Option<SandboxId>,
    /// The session's count of sandboxes so far.
    pub epoch: u64,
    /// The newest snapshot.
    pub snapshot: Option<SnapshotId>,
    /// The session and turn it was forked from.
    pub forked_from: Option<SessionId>,
    /// Turns so far.
    pub turns: u32,
    /// Prompts that wait.
    pub queued: u32,
    /// Tokens so far.
    pub usage: Usage,
    /// Its pull request, if there is one.
    pub pull: Option<Pull>,
    /// The newest event's number.
    pub seq: u64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When something last happened in it.
    pub last_activity: Timestamp,
}

/// `POST /v1/sessions/{id}/prompts`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatePrompt {
    /// What to do.
    pub text: String,
    /// Stop the turn in progress and do this next.
    #[serde(default)]
    pub now: bool,
    /// Whose name commits get; the token's user when absent.
    #[serde(default)]
    pub author: Option<Author>,
}

/// `PATCH /v1/sessions/{id}/prompts/{prompt}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MovePrompt {
    /// Its new place in the queue, 1 being the next.
    pub position: u32,
}

/// A prompt as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prompt {
    /// Its id.
    pub id: PromptId,
    /// What it says.
    pub text: String,
    /// Who wrote it.
    pub author: Author,
    /// Where it stands.
    pub status: PromptStatus,
    /// Its place in the queue while it waits, 1 being the next.
    pub position: Option<u32>,
    /// The turn that carries it out, once there is one.
    pub turn: Option<TurnId>,
    /// The event that recorded it.
    pub seq: u64,
    /// When it came.
    pub created_at: Timestamp,
}

/// Where a prompt stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PromptStatus {
    /// It waits.
    Queued,
    /// It was given to the sandbox, or is about to be.
    Dispatched,
    /// Its turn ended well.
    Completed,
    /// Its turn failed.
    Failed,
    /// Its turn was stopped.
    Stopped,
    /// Its sandbox was lost; it is not run again by itself.
    Interrupted,
    /// It was taken out of the queue.
    Cancelled,
}

/// A turn as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Turn {
    /// Its id.
    pub id: TurnId,
    /// Its number in the session.
    pub number: u32,
    /// The prompt it carries out.
    pub prompt: PromptId,
    /// How it ended, once it has.
    pub outcome: Option<TurnOutcome>,
    /// The snapshot of the machine after it.
    pub snapshot: Option<SnapshotId>,
    /// When it began.
    pub started_at: Timestamp,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
}

/// `POST /v1/sessions/{id}/fork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkSession {
    /// The turn to go on from; the newest when absent.
    #[serde(default)]
    pub turn: Option<u32>,
    /// The fork's first prompt.
    #[serde(default)]
    pub prompt: Option<String>,
}

/// `POST /v1/sessions/{id}/exec`. The answer is JSON lines of [`ExecLine`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables on top of the image's.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Working folder; the primary checkout when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// `harvest`, the default, or `root`.
    #[serde(default)]
    pub user: Option<String>,
    /// Killed after this many milliseconds; 30 minutes when absent.
    #[serde(default)]
    pub timeout_millis: Option<u64>,
    /// What the command reads, base64; nothing when absent.
    #[serde(default)]
    pub stdin: Option<String>,
}

/// One line of an exec's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ExecLine {
    /// Bytes of stdout.
    Stdout {
        /// Base64.
        data: String,
    },
    /// Bytes of stderr.
    Stderr {
        /// Base64.
        data: String,
    },
    /// The command ended; nothing follows.
    Exited {
        /// How.
        exit: crate::bridge::Exit,
        /// From start to end.
        millis: u64,
    },
    /// The command could not be run, or we lost sight of it; nothing follows.
    Failed {
        /// What happened.
        code: String,
        /// In words.
        message: String,
    },
}

/// `POST /v1/repositories`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AddRepository {
    /// Where it is: an http or https URL.
    pub url: String,
    /// What to call it; the URL's last part when absent.
    #[serde(default)]
    pub name: Option<String>,
    /// The branch work starts from; the remote's default when absent.
    #[serde(default)]
    pub base: Option<String>,
    /// The secret that opens it: a token for HTTP basic authentication.
    #[serde(default)]
    pub secret: Option<String>,
    /// The image sandboxes start from; the default one when absent.
    #[serde(default)]
    pub image: Option<String>,
}

/// A repository as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Repository {
    /// What it is called.
    pub name: String,
    /// Where it is.
    pub url: String,
    /// The branch work starts from.
    pub base: Option<String>,
    /// The name of the secret that opens it.
    pub secret: Option<String>,
    /// The image sandboxes start from.
    pub image: String,
    /// Its newest good build.
    pub build: Option<Build>,
    /// When it was added.
    pub created_at: Timestamp,
}

/// A repository's prebuilt state.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Build {
    /// The snapshot sessions start from.
    pub snapshot: SnapshotId,
    /// The commit it holds.
    pub commit: String,
    /// How the check went in it, if the repository declares one.
    pub check: Option<Evidence>,
    /// How long it took.
    pub millis: u64,
    /// When it was made.
    pub built_at: Timestamp,
}

/// One line of the answer to `POST /v1/repositories/{name}/build`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum BuildLine {
    /// Something a person may want to see meanwhile.
    Progress {
        /// In words.
        message: String,
    },
    /// Done; nothing follows.
    Built {
        /// What sessions start from now.
        build: Build,
    },
    /// It failed and the older build stays; nothing follows.
    Failed {
        /// A word that programs may compare.
        code: String,
        /// What happened, with the last lines the failing step printed.
        message: String,
    },
}

/// A pull request as we recorded it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Pull {
    /// Its number at the forge.
    pub number: u64,
    /// Where to look at it.
    pub url: String,
    /// What it is called.
    pub title: String,
    /// What it says.
    pub body: String,
    /// `open`, `merged` or `closed`.
    pub state: String,
    /// The branch it proposes.
    pub branch: String,
    /// The branch it is for.
    pub base: String,
    /// The commit it proposes.
    pub commit: String,
    /// What the platform itself saw.
    pub evidence: Option<Evidence>,
}

/// What the platform saw when it ran the repository's declared check on a commit, in a sandbox the
/// agent never touched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Evidence {
    /// The commit checked out.
    pub commit: String,
    /// What ran.
    pub check: String,
    /// Whether it passed.
    pub passed: bool,
    /// How it ended.
    pub exit: crate::bridge::Exit,
    /// How long it took.
    pub millis: u64,
    /// The last lines it printed.
    pub tail: String,
    /// When.
    // Not `at`: as an event it lies flat beside the event's own `at`.
    #[serde(rename = "checked_at")]
    pub at: Timestamp,
}

/// A snapshot as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Why it was taken.
    pub kind: SnapshotKind,
    /// The turn it follows.
    pub turn: Option<u32>,
    /// When.
    pub created_at: Timestamp,
}

/// `PUT /v1/secrets/{name}`. Written, used by the gateway, never read back.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetSecret {
    /// The value.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub value: crate::Secret<String>,
}

/// A list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Page<T> {
    /// What there is.
    pub items: Vec<T>,
    /// Give this back as `cursor` for more; absent at the end.
    pub next_cursor: Option<String>,
}

/// What went wrong: RFC 9457, `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `about:blank`: the code says it all.
    #[serde(rename = "type")]
    pub kind: String,
    /// The status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What failed and why.
    pub detail: String,
    /// A word that programs may compare; an open set.
    pub code: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Look for this in the log.
    pub request_id: String,
}
