//! The server ends: every machine is kept on disk, and the next server goes on with what waits.

use std::time::Duration;

use futures_util::StreamExt;
use harvest_proto::SessionId;

use crate::{Sessions, decide::Input, error::SessionError, wiring::words};

/// Each is mostly waiting, and the disk is one.
const AT_ONCE: usize = 8;

impl Sessions {
    /// Keeps every machine on disk; no more are started. One that cannot be kept within `patience` goes
    /// on, and the next server adopts it.
    pub async fn suspend_all(&self, patience: Duration) {
        self.give_no_more_places();
        let running = match self.running().await {
            Ok(running) => running,
            Err(error) => {
                return tracing::error!(
                    error = words(&error),
                    "sessions cannot be listed; sandboxes go on"
                );
            }
        };
        let suspends = running.into_iter().map(|session| async move {
            match tokio::time::timeout(patience, self.suspend(&session)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    let error = words(&error);
                    tracing::warn!(%session, error, "a session could not be suspended; it goes on");
                }
                Err(_) => {
                    tracing::warn!(%session, "a session was not suspended in time; it goes on")
                }
            }
        });
        futures_util::stream::iter(suspends).buffer_unordered(AT_ONCE).collect::<()>().await;
    }

    async fn suspend(&self, session: &SessionId) -> Result<(), SessionError> {
        let handle = self.ask(session, Input::Suspend).await?;
        self.rested(session, &handle).await.map(drop)
    }

    async fn running(&self) -> Result<Vec<SessionId>, SessionError> {
        let (mut running, mut cursor) = (Vec::new(), None);
        loop {
            let page = self.list(cursor.as_deref(), 200).await?;
            let alive = page.items.into_iter().filter(|session| session.sandbox.is_some());
            running.extend(alive.map(|session| session.id));
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(running);
            }
        }
    }
}
