//! What a session needs of a machine: start it, find it again, keep it, end it. Everything else goes
//! over the bridge and works the same on every provider.

use std::{path::PathBuf, time::Duration};

use async_trait::async_trait;
use harvest_proto::{SandboxId, SnapshotId, event::SnapshotKind};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::disks::Disks;

/// Starts, finds, keeps and ends sandboxes.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Starts a sandbox whose supervisor can be dialled when this returns.
    async fn start(&self, order: StartOrder) -> Result<Started, ProviderError>;

    /// Whether a sandbox started earlier, perhaps by another server process, still runs.
    async fn find(&self, sandbox: &SandboxId) -> Result<Found, ProviderError>;

    /// Dials its supervisor.
    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError>;

    /// Waits until a sandbox has ended, however it ends, and says why.
    async fn ended(&self, sandbox: &SandboxId) -> Result<String, ProviderError>;

    /// Ends a sandbox and keeps its disk under `snapshot`, in one act: O(1) where the machine can.
    /// Also takes what a sandbox left that died by itself. Idempotent.
    async fn end_kept(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), ProviderError>;

    /// Ends a sandbox and throws its disk away. Idempotent; a sandbox nobody knows is gone already.
    async fn end(&self, sandbox: &SandboxId) -> Result<(), ProviderError>;

    /// Every sandbox this provider holds, running or dead, so that none is without an owner.
    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError>;

    /// Every sandbox that runs, stays until somebody ends it and is no session's, each with the user who made it:
    /// it takes a place like any other.
    async fn others(&self) -> Result<Vec<(SandboxId, Option<String>)>, ProviderError> {
        Ok(Vec::new())
    }

    /// Whether there is something to start from under this name.
    async fn holds(&self, from: &StartFrom) -> Result<bool, ProviderError>;

    /// `None` when this provider cannot keep the disk of a sandbox that goes on running.
    fn snapshots(&self) -> Option<&dyn Snapshots>;

    /// `None` when this provider looks after the disks it keeps by itself.
    fn disks(&self) -> Option<&dyn Disks> {
        None
    }

    /// How well it was prepared for starts; `None` when it does not prepare, or does not say.
    async fn seeds(&self) -> Option<Seeds> {
        None
    }

    /// `None` when what runs in a sandbox of this provider cannot be made to stand still.
    fn freezing(&self) -> Option<&dyn Freezing> {
        None
    }
}

/// Makes what runs in a sandbox stand still. Its supervisor goes on and answers.
#[async_trait]
pub trait Freezing: Send + Sync {
    /// Everything but the supervisor stands still when this answers, until [`Freezing::thaw`] or until
    /// nobody has asked again for as long as `hold`: whoever asked may be dead.
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), ProviderError>;

    /// It goes on. Idempotent. A freeze that is being waited for fails.
    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), ProviderError>;

    /// It goes on, whoever made it stand still, unless that is for keeping its disk. Idempotent.
    async fn rouse(&self, sandbox: &SandboxId) -> Result<(), ProviderError>;
}

/// Keeps the disk of a running sandbox.
#[async_trait]
pub trait Snapshots: Send + Sync {
    /// Freezes, captures, thaws. Idempotent by snapshot id. Answers how long the machine stood still.
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<u64, ProviderError>;

    /// Forgets a snapshot; its layers go when nothing uses them. Idempotent.
    async fn remove(&self, snapshot: &SnapshotId) -> Result<(), ProviderError>;
}

/// Processes on their way to becoming a sandbox, since whoever grows them was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seeds {
    /// Waiting for a start now.
    pub ready: u64,
    /// Grown ahead of time.
    pub grown: u64,
    /// Starts that took one.
    pub used: u64,
    /// Starts that found none.
    pub missed: u64,
}

/// A stream to a supervisor.
pub trait BridgeStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> BridgeStream for T {}

/// What to start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartOrder {
    /// The sandbox's id, chosen and stored before it exists, so that a crash leaves no stranger.
    pub sandbox: SandboxId,
    /// What its disk begins as.
    pub from: StartFrom,
    /// Whose state it has at `/mnt/state`, a repository's name; `None` for none. State outlives sandboxes
    /// and is in no snapshot; a machine that has no room for it starts the sandbox without.
    pub state: Option<String>,
}

/// What a sandbox's disk begins as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFrom {
    /// A named image.
    Image(String),
    /// A snapshot.
    Snapshot(SnapshotId),
}

/// A sandbox that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Started {
    /// The socket on which the gateway takes this sandbox's outgoing connections.
    pub door: PathBuf,
}

/// What became of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    /// It runs.
    Running(Started),
    /// It is dead; its disk is there still and can be taken with `end_kept`.
    Dead {
        /// Why it died, as far as anyone knows.
        reason: String,
    },
    /// Nothing is left of it.
    Gone,
}

/// Why a provider could not do it.
#[derive(Debug, thiserror::Error)]
pub enum ProviderError {
    /// The image is not there.
    #[error("image `{image}` is not on this host")]
    ImageMissing {
        /// Its name.
        image: String,
    },
    /// The snapshot is not there.
    #[error("snapshot {snapshot} is not on this host")]
    SnapshotMissing {
        /// Its id.
        snapshot: SnapshotId,
    },
    /// Nobody knows this sandbox, or it has ended.
    #[error("sandbox {sandbox} does not run")]
    NotRunning {
        /// Its id.
        sandbox: SandboxId,
    },
    /// The machine said no.
    #[error("{doing}")]
    Machine {
        /// What was being done.
        doing: String,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
