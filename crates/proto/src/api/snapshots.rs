//! Snapshots.

use serde::{Deserialize, Serialize};

use crate::{SnapshotId, Timestamp, event::SnapshotKind};

/// A snapshot as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Why it was taken.
    pub kind: SnapshotKind,
    /// The turn it follows.
    pub turn: Option<u32>,
    /// When.
    pub created_at: Timestamp,
}
