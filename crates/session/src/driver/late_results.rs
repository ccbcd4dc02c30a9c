//! Sandboxes and snapshots that are completed after their driver has exited, because the session
//! was deleted or rests. Nothing else would remove those that the stored session does not name.

use harvest_proto::{SandboxId, SessionId, SnapshotId};
use harvest_store::StoreError;

use crate::{context::Shared, provider_retry::retry};

pub(super) async fn remove_late_sandbox(shared: &Shared, session: &SessionId, sandbox: &SandboxId) {
    if is_named(shared, session, &sandbox.to_string()).await == Some(false) {
        retry(|| shared.sandboxes.provider.remove(sandbox)).await;
    }
}

pub(super) async fn remove_late_snapshot(
    shared: &Shared,
    session: &SessionId,
    snapshot: &SnapshotId,
) {
    let listed = match shared.store.snapshot_list(session).await {
        Ok(snapshots) => snapshots.iter().any(|listed| listed.id == *snapshot),
        Err(_) => return,
    };
    if !listed
        && is_named(shared, session, &snapshot.to_string()).await == Some(false)
        && let Some(snapshots) = shared.sandboxes.provider.snapshots()
    {
        retry(|| snapshots.remove(snapshot)).await;
    }
}

/// Whether the stored state of the session names a sandbox or a pending snapshot.
async fn is_named(shared: &Shared, session: &SessionId, id: &str) -> Option<bool> {
    match shared.store.session_get(session).await {
        Ok(record) => Some(record.driver_state.contains(id)),
        Err(StoreError::NotFound { .. }) => Some(false),
        // The next server removes what nothing names.
        Err(_) => None,
    }
}
