//! The snapshots a provider stores: listing, sizes, diffs, and freeing the space of removed ones.

use async_trait::async_trait;
use harvest_proto::{SnapshotId, Timestamp, api::FileChanges};

use crate::provider::ProviderError;

/// Manages the snapshots stored on the host.
#[async_trait]
pub trait Disks: Send + Sync {
    /// Whether the session snapshots and sandboxes on this host belong to the store of this name.
    /// The first store that asks claims them; those of another store must not be removed.
    async fn claim_for_store(&self, store: &str) -> Result<bool, ProviderError>;

    /// Lists the snapshots of sessions and builds, not those of standalone sandboxes.
    async fn list(&self) -> Result<Vec<SnapshotDisk>, ProviderError>;

    /// As [`Disks::list`], with layers and their sizes. Measuring a layer for the first time may
    /// take a second.
    async fn list_with_sizes(&self) -> Result<Vec<SnapshotDisk>, ProviderError>;

    /// Frees the space of removed snapshots and sandboxes. Layers still in use stay.
    async fn reclaim(&self) -> Result<(), ProviderError>;

    /// Deletes the state volume (`/mnt/state`) of a repository. Idempotent.
    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError>;

    /// Lists the files that differ between `before` and `after`, at most `limit` of them by name.
    async fn changes(
        &self,
        before: &DiffBase,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<FileChanges, ProviderError>;
}

/// The side a snapshot is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiffBase {
    Snapshot(SnapshotId),
    /// The image or snapshot from which this snapshot's sandbox started.
    OriginOf(SnapshotId),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotDisk {
    pub id: SnapshotId,
    /// Bytes added on top of the parent.
    pub bytes: u64,
    pub created_at: Timestamp,
    /// The snapshot layers it consists of with their sizes; empty unless listed with sizes.
    pub layers: Vec<(String, u64)>,
}
