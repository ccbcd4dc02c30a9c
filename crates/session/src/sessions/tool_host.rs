//! The sessions as the tools of agents use them.

use std::sync::Arc;

use async_trait::async_trait;
use harvest_proto::{EventBody, SessionId, api::Session};
use harvest_store::Write;

use super::{
    Sessions,
    sandbox::{not_ready, ready_bridge},
};
use crate::{
    bridge::Bridge,
    decide::Input,
    error::SessionError,
    tool_host::{ChildSpec, ToolHost},
    wall_clock::now,
};

impl Sessions {
    /// Lets the tools reach these sessions for as long as another handle exists.
    pub(super) fn serve_tools(&self) {
        let shared = Arc::downgrade(&self.shared);
        let drivers = Arc::downgrade(&self.drivers);
        let metrics = Arc::downgrade(&self.metrics);
        let stop = Arc::downgrade(&self._stop);
        let find = move || -> Option<Arc<dyn ToolHost>> {
            Some(Arc::new(Self {
                shared: shared.upgrade()?,
                drivers: drivers.upgrade()?,
                metrics: metrics.upgrade()?,
                key: None,
                _stop: stop.upgrade()?,
            }))
        };
        let _only_once = self.shared.tool_host.set(Box::new(find));
    }
}

#[async_trait]
impl ToolHost for Sessions {
    async fn bridge(&self, session: &SessionId) -> Result<Bridge, SessionError> {
        let handle = self.handle(session).await?;
        ready_bridge(&handle).await.ok_or_else(|| not_ready(session))
    }

    async fn spawn_child(
        &self,
        parent: &SessionId,
        child: ChildSpec,
    ) -> Result<Session, SessionError> {
        self.spawn(parent, child).await
    }

    async fn relative(
        &self,
        session: &SessionId,
        wanted: &SessionId,
    ) -> Result<Session, SessionError> {
        if session != wanted && self.root_of(session).await? != self.root_of(wanted).await? {
            return Err(SessionError::missing(format!("session {wanted} among those you created")));
        }
        self.get(wanted).await
    }

    async fn report_blocked(
        &self,
        session: &SessionId,
        report: EventBody,
    ) -> Result<(), SessionError> {
        let handle = self.handle(session).await?;
        let event = Write::EventInTurn { at: now(), body: Box::new(report) };
        handle.apply_with(Input::Blocked, vec![event]).await
    }
}
