//! What sessions ask of a machine about the disks it keeps, beyond taking and using a snapshot: which
//! there are, and that what is removed frees its room.

use async_trait::async_trait;
use harvest_proto::{SnapshotId, Timestamp};

use crate::provider::ProviderError;

/// Looks after the disks a machine keeps.
#[async_trait]
pub trait Disks: Send + Sync {
    /// Whether what sessions left here belongs to the store of this name; the first one to ask has it.
    /// What belongs to another store is not ours to remove.
    async fn belongs_to(&self, store: &str) -> Result<bool, ProviderError>;

    /// Every snapshot taken for sessions and builds; none that people took for themselves.
    async fn list(&self) -> Result<Vec<KeptDisk>, ProviderError>;

    /// Frees the room of what was removed and ended. Other users of a layer keep it.
    async fn sweep(&self) -> Result<(), ProviderError>;

    /// Forgets what sandboxes of this repository kept at `/mnt/state`. Idempotent.
    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError>;
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
}
