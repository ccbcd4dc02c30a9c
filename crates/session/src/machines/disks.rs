//! What a host keeps on its disks besides images, and what it lacks.

use async_trait::async_trait;
use harvest_proto::{
    SnapshotId,
    api::machines::{Collected, CreateVolume, DiskUsage, Finding, MachineSnapshot, Volume},
};

use super::MachineError;

/// Volumes, snapshots, room.
#[async_trait]
pub trait HostDisks: Send + Sync {
    /// Every volume, by name.
    async fn volume_list(&self) -> Result<Vec<Volume>, MachineError>;

    /// Makes one; its room is taken at once.
    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, MachineError>;

    /// Throws one away with everything in it.
    async fn volume_delete(&self, name: &str) -> Result<(), MachineError>;

    /// Every snapshot, newest first.
    async fn snapshot_list(&self) -> Result<Vec<MachineSnapshot>, MachineError>;

    /// Forgets one; with `force` also one that a session may go on from.
    async fn snapshot_delete(&self, snapshot: &SnapshotId, force: bool)
    -> Result<(), MachineError>;

    /// What takes how much room. Measures, which takes a while the first time.
    async fn disk_usage(&self) -> Result<DiskUsage, MachineError>;

    /// Removes what nothing uses any more; with `dry_run` it only says what.
    async fn collect(&self, dry_run: bool) -> Result<Collected, MachineError>;

    /// What the host has and lacks. Tries it, which takes a moment.
    async fn findings(&self) -> Result<Vec<Finding>, MachineError>;
}
