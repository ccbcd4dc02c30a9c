//! Retention, as users see and request it, and pinned snapshots.

use harvest_proto::{
    SessionId, SnapshotId,
    api::{RetentionReport, Snapshot},
};

use super::Sessions;
use crate::error::SessionError;

impl Sessions {
    /// The disk usage of sessions, and what retention would remove now.
    ///
    /// # Errors
    /// When the store or the provider cannot be read.
    pub async fn retention(&self) -> Result<RetentionReport, SessionError> {
        self.shared.retention.report(true).await
    }

    /// Applies retention now and returns what it removed.
    ///
    /// # Errors
    /// As [`Sessions::retention`].
    pub async fn enforce_retention(&self) -> Result<RetentionReport, SessionError> {
        self.shared.retention.report(false).await
    }

    /// Pins or unpins a snapshot. Retention never removes a pinned snapshot.
    ///
    /// # Errors
    /// When the session has no such snapshot.
    pub async fn snapshot_pin(
        &self,
        session: &SessionId,
        snapshot: &SnapshotId,
        pinned: bool,
    ) -> Result<Snapshot, SessionError> {
        self.shared.store.snapshot_pin(session, self.shared.lease, snapshot, pinned).await?;
        let all = self.shared.store.snapshot_list(session).await?;
        let found = all.into_iter().find(|one| one.id == *snapshot);
        found.ok_or_else(|| SessionError::missing(format!("snapshot {snapshot}")))
    }
}
