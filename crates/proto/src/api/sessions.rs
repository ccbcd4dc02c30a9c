//! Sessions: what a session is, and how one is asked for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{SandboxId, SessionId, SnapshotId, Timestamp, api::Pull, bridge::Author, event::Usage};

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
    /// A registered repository's name, or a git URL: short for one entry of `repositories`.
    #[serde(default)]
    pub repository: Option<String>,
    /// The repositories, side by side in `/workspace`; the agent works in the first. Without any, the
    /// session begins in an empty folder.
    #[serde(default)]
    pub repositories: Vec<UseRepository>,
    /// The first prompt; a session without one waits idle.
    #[serde(default)]
    pub prompt: Option<String>,
    /// The branch `repository` starts from; its own default when absent.
    #[serde(default)]
    pub base: Option<String>,
    /// `claude`, the default, or `scripted`.
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
    /// Variables for hooks, agent and commands. Never a secret: whatever runs inside reads them.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// A snapshot to start from; checkouts it holds stay as they are.
    #[serde(default)]
    pub from: Option<SnapshotId>,
    /// A name of your own for the session, which no other session has.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 200))]
    pub key: Option<String>,
}

/// One repository of a session to be: its name or its URL, not both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UseRepository {
    /// A registered repository's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A git URL; one nobody registered is registered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// The branch to start from; the repository's own default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

/// A repository of a session as it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionRepository {
    /// Its name; its checkout is `/workspace/{name}`.
    pub name: String,
    /// Where it is.
    pub url: String,
    /// The branch work started from, once known.
    pub base: Option<String>,
    /// The branch the session works on.
    pub branch: String,
    /// The session's pull request in it, if there is one.
    pub pull: Option<Pull>,
}

/// A session as it stands.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Session {
    /// Its id.
    pub id: SessionId,
    /// The name its creator gave it, if any.
    #[serde(default)]
    pub key: Option<String>,
    /// The first line of its first prompt.
    pub title: String,
    /// What it is doing.
    pub state: SessionState,
    /// Why it is in this state.
    pub reason: String,
    /// While it waits for a place on the machine: as which number in line, 1 being the next.
    #[serde(default)]
    pub position: Option<u32>,
    /// The first repository's name; absent when it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub repository: String,
    /// Its repositories, the one the agent works in first.
    #[serde(default)]
    pub repositories: Vec<SessionRepository>,
    /// The branch it works on, in each of them.
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
    /// The same, by the name it has everywhere else in the API.
    #[serde(default)]
    pub snapshot_id: Option<SnapshotId>,
    /// The session it was forked from.
    pub forked_from: Option<SessionId>,
    /// The turn of it, if it was the end of one.
    #[serde(default)]
    pub forked_turn: Option<u32>,
    /// The names of its own variables; their values are not shown.
    #[serde(default)]
    pub env: Vec<String>,
    /// Turns so far.
    pub turns: u32,
    /// Prompts that wait.
    pub queued: u32,
    /// Tokens so far.
    pub usage: Usage,
    /// Its first pull request, if there is one.
    pub pull: Option<Pull>,
    /// That one's number.
    #[serde(default)]
    pub pr_number: Option<u64>,
    /// Where to look at it.
    #[serde(default)]
    pub pr_url: Option<String>,
    /// The newest event's number.
    pub seq: u64,
    /// When it was created.
    pub created_at: Timestamp,
    /// When something last happened in it.
    pub last_activity: Timestamp,
}

/// `POST /v1/sessions/{id}/fork`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkSession {
    /// The turn to go on from, 0 being what the session began as; where it stands now when absent.
    #[serde(default)]
    pub turn: Option<u32>,
    /// How many forks to make, 1 to 16; as many as there are `prompts`, else one, when absent.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 16))]
    pub count: Option<u32>,
    /// The first prompt of every fork.
    #[serde(default)]
    pub prompt: Option<String>,
    /// The first prompt of each fork, in place of `prompt`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 16))]
    pub prompts: Vec<String>,
}

/// `POST /v1/sessions/{id}/restore`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoreSession {
    /// The turn to go back to.
    pub turn: u32,
}
