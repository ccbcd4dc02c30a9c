//! Shutdown of the server: turns in progress are left to the next server, which runs the queued
//! prompts, too. Every other sandbox is saved.

use std::time::Duration;

use futures_util::StreamExt;
use harvest_proto::SessionId;

use super::Sessions;
use crate::{
    decide::{Input, State},
    error::SessionError,
    error_chain::error_chain,
};

// Saves mostly wait for the one disk.
const CONCURRENT_SAVES: usize = 8;

impl Sessions {
    /// Ends the warm pool, saves the sandboxes of idle sessions, freezes those of turns in
    /// progress, and starts no more. One that cannot be saved within `timeout` keeps running. The
    /// next server adopts every sandbox that is left.
    pub async fn suspend_all(&self, timeout: Duration) {
        self.stop_admitting();
        if tokio::time::timeout(timeout, self.shared.pool.end_all()).await.is_err() {
            tracing::warn!("ending the warm pool timed out; the next server adopts what is left");
        }
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
        handle.wait_for(State::is_suspended).await.map(drop)
    }

    async fn running(&self) -> Result<Vec<SessionId>, SessionError> {
        let at_work = self.shared.store.session_at_work().await?.into_iter();
        let running = at_work.filter(|record| record.session.sandbox.is_some());
        Ok(running.map(|record| record.session.id).collect())
    }
}
