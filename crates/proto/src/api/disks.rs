//! Disk usage and garbage collection.

use serde::{Deserialize, Serialize};

use super::Volume;
use crate::SandboxId;

/// `GET /v1/df`: disk usage of this Harvest home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiskUsage {
    /// Storage driver of the home: `dir`, `btrfs` or `btrfs_file`.
    pub driver: String,
    /// Size of each image with all its layers; shared layers count for every image.
    pub images: Vec<NamedSize>,
    /// Size of all image layers; each counts once.
    pub images_bytes: u64,
    /// Size of each snapshot's own layer, where it is known.
    pub snapshots: Vec<NamedSize>,
    /// Size of all snapshot layers of this home; each counts once.
    pub snapshots_bytes: u64,
    /// Size of each sandbox's writable layer.
    pub sandboxes: Vec<SandboxDiskUsage>,
    /// All volumes.
    pub volumes: Vec<Volume>,
    /// Space all volumes take.
    pub volumes_bytes: u64,
    /// Size of the local forge: copies of folders and pushed branches.
    pub forge_bytes: u64,
    /// Size of deleted data that is still on the disk.
    pub trash_bytes: u64,
    /// Space a garbage collection would free now, including the trash.
    pub reclaimable_bytes: u64,
    /// The store's file, for the driver `btrfs_file`.
    pub store_file: Option<StoreFile>,
    /// The disk that holds the home.
    pub home_disk: DiskSpace,
    /// The disk that holds the cache; often the same.
    pub cache_disk: DiskSpace,
}

/// A name and a size on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NamedSize {
    /// Name or id of the object.
    pub name: String,
    /// Size on the disk.
    pub bytes: u64,
}

/// Size of a sandbox's writable layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxDiskUsage {
    /// Id of the sandbox.
    pub id: SandboxId,
    /// False when only its disk is left.
    pub running: bool,
    /// Size on the disk.
    pub bytes: u64,
}

/// The file of a store with the driver `btrfs_file`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoreFile {
    /// Size of the file on the machine's disk.
    pub bytes: u64,
    /// Unused space inside the file.
    pub free_bytes: u64,
}

/// Space on a disk of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiskSpace {
    /// Size of the disk.
    pub total_bytes: u64,
    /// Space that Harvest can use.
    pub free_bytes: u64,
}

/// `POST /v1/gc`: collects garbage.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CollectGarbage {
    /// Only report what would be removed.
    #[serde(default)]
    pub dry_run: bool,
}

/// Result of a garbage collection.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GarbageReport {
    /// Layers without references.
    pub layers: Vec<String>,
    /// Dead sandboxes whose owner no longer exists.
    pub sandboxes: Vec<SandboxId>,
    /// Size of the layers.
    pub bytes: u64,
    /// Number of folders in the trash.
    pub trees: u64,
    /// True when the shared cache was skipped because a build is in progress.
    pub cache_busy: bool,
    /// The home because of which the shared cache was skipped: its folder is missing, for example
    /// because its disk is not mounted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_kept_for: Option<String>,
}
