//! The provider trait: starts, finds, snapshots and removes sandboxes. Everything else goes over
//! the bridge and works the same on every provider.

use std::{path::PathBuf, time::Duration};

use async_trait::async_trait;
use harvest_proto::{RepositoryName, SandboxId, SnapshotId, event::SnapshotKind};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::disks::Disks;

/// Starts, finds, snapshots and removes sandboxes.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Starts a sandbox whose supervisor can be dialled when this returns.
    async fn start(&self, order: StartSpec) -> Result<Started, ProviderError>;

    /// Whether a sandbox started earlier, perhaps by another server process, still runs.
    async fn find(&self, sandbox: &SandboxId) -> Result<Found, ProviderError>;

    /// Connects to the sandbox's supervisor.
    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError>;

    /// Waits until a sandbox has exited, for whatever reason, and returns that reason.
    async fn wait_for_exit(&self, sandbox: &SandboxId) -> Result<String, ProviderError>;

    /// Stops a sandbox and turns its disk into `snapshot` in one step, O(1) where the store driver
    /// allows. Also works on a sandbox that died by itself. Idempotent.
    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), ProviderError>;

    /// Stops a sandbox and deletes its disk. Idempotent: an unknown sandbox counts as removed.
    async fn remove(&self, sandbox: &SandboxId) -> Result<(), ProviderError>;

    /// Lists every sandbox of sessions, running or dead, so that orphans can be found.
    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError>;

    /// Lists every running standalone sandbox with the user who created it. Standalone sandboxes
    /// count against the sandbox limits too.
    async fn list_standalone(&self) -> Result<Vec<(SandboxId, Option<String>)>, ProviderError> {
        Ok(Vec::new())
    }

    /// Whether the image or snapshot exists.
    async fn can_start_from(&self, from: &StartFrom) -> Result<bool, ProviderError>;

    /// `None` when this provider cannot snapshot a running sandbox.
    fn snapshots(&self) -> Option<&dyn Snapshots>;

    /// `None` when this provider manages its snapshots by itself.
    fn disks(&self) -> Option<&dyn Disks> {
        None
    }

    /// Counts of standby processes; `None` when the provider keeps none or does not answer.
    async fn standby(&self) -> Option<StandbyCounts> {
        None
    }

    /// `None` when sandboxes of this provider cannot be frozen.
    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        None
    }
}

/// Freezes the processes of a sandbox, except its supervisor, which keeps answering.
#[async_trait]
pub trait FreezeControl: Send + Sync {
    /// Freezes everything but the supervisor until [`FreezeControl::thaw`]. A freeze that is not
    /// renewed within `hold` ends by itself, because its requester may have died.
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), ProviderError>;

    /// Thaws the sandbox. Idempotent. A freeze in flight fails.
    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), ProviderError>;

    /// Thaws the sandbox unless it is frozen for a snapshot, which thaws it when done. Idempotent.
    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), ProviderError>;
}

/// Takes snapshots of running sandboxes.
#[async_trait]
pub trait Snapshots: Send + Sync {
    /// Freezes, captures, thaws. Idempotent by snapshot id. Returns the milliseconds spent frozen.
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<u64, ProviderError>;

    /// Deletes a snapshot; its layers are deleted when nothing uses them. Idempotent.
    async fn snapshot_remove(&self, snapshot: &SnapshotId) -> Result<(), ProviderError>;
}

/// Counts of preforked standby processes since the zygote started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StandbyCounts {
    /// Standby processes available now.
    pub ready: u64,
    pub preforked: u64,
    /// Starts that used a standby process.
    pub used: u64,
    /// Starts that found none available.
    pub missed: u64,
}

/// A stream to a supervisor.
pub trait BridgeStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> BridgeStream for T {}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartSpec {
    /// Chosen and stored before the sandbox exists, so that a crash leaves no orphan.
    pub sandbox: SandboxId,
    pub from: StartFrom,
    /// The repository whose state volume is mounted at `/mnt/state`. State outlives sandboxes and
    /// is in no snapshot; a host without room for it starts the sandbox without.
    pub state: Option<RepositoryName>,
}

/// The origin of a sandbox's disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFrom {
    Image(String),
    Snapshot(SnapshotId),
}

/// A running sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The socket on which the gateway accepts this sandbox's outgoing connections.
    pub door: PathBuf,
}

/// The state of a sandbox, as the provider finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Running(Started),
    /// Exited; its disk still exists and `snapshot_and_remove` can save it.
    Dead {
        reason: String,
    },
    Gone,
}

#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    #[error("image `{image}` is not on this host")]
    ImageMissing { image: String },
    #[error("snapshot {snapshot} is not on this host")]
    SnapshotMissing { snapshot: SnapshotId },
    /// The sandbox is unknown or has exited.
    #[error("sandbox {sandbox} is not running")]
    NotRunning { sandbox: SandboxId },
    #[error("{doing}")]
    Failed { doing: String, source: Box<dyn std::error::Error + Send + Sync> },
}
