//! Blobs: the full text of which an event holds only the ends. A blob is fetched from the sandbox
//! and stored before its event, so that a stored event never names a missing blob. Events pass here
//! at a bounded pace, and the values of secrets in them are masked.

use std::{sync::Arc, time::Duration};

use harvest_proto::{SessionId, bridge::OutboxEvent, event::Blob};
use harvest_store::StoreError;
use tokio::{sync::mpsc, time::Instant};

use super::{event_mask::EventMask, secrets::SessionSecrets};
use crate::{
    bridge::{Bridge, BridgeError, OwnerMessage},
    context::Shared,
    error_chain::error_chain,
    history::{self, Pace},
    secret_mask::SecretMask,
    wall_clock::now,
};

// Of all blobs of a session; beyond it events have no blob.
const QUOTA_BYTES: u64 = 64 * 1024 * 1024;

// Longer than any line of an agent that a supervisor reads.
const MAX_BLOB_BYTES: u64 = 16 * 1024 * 1024;

// One batch of the driver. The supervisor has at most 2 MiB in flight.
const QUEUED_MESSAGES: usize = 256;

// Of a part of a text that may end in the start of a secret's value.
const HOLD: Duration = Duration::from_secs(1);

const MAX_DELAY: Duration = Duration::from_secs(10);

/// Another server has taken over, or the session or the connection is gone.
struct Detached;

/// Forwards the messages of a bridge in order, each after its blob is stored. Ends with the bridge
/// or its receiver.
pub(super) fn store_blobs(
    shared: &Arc<Shared>,
    session: &SessionId,
    secrets: &Arc<SessionSecrets>,
    bridge: Bridge,
    mut messages: mpsc::Receiver<OwnerMessage>,
) -> mpsc::Receiver<OwnerMessage> {
    let (out, events) = mpsc::channel(QUEUED_MESSAGES);
    let (context, session, secrets) = (Arc::clone(shared), session.clone(), Arc::clone(secrets));
    shared.tasks.spawn(async move {
        let forwarding = async {
            let mut pace = Pace::new(Instant::now());
            let mut mask = EventMask::default();
            loop {
                let received = next(&mut messages, &mask).await;
                let is_last = matches!(received, Next::Ended);
                let ready = match received {
                    Next::Ended | Next::Silence => mask.release(),
                    Next::Message(mut message) => {
                        let values = known_values(&context, &secrets).await;
                        mask.set_values(Arc::clone(&values));
                        if let OwnerMessage::Event(event) = &mut message {
                            let wait = pace.take(history::size(&event.body), Instant::now());
                            tokio::time::sleep(wait).await;
                            let stored = store_blob(&context, &session, &bridge, event, &values);
                            if Box::pin(stored).await.is_err() {
                                return;
                            }
                        }
                        mask.push(message)
                    }
                };
                for message in ready {
                    if out.send(message).await.is_err() {
                        return;
                    }
                }
                if is_last {
                    return;
                }
            }
        };
        tokio::select! {
            () = forwarding => {}
            // This task holds the bridge; it must not keep the connection open on its own.
            () = out.closed() => {}
        }
    });
    events
}

enum Next {
    Message(OwnerMessage),
    /// A part of a text waits, and nothing follows.
    Silence,
    Ended,
}

async fn next(messages: &mut mpsc::Receiver<OwnerMessage>, mask: &EventMask) -> Next {
    let received = match mask.holds() {
        true => tokio::time::timeout(HOLD, messages.recv()).await,
        false => Ok(messages.recv().await),
    };
    match received {
        Ok(Some(message)) => Next::Message(message),
        Ok(None) => Next::Ended,
        Err(_) => Next::Silence,
    }
}

/// The values of the session's secrets. An event waits while they cannot be read.
async fn known_values(shared: &Shared, secrets: &SessionSecrets) -> Arc<SecretMask> {
    let mut delay = Duration::from_millis(50);
    loop {
        if let Ok(values) = secrets.values(shared).await {
            return values;
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(MAX_DELAY);
    }
}

async fn store_blob(
    shared: &Shared,
    session: &SessionId,
    bridge: &Bridge,
    event: &mut OutboxEvent,
    values: &SecretMask,
) -> Result<(), Detached> {
    let Some(blob) = event.body.blob().cloned() else { return Ok(()) };
    let Some(text) = fetch(bridge, &blob).await? else {
        event.body.remove_blob();
        return Ok(());
    };
    let text = values.mask(text);
    let mut delay = Duration::from_millis(50);
    loop {
        let put = shared
            .store
            .blob_put(session, shared.lease, &blob.id, text.clone(), QUOTA_BYTES, now())
            .await;
        match put {
            Ok(true) => return Ok(()),
            Ok(false) => {
                event.body.remove_blob();
                return Ok(());
            }
            Err(StoreError::LeaseLost | StoreError::Closed | StoreError::NotFound { .. }) => {
                return Err(Detached);
            }
            // On a full disk the event waits, and with it the agent; nothing is lost.
            Err(error) => {
                tracing::error!(%session, %error, "cannot write a blob; retrying")
            }
        }
        tokio::time::sleep(delay).await;
        delay = (delay * 2).min(MAX_DELAY);
    }
}

/// `None` when the supervisor does not have the blob as announced: the event is stored without it.
async fn fetch(bridge: &Bridge, blob: &Blob) -> Result<Option<String>, Detached> {
    let limit = usize::try_from(blob.bytes.min(MAX_BLOB_BYTES)).unwrap_or(usize::MAX);
    match bridge.blob_read(&blob.id, limit).await {
        Ok(bytes) if bytes.len() as u64 == blob.bytes => Ok(String::from_utf8(bytes).ok()),
        Ok(_) => Ok(None),
        Err(BridgeError::Lost) => Err(Detached),
        Err(error) => {
            tracing::warn!(blob = %blob.id, error = error_chain(&error), "cannot fetch a blob");
            Ok(None)
        }
    }
}
