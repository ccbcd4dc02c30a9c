//! What the tools of a session's agent need of the sessions. A trait, because the driver, which
//! opens the door to the tools, is below the sessions.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_proto::{EventBody, SessionId};

use crate::{bridge::Bridge, error::SessionError};

/// Returns the sessions until they are closed. The doors must not keep them open.
pub(crate) type FindToolHost = Box<dyn Fn() -> Option<Arc<dyn ToolHost>> + Send + Sync>;

#[async_trait]
pub(crate) trait ToolHost: Send + Sync {
    /// The bridge to the session's running sandbox.
    async fn bridge(&self, session: &SessionId) -> Result<Bridge, SessionError>;

    /// Records that the agent cannot go on without a person; the session needs input when its turn
    /// has ended.
    async fn report_blocked(
        &self,
        session: &SessionId,
        report: EventBody,
    ) -> Result<(), SessionError>;
}
