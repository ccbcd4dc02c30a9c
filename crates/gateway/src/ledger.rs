//! The interface from the gateway to the rest of Harvest: policies, secrets and accounting. The
//! gateway itself keeps no state about sessions.

use async_trait::async_trait;
use harvest_proto::{
    BranchName, EventBody, RepositoryName, Secret, SessionId, UpstreamName, api::KeySource,
    event::Usage,
};
use tokio::sync::watch;

/// Provides secrets, checks budgets and records usage.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// The value of a secret, for the gateway's own requests; it never goes into a sandbox.
    async fn secret(&self, name: &str) -> Option<Secret<String>>;

    /// Where the value of a secret comes from.
    async fn secret_source(&self, name: &str) -> KeySource;

    /// Checks before every model call whether the session may make it.
    async fn reserve(&self, session: &SessionId) -> Result<(), Refusal>;

    /// Records the tokens of a model call that ended.
    async fn settle(&self, session: &SessionId, usage: Usage);

    /// Stores an event of the gateway.
    async fn log(&self, session: &SessionId, event: EventBody);
}

/// The tools of a session, which its agent calls at the tools door.
#[async_trait]
pub trait Tools: Send + Sync {
    /// The tools as MCP describes them, with `name`, `description` and `inputSchema`.
    fn list(&self) -> Vec<serde_json::Value>;

    /// Calls a tool; `None` when there is none of this name.
    async fn call(&self, name: &str, arguments: serde_json::Value) -> Option<ToolResult>;
}

/// What a tool returns to the agent.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolResult {
    pub text: String,
    /// The same for programs.
    pub structured: Option<serde_json::Value>,
    /// The call failed; the text says why, and what to do.
    pub failed: bool,
}

/// Why a model call is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// Text for the agent and the user.
    pub reason: String,
}

/// What a sandbox may do at its door.
#[derive(Debug, Clone)]
pub struct DoorPolicy {
    pub session: SessionId,
    pub network: ResolvedPolicy,
    /// Receives the model calls that name no upstream. A door whose upstream is `scripted` reaches
    /// no other; every other door reaches all configured ones. A prompt can change it.
    pub upstream: watch::Receiver<UpstreamName>,
    /// Repositories it may fetch from and push to.
    pub repositories: Vec<GitAccess>,
}

/// A network policy with the names that a sandbox may connect to, besides the gateway's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResolvedPolicy {
    None,
    /// These names on ports 80 and 443. `*.example.org` matches every name below it.
    Trusted(Vec<String>),
}

/// A repository behind the git door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GitAccess {
    /// Name of the repository: `http://git.harvest.internal/{owner}/{name}.git` inside.
    pub name: RepositoryName,
    /// URL of the real remote.
    pub url: String,
    /// Whether the remote is the local forge, which is on this machine.
    pub local: bool,
    /// Name of the secret, sent as HTTP basic authentication (user `x-access-token`).
    pub secret: Option<String>,
    /// The branch that the session may create and update, but never delete or force-push; `None` is
    /// read-only.
    pub branch: Option<BranchName>,
}
