//! Sessions: creating, forking, restoring, and the session itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    AgentName, BranchName, Effort, ModelRef, Money, NetworkPolicy, PromptText, RepositoryName,
    RepositoryRef, SandboxId, Secret, SessionId, SnapshotId, StateReason, Timestamp,
    api::{CreateAttachment, PullRequest, PullRequestMode},
    bridge::Author,
    event::{CheckoutSync, McpServer, Usage},
};

/// State of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SessionState {
    /// Waits for a free sandbox slot.
    Queued,
    /// The sandbox is starting.
    Starting,
    /// A turn is in progress.
    Running,
    /// Ready for a prompt.
    Idle,
    /// The agent asked a question and waits for the answer.
    NeedsInput,
    /// Saved as a snapshot without a sandbox; the next prompt resumes it.
    Paused,
    /// Needs a person; the reason says what to do.
    Failed,
    /// Archived: takes no prompts.
    Archived,
}

impl SessionState {
    /// All states, in lifecycle order.
    pub const ALL: [Self; 8] = [
        Self::Queued,
        Self::Starting,
        Self::Running,
        Self::NeedsInput,
        Self::Idle,
        Self::Paused,
        Self::Failed,
        Self::Archived,
    ];

    /// The state's name in the API.
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

/// What the agent of a session said of itself when it was last started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AgentInfo {
    /// Version of the agent, if it says so.
    pub version: Option<String>,
    /// Model it requests, if it says so.
    pub model: Option<String>,
    /// Its MCP servers and their states; empty if it does not say.
    pub mcp: Vec<McpServer>,
}

/// `POST /v1/sessions`: creates a session.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSession {
    /// A registered repository, `OWNER/NAME` or `NAME` if only one has it, or the address of one:
    /// see `AddRepository`. Short for one entry of `repositories`.
    pub repository: Option<String>,
    /// The repositories, each checked out below `/workspace`; the agent works in the first one.
    /// Without repositories the session starts in an empty folder.
    #[serde(default)]
    pub repositories: Vec<UseRepository>,
    /// The first prompt; without one the session is idle.
    pub prompt: Option<PromptText>,
    /// Images for the first prompt: at most 8, and 16 MB in all.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 8))]
    pub attachments: Vec<CreateAttachment>,
    /// Branch that `repository` starts from; the repository's default when absent.
    pub base: Option<BranchName>,
    /// The agent: `claude` (default), `opencode`, `codex`, `scripted`, or one that the server's
    /// configuration adds.
    pub agent: Option<AgentName>,
    /// The model: `NAME`, `anthropic/NAME` or `scripted`; the agent's default when absent.
    pub model: Option<ModelRef>,
    /// How much the model thinks: `low`, `medium` or `high`; the agent's default when absent.
    pub effort: Option<Effort>,
    /// Network policy: `none`, `trusted` (default) or `full`.
    pub network: Option<NetworkPolicy>,
    /// Names that the session may connect to besides: `NAME`, or `NAME:PORT,PORT`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 200))]
    pub allow: Vec<String>,
    /// What the model calls of the session, and of those that its agent creates, may cost:
    /// millionths of a US dollar, at list prices; no limit when absent.
    pub budget_micros: Option<Money>,
    /// Author of the commits; the token's user when absent.
    pub author: Option<Author>,
    /// Environment variables for hooks, agent and commands. Not for secrets: every process in the
    /// sandbox can read them.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Secrets of the session by name, such as `GITHUB_TOKEN`. Only the gateway uses them. They are
    /// deleted with the session.
    #[serde(default, skip_serializing)]
    pub secrets: BTreeMap<String, Secret<String>>,
    /// Take away the agent's tool for asking the user.
    #[serde(default)]
    pub no_questions: bool,
    /// The pull request that the session is to have: `none`, `draft` or `ready`. With a draft or a
    /// ready one, work that the agent left behind is committed and pushed at the end of each turn.
    /// When absent, what the agent pushes gets the server's setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pr_mode: Option<PullRequestMode>,
    /// Snapshot to start from; checkouts it contains stay as they are.
    pub from: Option<SnapshotId>,
    /// A key of your choice for the session, valid wherever its id is in requests of the same user;
    /// unique among the sessions that this user created.
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 200))]
    pub key: Option<String>,
}

/// A repository of a new session, by name or by URL but not both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UseRepository {
    /// A registered repository: `OWNER/NAME`, or `NAME` if only one has it. An `OWNER/NAME` that is
    /// not registered is the one at github.com.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<RepositoryRef>,
    /// An address as in `AddRepository`; registered first if it is not yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Branch to start from; the repository's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<BranchName>,
}

/// A repository of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionRepository {
    /// Name of the repository: `OWNER/NAME`.
    pub name: RepositoryName,
    /// Path of its checkout in the sandbox: `/workspace/NAME`, or `/workspace/OWNER-NAME` when an
    /// earlier repository of the session has the same name.
    pub folder: String,
    /// URL of the git remote.
    pub url: String,
    /// Branch the session started from, once known.
    pub base: Option<BranchName>,
    /// Branch the session works on.
    pub branch: BranchName,
    /// The session's pull request in this repository.
    pub pr: Option<PullRequest>,
}

/// A session after a sync.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SyncedSession {
    /// The session; it needs input with reason `conflict` when a checkout has a conflict.
    pub session: Session,
    /// Whether every checkout follows its base now.
    pub synced: bool,
    /// The checkouts, the primary one first.
    pub checkouts: Vec<CheckoutSync>,
}

/// A session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Session {
    /// Id of the session.
    pub id: SessionId,
    /// The key its creator chose, if any.
    pub key: Option<String>,
    /// First line of the first prompt.
    pub title: String,
    /// What the session is doing.
    pub state: SessionState,
    /// Reason for the state.
    pub reason: StateReason,
    /// Position in the queue for a sandbox slot while it waits; 1 is next.
    pub position: Option<u32>,
    /// Name of the first repository, `OWNER/NAME`; absent without repositories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<RepositoryName>,
    /// Owner of the first repository.
    pub repo_owner: Option<String>,
    /// Name of the first repository without its owner.
    pub repo_name: Option<String>,
    /// All repositories; the agent works in the first one.
    pub repositories: Vec<SessionRepository>,
    /// Branch the session works on, the same in every repository.
    pub branch: BranchName,
    /// The agent.
    pub agent: AgentName,
    /// The requested model; null for the agent's default.
    pub model: Option<ModelRef>,
    /// How much the model thinks; null for the agent's default.
    pub effort: Option<Effort>,
    /// What the agent said of itself; null before it was ready.
    pub agent_info: Option<AgentInfo>,
    /// Network policy: `none`, `trusted` or `full`.
    pub network: NetworkPolicy,
    /// Provider that runs the sandbox: `local`.
    pub provider: String,
    /// The user who created the session.
    pub author: Author,
    /// The session's sandbox, while it has one.
    pub sandbox: Option<SandboxId>,
    /// Number of sandboxes the session has had.
    pub epoch: u64,
    /// The newest snapshot.
    pub snapshot_id: Option<SnapshotId>,
    /// The session this one was forked from.
    pub forked_from: Option<SessionId>,
    /// The turn of that session it was forked at, if it was the end of a turn.
    pub forked_turn: Option<u32>,
    /// Names of the session's environment variables; the values are not shown.
    pub env: Vec<String>,
    /// Number of turns.
    pub turns: u32,
    /// Number of queued prompts.
    pub queued: u32,
    /// Tokens used by the session.
    pub usage: Usage,
    /// What the session may spend, with those that its agent created, in millionths of a US dollar;
    /// null for no limit.
    pub budget_micros: Option<Money>,
    /// What they have spent, at list prices.
    pub spent_micros: Money,
    /// The pull request that the session is to have: `none`, `draft` or `ready`; the server's
    /// setting when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pr_mode: Option<PullRequestMode>,
    /// Number of the session's first pull request.
    pub pr_number: Option<u64>,
    /// Web page of that pull request.
    pub pr_url: Option<String>,
    /// Number of the newest event.
    pub seq: u64,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the last activity.
    pub last_activity: Timestamp,
}

/// `POST /v1/sessions/{id}/fork`: creates sessions that continue from a turn of this one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ForkSession {
    /// The turn to continue from; 0 is the session's start; the current state when absent.
    pub turn: Option<u32>,
    /// Number of forks, 1 to 16; when absent, one per entry of `prompts`, or one.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 16))]
    pub count: Option<u32>,
    /// First prompt of every fork.
    pub prompt: Option<PromptText>,
    /// First prompt of each fork, instead of `prompt`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 16))]
    pub prompts: Vec<PromptText>,
    /// Author of the commits; the token's user when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub author: Option<Author>,
}

/// `POST /v1/sessions/{id}/restore`: resets the session to an earlier turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RestoreSession {
    /// The turn to restore; 0 is the session's start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<u32>,
    /// A snapshot of the session to restore, instead of a turn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<SnapshotId>,
}
