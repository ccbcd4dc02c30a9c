//! Snapshots: as a session lists them, and as the machine stores them.

use serde::{Deserialize, Serialize};

use super::ImageConfig;
use crate::{SandboxId, SnapshotId, Timestamp, event::SnapshotKind};

/// A snapshot of a session's sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Id of the snapshot.
    pub id: SnapshotId,
    /// Reason for the snapshot.
    pub kind: SnapshotKind,
    /// The turn it was taken after; 0 is the session's start.
    pub turn: Option<u32>,
    /// The name that a user gave it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// True when retention never removes it.
    pub pinned: bool,
    /// True when the snapshot is missing on the disk: no sandbox can start from it.
    pub gone: bool,
    /// True when it survives a power failure. False shortly after it was taken, and for ever when
    /// the machine restarted before: then its last writes may be missing.
    pub durable: bool,
    /// Time at which it was taken.
    pub created_at: Timestamp,
}

/// `POST /v1/sessions/{id}/snapshots`: takes a snapshot of a session now.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateSnapshot {
    /// A name for people, on one line. A named snapshot is pinned: retention never removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(min_length = 1, max_length = 100))]
    pub name: Option<String>,
}

/// `PUT /v1/sessions/{id}/snapshots/{snapshot}`: pins or unpins a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PinSnapshot {
    /// True keeps the snapshot whatever the retention rules say.
    pub pinned: bool,
}

/// A snapshot on the machine's disk, of a session or of a standalone sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoredSnapshot {
    /// Id of the snapshot.
    pub id: SnapshotId,
    /// Whether a session needs the snapshot.
    pub owner: SnapshotOwner,
    /// Layers, bottom first.
    pub layers: Vec<String>,
    /// Defaults for commands in sandboxes started from it.
    pub config: ImageConfig,
    /// Time at which it was taken.
    pub created_at: Timestamp,
    /// True when it survives a power failure; it always survives the end of Harvest's processes.
    pub durable: bool,
    /// Sandbox it was taken of.
    pub sandbox: Option<SandboxId>,
    /// Snapshot that sandbox was started from, if any.
    pub parent: Option<SnapshotId>,
    /// Size of its own layer, without the layers below; null if not measured yet.
    pub bytes: Option<u64>,
}

/// What a snapshot belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SnapshotOwner {
    /// A user who took it of a standalone sandbox.
    You,
    /// A session or a repository that may continue from it.
    Session,
}
