//! Retention: the disk space sessions use, and what the retention rules remove.

use serde::{Deserialize, Serialize};

use crate::{SessionId, SnapshotId};

/// `GET` and `POST /v1/retention`: the disk space sessions use, and what retention removes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RetentionReport {
    /// One entry per session.
    pub items: Vec<SessionDiskUsage>,
    /// Size of all snapshots together; layers that several snapshots share count once.
    pub snapshots_bytes: u64,
    /// What the retention rules would remove (`GET`) or have removed (`POST`).
    pub dropped: Vec<RetentionDrop>,
}

/// The snapshots of one session and their size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SessionDiskUsage {
    /// Id of the session.
    pub session: SessionId,
    /// Title of the session.
    pub title: String,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Number of pinned snapshots.
    pub pinned: u64,
    /// Size of the snapshots' own layers, without the layers below them.
    pub bytes: u64,
}

/// A snapshot or a whole session that the retention rules remove.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RetentionDrop {
    /// Id of the session.
    pub session: SessionId,
    /// The snapshot; null when the whole session is removed.
    pub snapshot_id: Option<SnapshotId>,
    /// The rule: `archived`, `archived_long_ago`, `too_many` or `quota`.
    pub why: String,
    /// Size of the snapshot's own layer, without the layers below it.
    pub bytes: u64,
}
