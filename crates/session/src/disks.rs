//! What sessions ask of a machine about the disks it keeps, beyond taking and using a snapshot: which
//! there are, what differs between two, and that what is removed frees its room.

use async_trait::async_trait;
use harvest_proto::{SnapshotId, Timestamp, api::MachineChanges};

use crate::provider::ProviderError;

/// Looks after the disks a machine keeps.
#[async_trait]
pub trait Disks: Send + Sync {
    /// Whether what sessions left here belongs to the store of this name; the first one to ask has it.
    /// What belongs to another store is not ours to remove.
    async fn belongs_to(&self, store: &str) -> Result<bool, ProviderError>;

    /// Every snapshot taken for sessions and builds; none that people took for themselves.
    async fn list(&self) -> Result<Vec<KeptDisk>, ProviderError>;

    /// The same, with what each consists of. The first time it measures, which may take a second each.
    async fn weigh(&self) -> Result<Vec<KeptDisk>, ProviderError>;

    /// Frees the room of what was removed and ended. Other users of a layer keep it.
    async fn sweep(&self) -> Result<(), ProviderError>;

    /// Forgets what sandboxes of this repository kept at `/mnt/state`. Idempotent.
    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError>;

    /// Every file that differs from what was before to a snapshot; at most `limit` of them one by one.
    async fn changes(
        &self,
        before: &DiskBefore,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<MachineChanges, ProviderError>;
}

/// What a disk is compared with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskBefore {
    /// A snapshot.
    Snapshot(SnapshotId),
    /// What the sandbox of this snapshot began as.
    BeginningOf(SnapshotId),
}

/// A snapshot on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptDisk {
    /// Which.
    pub id: SnapshotId,
    /// What it added to what it stands on.
    pub bytes: u64,
    /// When it was taken.
    pub created_at: Timestamp,
    /// The layers it consists of that belong to snapshots, and what each takes; only when weighed.
    pub layers: Vec<(String, u64)>,
}
