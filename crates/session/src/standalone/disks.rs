//! The trait for volumes, snapshots, disk usage and host checks.

use async_trait::async_trait;
use harvest_proto::{
    SnapshotId,
    api::{CreateVolume, DiskUsage, Finding, GarbageReport, StoredSnapshot, Volume},
};

use super::HostError;

/// Volumes, snapshots, disk usage, garbage collection and host checks.
#[async_trait]
pub trait HostDisks: Send + Sync {
    /// Lists every volume by name.
    async fn volume_list(&self) -> Result<Vec<Volume>, HostError>;

    /// Creates a volume; its space is allocated at once.
    async fn volume_create(&self, order: CreateVolume) -> Result<Volume, HostError>;

    /// Deletes a volume with its content.
    async fn volume_delete(&self, name: &str) -> Result<(), HostError>;

    /// Lists every snapshot, newest first.
    async fn snapshot_list(&self) -> Result<Vec<StoredSnapshot>, HostError>;

    /// Removes a snapshot; `force` includes one that a session may continue from.
    async fn snapshot_delete(&self, snapshot: &SnapshotId, force: bool) -> Result<(), HostError>;

    /// Measures disk usage, which takes a while the first time.
    async fn disk_usage(&self) -> Result<DiskUsage, HostError>;

    /// Collects garbage; with `dry_run` it only reports it.
    async fn collect(&self, dry_run: bool) -> Result<GarbageReport, HostError>;

    /// Checks what the host supports, by trying it.
    async fn findings(&self) -> Result<Vec<Finding>, HostError>;
}
