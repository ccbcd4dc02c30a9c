//! What the host keeps on its disks: volumes, snapshots, and how much room everything takes.

use serde::{Deserialize, Serialize};

use super::images::ImageConfig;
use crate::{SandboxId, SnapshotId, Timestamp};

/// `POST /v1/volumes`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateVolume {
    /// Its name: letters, digits, `_` and `-`.
    #[cfg_attr(feature = "openapi", schema(pattern = "^[A-Za-z0-9_-]{1,80}$"))]
    pub name: String,
    /// What it takes on the host's disk from the beginning; 2 GiB when absent.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// How many files it can hold; 500,000 when absent, fewer where it is small.
    #[serde(default)]
    pub files: Option<u64>,
}

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// What it is made of.
    pub backing: VolumeBacking,
    /// Its size.
    pub size_bytes: u64,
    /// How many files it can hold.
    pub files: u64,
    /// Folders it has whenever a sandbox gets it.
    pub folders: Vec<String>,
    /// When it was made.
    pub created_at: Timestamp,
}

/// What a volume is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum VolumeBacking {
    /// A file system in a file, with limits the kernel keeps.
    Image,
    /// A plain folder: nothing keeps its limits.
    Folder,
}

/// A snapshot as the machine keeps it, whoever took it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineSnapshot {
    /// Its id.
    pub id: SnapshotId,
    /// Who would miss it.
    pub owner: Owned,
    /// What it consists of, bottom first.
    pub layers: Vec<String>,
    /// What commands get.
    pub config: ImageConfig,
    /// When it was captured.
    pub created_at: Timestamp,
    /// Whether it survives a power cut; it survives the end of every process at once.
    pub durable: bool,
    /// The sandbox it was taken of.
    pub sandbox: Option<SandboxId>,
    /// The snapshot that sandbox began as, if it did.
    pub parent: Option<SnapshotId>,
    /// What it added on the disk to what it stands on, where that is known without looking.
    pub bytes: Option<u64>,
}

/// Who would miss something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Owned {
    /// Whoever made it by hand.
    You,
    /// A session or a repository may go on from it.
    Session,
}

/// `GET /v1/df`: what takes how much room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiskUsage {
    /// How the home keeps disks: `dir`, `btrfs` or `btrfs_file`.
    pub driver: String,
    /// Each image with all its layers; what two share is in both.
    pub images: Vec<Used>,
    /// The layers of all images, each once.
    pub images_bytes: u64,
    /// Each snapshot with what it added to what it stands on, where that is known.
    pub snapshots: Vec<Used>,
    /// The layers of all snapshots in this home, each once.
    pub snapshots_bytes: u64,
    /// Each sandbox with its writable layer.
    pub sandboxes: Vec<SandboxUsed>,
    /// Each volume.
    pub volumes: Vec<Volume>,
    /// What is reserved for all volumes.
    pub volumes_bytes: u64,
    /// What was thrown away and is not deleted yet.
    pub trash_bytes: u64,
    /// What a collection would free now, the trash included.
    pub reclaimable_bytes: u64,
    /// The file of the store, where there is one.
    pub store_file: Option<StoreFile>,
    /// The disk the home is on.
    pub home_disk: DiskRoom,
    /// The disk the cache is on; often the same.
    pub cache_disk: DiskRoom,
}

/// Something and what it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Used {
    /// What.
    pub name: String,
    /// How much.
    pub bytes: u64,
}

/// A sandbox and what its writable layer takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxUsed {
    /// Which.
    pub id: SandboxId,
    /// Whether it runs; else only its disk is there.
    pub running: bool,
    /// How much.
    pub bytes: u64,
}

/// A store in a file: what the host sees and what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StoreFile {
    /// Reserved on the host's disk.
    pub bytes: u64,
    /// Of that, not in use.
    pub free_bytes: u64,
}

/// A disk of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiskRoom {
    /// In all.
    pub total_bytes: u64,
    /// Free for us.
    pub free_bytes: u64,
}

/// `POST /v1/gc`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Collect {
    /// Only say what would go.
    #[serde(default)]
    pub dry_run: bool,
}

/// What a collection came to.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Collected {
    /// Layers nothing referred to.
    pub layers: Vec<String>,
    /// Dead sandboxes whose owner was gone.
    pub sandboxes: Vec<SandboxId>,
    /// What the layers took on the disk.
    pub bytes: u64,
    /// Trees in the trash.
    pub trees: u64,
    /// Whether the shared cache was passed over because a build is in progress.
    pub cache_busy: bool,
    /// The home for whose sake it was passed over: what was there is gone, as when a disk is not attached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_kept_for: Option<String>,
}

/// One thing the host has or lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Finding {
    /// Stays the same from release to release.
    pub id: String,
    /// How bad it is.
    pub level: FindingLevel,
    /// What was found, in one line.
    pub found: String,
    /// What to do about it, in one line.
    pub fix: Option<String>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum FindingLevel {
    /// As it should be.
    Ok,
    /// Sandboxes run, with something less.
    Warn,
    /// No sandbox runs.
    Fail,
}
