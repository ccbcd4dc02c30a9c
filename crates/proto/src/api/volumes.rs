//! Volumes: named storage that outlives sandboxes and is not part of snapshots.

use serde::{Deserialize, Serialize};

use crate::Timestamp;

/// `POST /v1/volumes`: creates a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateVolume {
    /// Name of the volume: letters, digits, `_` and `-`.
    #[cfg_attr(feature = "openapi", schema(pattern = "^[A-Za-z0-9_-]{1,80}$"))]
    pub name: String,
    /// Size, reserved on the machine's disk at once; 2 GiB when absent.
    pub size_bytes: Option<u64>,
    /// Maximum number of files; 500,000 when absent, fewer for a small volume.
    pub files: Option<u64>,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Volume {
    /// Name of the volume.
    pub name: String,
    /// How the volume is stored.
    pub backing: VolumeBacking,
    /// Maximum size of the volume.
    pub size_bytes: u64,
    /// Space it takes on the machine's disk.
    pub used_bytes: u64,
    /// Maximum number of files.
    pub files: u64,
    /// Folders that are created whenever a sandbox mounts the volume.
    pub folders: Vec<String>,
    /// Repository whose `/mnt/state` it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Time of creation.
    pub created_at: Timestamp,
}

/// How a volume is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum VolumeBacking {
    /// A file system in a file; the kernel enforces its limits.
    Image,
    /// A plain folder; its limits are not enforced.
    Folder,
}
