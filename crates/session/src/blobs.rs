//! Blobs, the whole of what events hold only the ends of: fetched from the sandbox and kept before their
//! event is. An event names a blob only when it is kept.

use std::{sync::Arc, time::Duration};

use harvest_proto::{BlobId, SessionId, bridge::OutboxEvent, event::Blob};
use harvest_store::StoreError;
use tokio::sync::mpsc;

use crate::{
    Sessions,
    bridge::{Bridge, BridgeError, FromBridge},
    error::SessionError,
    wiring::{Shared, now, words},
};

// What all blobs of a session may take; beyond it events keep their ends only.
const QUOTA_BYTES: u64 = 64 * 1024 * 1024;

// Longer than any line of an agent that a supervisor reads.
const MAX_BYTES: u64 = 16 * 1024 * 1024;

// As many as the driver writes at once. The supervisor has at most 2 MiB under way, wherever they wait.
const WAITING: usize = 256;

const LONGEST_WAIT: Duration = Duration::from_secs(10);

/// There is nobody left to tell: another server has taken over, the session or the connection is gone.
struct Over;

/// Passes on what the bridge says, in its order, once the blobs it names are kept. Ends with the bridge, and
/// when nobody listens any more.
pub(crate) fn kept(
    shared: &Arc<Shared>,
    session: SessionId,
    bridge: Bridge,
    mut heard: mpsc::Receiver<FromBridge>,
) -> mpsc::Receiver<FromBridge> {
    let (out, events) = mpsc::channel(WAITING);
    let here = Arc::clone(shared);
    shared.spawn(async move {
        let keeping = async {
            while let Some(mut one) = heard.recv().await {
                if let FromBridge::Event(event) = &mut one
                    && Box::pin(keep(&here, &session, &bridge, event)).await.is_err()
                {
                    return;
                }
                if out.send(one).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = keeping => {}
            // The connection closes with its last user; this must not be it.
            () = out.closed() => {}
        }
    });
    events
}

async fn keep(
    shared: &Shared,
    session: &SessionId,
    bridge: &Bridge,
    event: &mut OutboxEvent,
) -> Result<(), Over> {
    let Some(blob) = event.body.blob().cloned() else { return Ok(()) };
    let Some(text) = fetch(bridge, &blob).await? else {
        event.body.forget_blob();
        return Ok(());
    };
    let mut wait = Duration::from_millis(50);
    loop {
        let put = shared
            .store
            .blob_put(session, shared.lease, &blob.id, text.clone(), QUOTA_BYTES, now())
            .await;
        match put {
            Ok(true) => return Ok(()),
            Ok(false) => {
                event.body.forget_blob();
                return Ok(());
            }
            Err(StoreError::LeaseLost | StoreError::Closed | StoreError::NotFound { .. }) => {
                return Err(Over);
            }
            // A full disk: the event waits, and with it the agent, rather than losing anything.
            Err(error) => {
                tracing::error!(%session, %error, "a blob cannot be written; trying again")
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// `None` when the supervisor does not hold what it promised: whatever it says, the event is kept.
async fn fetch(bridge: &Bridge, blob: &Blob) -> Result<Option<String>, Over> {
    let limit = usize::try_from(blob.bytes.min(MAX_BYTES)).unwrap_or(usize::MAX);
    match bridge.blob_read(&blob.id, limit).await {
        Ok(bytes) if bytes.len() as u64 == blob.bytes => Ok(String::from_utf8(bytes).ok()),
        Ok(_) => Ok(None),
        Err(BridgeError::Lost) => Err(Over),
        Err(error) => {
            tracing::warn!(blob = %blob.id, error = words(&error), "a blob cannot be had");
            Ok(None)
        }
    }
}

impl Sessions {
    /// The whole of what an event holds only the ends of.
    ///
    /// # Errors
    /// When there is no such blob in the session.
    pub async fn blob(&self, session: &SessionId, blob: &BlobId) -> Result<String, SessionError> {
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.blob_get(session, blob).await?)
    }
}
