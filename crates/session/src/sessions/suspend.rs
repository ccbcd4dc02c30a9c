//! Shutdown of the server: every sandbox is saved, and the next server runs the queued prompts.

use std::time::Duration;

use futures_util::StreamExt;
use harvest_proto::SessionId;
use harvest_store::SessionRecord;

use super::Sessions;
use crate::{decide::Input, error::SessionError, error_chain::error_chain};

// Saves mostly wait for the one disk.
const CONCURRENT_SAVES: usize = 8;

impl Sessions {
    /// Saves every sandbox and starts no more. One that cannot be saved within `timeout` keeps
    /// running, and the next server adopts it.
    pub async fn suspend_all(&self, timeout: Duration) {
        self.stop_admitting();
        let running = match self.running().await {
            Ok(running) => running,
            Err(error) => {
                return tracing::error!(
                    error = error_chain(&error),
                    "cannot list sessions; sandboxes keep running"
                );
            }
        };
        let suspends = running.into_iter().map(|session| async move {
            match tokio::time::timeout(timeout, self.suspend(&session)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    let error = error_chain(&error);
                    tracing::warn!(%session, error, "cannot suspend a session; its sandbox keeps running");
                }
                Err(_) => {
                    tracing::warn!(%session, "suspending a session timed out; its sandbox keeps running")
                }
            }
        });
        futures_util::stream::iter(suspends)
            .buffer_unordered(CONCURRENT_SAVES)
            .collect::<()>()
            .await;
    }

    async fn suspend(&self, session: &SessionId) -> Result<(), SessionError> {
        let handle = self.apply(session, Input::Suspend).await?;
        self.wait_until_stopped(session, &handle).await.map(drop)
    }

    async fn running(&self) -> Result<Vec<SessionId>, SessionError> {
        let mut running = Vec::new();
        let visit = |SessionRecord { session, .. }| {
            running.extend(session.sandbox.is_some().then_some(session.id));
        };
        self.shared.store.session_each(visit).await?;
        Ok(running)
    }
}
