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
    /// The turn it follows; 0 for what the session began as.
    pub turn: Option<u32>,
    /// Whether it is kept whatever retention says.
    #[serde(default)]
    pub pinned: bool,
    /// Whether the machine no longer has it: nothing can go on from it then.
    #[serde(default)]
    pub gone: bool,
    /// When.
    pub created_at: Timestamp,
}
