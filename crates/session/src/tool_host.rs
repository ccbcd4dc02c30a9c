//! What the tools of a session's agent need of the sessions. A trait, because the driver, which
//! opens the door to the tools, is below the sessions.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_proto::{EventBody, PromptText, RepositoryRef, SessionId, api::Session};

use crate::{bridge::Bridge, error::SessionError};

/// Returns the sessions until they are closed. The doors must not keep them open.
pub(crate) type FindToolHost = Box<dyn Fn() -> Option<Arc<dyn ToolHost>> + Send + Sync>;

/// A session that an agent creates.
#[derive(Debug, Clone)]
pub(crate) struct ChildSpec {
    pub(crate) prompt: PromptText,
    /// Unique among the children of one session.
    pub(crate) key: String,
    /// The parent's first repository when absent.
    pub(crate) repository: Option<RepositoryRef>,
}

#[async_trait]
pub(crate) trait ToolHost: Send + Sync {
    /// The bridge to the session's running sandbox.
    async fn bridge(&self, session: &SessionId) -> Result<Bridge, SessionError>;

    /// Creates a session for a part of the work of `parent`, or returns the one that was created
    /// with this key.
    async fn spawn_child(
        &self,
        parent: &SessionId,
        child: ChildSpec,
    ) -> Result<Session, SessionError>;

    /// A session that `session` may see: itself, or one with the same root.
    async fn relative(
        &self,
        session: &SessionId,
        wanted: &SessionId,
    ) -> Result<Session, SessionError>;

    /// Records that the agent cannot go on without a person; the session needs input when its turn
    /// has ended.
    async fn report_blocked(
        &self,
        session: &SessionId,
        report: EventBody,
    ) -> Result<(), SessionError>;
}
