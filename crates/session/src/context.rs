//! The context that sessions and their drivers share.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use harvest_gateway::vault::Vault;
use harvest_proto::{SnapshotId, api::Session};
use harvest_store::{Lease, Store};

use crate::{
    artifacts::ArtifactFiles, error::SessionError, monotonic_clock::MonotonicClock, pool::Pool,
    removals::Removals, repositories::Repositories, retention::RetentionEnforcer,
    root_locks::RootLocks, sandbox_context::SandboxContext, tasks::Tasks, timeouts::Timeouts,
    tool_host::FindToolHost,
};

pub(crate) struct Shared {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) tasks: Tasks,
    pub(crate) vault: Arc<Vault>,
    /// For timeouts.
    pub(crate) clock: MonotonicClock,
    pub(crate) timeouts: Timeouts,
    pub(crate) sandboxes: Arc<SandboxContext>,
    pub(crate) repositories: Repositories,
    pub(crate) pool: Arc<Pool>,
    pub(crate) removals: Arc<Removals>,
    pub(crate) artifacts: Arc<ArtifactFiles>,
    pub(crate) retention: Arc<RetentionEnforcer>,
    /// Snapshots that are taken for a user and have no row yet.
    pub(crate) pending_snapshots: PendingSnapshots,
    /// Set when the sessions are open.
    pub(crate) tool_host: OnceLock<FindToolHost>,
    /// Held while an agent creates a session, so that the limits below its root hold.
    pub(crate) spawning: RootLocks,
}

/// Snapshots between their capture and their row in the store: they are not orphans.
#[derive(Default)]
pub(crate) struct PendingSnapshots(Mutex<HashSet<SnapshotId>>);

/// Removes the snapshot from the set on drop.
pub(crate) struct PendingSnapshot<'a>(&'a PendingSnapshots, SnapshotId);

impl PendingSnapshots {
    fn set(&self) -> MutexGuard<'_, HashSet<SnapshotId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, snapshot: &SnapshotId) -> PendingSnapshot<'_> {
        self.set().insert(snapshot.clone());
        PendingSnapshot(self, snapshot.clone())
    }

    pub(crate) fn all(&self) -> HashSet<SnapshotId> {
        self.set().clone()
    }
}

impl Drop for PendingSnapshot<'_> {
    fn drop(&mut self) {
        self.0.set().remove(&self.1);
    }
}

impl Shared {
    /// Refuses a session whose sandbox and snapshots are on another provider.
    pub(crate) fn check_provider(&self, session: &Session) -> Result<(), SessionError> {
        if session.provider == self.sandboxes.provider.name() {
            return Ok(());
        }
        let what = format!("session {} runs on provider `{}`", session.id, session.provider);
        let hint = "start the server with this provider, or create another session: `harvest run`";
        Err(SessionError::conflict("other_provider", what, hint))
    }
}
