//! The warm pool: sandboxes that wait for a session.

use serde::{Deserialize, Serialize};

use crate::{AgentName, ModelRef, RepositoryName, SandboxId, Timestamp, text::word_enum};

/// `POST /v1/warm`: starts a sandbox while the user types a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WarmRepository {
    /// The repository of the session that will follow.
    pub repository: crate::RepositoryRef,
    /// Its agent; with no `model` either, those of the repository's newest session.
    pub agent: Option<AgentName>,
    /// Its model; the agent's default when absent.
    pub model: Option<ModelRef>,
}

/// The sandbox that the user's next session on the repository takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WarmingSandbox {
    /// Id of the sandbox.
    pub sandbox_id: SandboxId,
    /// `warming`.
    pub status: PoolStatus,
}

/// A sandbox of the warm pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PoolSandbox {
    /// Id of the sandbox.
    pub sandbox_id: SandboxId,
    /// Its repository.
    pub repository: RepositoryName,
    /// The agent that has started in it.
    pub agent: AgentName,
    /// Its status.
    pub status: PoolStatus,
    /// When its start began.
    pub created_at: Timestamp,
}

word_enum! {
    /// Status of a sandbox in the warm pool.
    PoolStatus, "status" {
        /// Its agent starts.
        Warming = "warming",
        /// A session can take it.
        Ready = "ready",
        /// It failed and is being removed.
        Failed = "failed",
    }
}
