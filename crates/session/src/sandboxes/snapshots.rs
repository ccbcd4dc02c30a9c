//! The snapshots of a provider: taking, listing, comparing and removing them.

use async_trait::async_trait;
use harvest_proto::{
    SandboxId, SnapshotId, Timestamp,
    api::{FileChanges, StoredSnapshot},
    event::SnapshotKind,
};

use super::SandboxError;

/// Takes snapshots of running sandboxes and manages those stored.
#[async_trait]
pub trait Snapshots: Send + Sync {
    /// Freezes, captures, thaws. Idempotent by snapshot id. `kind` is that of a session's snapshot;
    /// without one it belongs to the user, and no server removes it.
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: Option<SnapshotKind>,
    ) -> Result<Captured, SandboxError>;

    /// Returns when every snapshot taken so far would survive a power cut.
    async fn sync(&self) -> Result<(), SandboxError>;

    /// Whether a snapshot would survive a power cut; an unknown one counts as pending.
    async fn durability(&self, snapshot: &SnapshotId) -> Result<Durability, SandboxError>;

    /// Deletes a snapshot; its layers are deleted when nothing uses them. Idempotent.
    async fn remove(&self, snapshot: &SnapshotId) -> Result<(), SandboxError>;

    /// The ids of all snapshots. Cheaper than a list: reads none of them.
    async fn ids(&self) -> Result<Vec<SnapshotId>, SandboxError>;

    /// One snapshot, if it exists.
    async fn find(&self, snapshot: &SnapshotId) -> Result<Option<StoredSnapshot>, SandboxError>;

    /// Lists every snapshot, newest first.
    async fn list(&self) -> Result<Vec<StoredSnapshot>, SandboxError>;

    /// Lists the snapshots of sessions and builds with their layers and sizes. Measuring a layer
    /// for the first time may take a second.
    async fn sizes(&self) -> Result<Vec<SnapshotSize>, SandboxError>;

    /// Lists the files that differ between `before` and `after`, at most `limit` of them by name.
    async fn changes(
        &self,
        before: &DiffBase,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<FileChanges, SandboxError>;

    /// Whether the sandboxes and snapshots of sessions belong to the store of this name. The first
    /// store that asks claims them; those of another store must not be removed.
    async fn claim_for_store(&self, store: &str) -> Result<bool, SandboxError>;

    /// Frees the space of removed snapshots and sandboxes. Layers still in use stay.
    async fn reclaim(&self) -> Result<(), SandboxError>;
}

/// Whether a snapshot survives a power cut. It always survives the end of Harvest's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    Durable,
    /// As soon as it is synced.
    Pending,
    /// The machine restarted before it was synced: the last writes in it may be missing.
    Torn,
}

/// The result of a capture.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Captured {
    /// Milliseconds for which the sandbox was frozen.
    pub frozen_millis: u64,
    /// Bytes copied.
    pub bytes: u64,
}

/// The side a snapshot is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiffBase {
    Snapshot(SnapshotId),
    /// The image or snapshot from which this snapshot's sandbox started.
    OriginOf(SnapshotId),
}

/// The size of a stored snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotSize {
    pub id: SnapshotId,
    /// Bytes added on top of the parent.
    pub bytes: u64,
    pub created_at: Timestamp,
    /// The snapshot layers it consists of, with their sizes.
    pub layers: Vec<(String, u64)>,
}
