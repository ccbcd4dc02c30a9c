//! The trait for standalone sandboxes.

use async_trait::async_trait;
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{
        CreateSandbox, CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxList,
        SandboxSnapshot,
    },
};

use super::HostError;
use crate::provider::BridgeStream;

/// A sandbox to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSandbox {
    /// Chosen before the sandbox exists, so that a crash leaves no orphan.
    pub id: SandboxId,
    /// The user who creates it; `None` without a server.
    pub made_by: Option<String>,
    pub order: CreateSandbox,
}

/// Forks to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkSpec {
    /// Chosen before the forks exist.
    pub ids: Vec<SandboxId>,
    /// The user who creates them.
    pub made_by: Option<String>,
    /// The snapshot they start from; removed once they run.
    pub snapshot: SnapshotId,
}

/// A sandbox that lives no longer than this process.
pub struct CreatedEphemeral {
    pub created: CreatedSandbox,
    /// A stream to its supervisor, which has this version.
    pub bridge: Box<dyn BridgeStream>,
}

/// Manages standalone sandboxes. Those of sessions are listed too, but most operations refuse them.
#[async_trait]
pub trait Sandboxes: Send + Sync {
    /// Starts a sandbox that stays until it is deleted; its supervisor accepts connections on
    /// return.
    async fn sandbox_create(&self, new: NewSandbox) -> Result<CreatedSandbox, HostError>;

    /// Starts a sandbox and connects to it. The sandbox is removed when this process ends, however
    /// it ends.
    async fn sandbox_create_ephemeral(
        &self,
        new: NewSandbox,
    ) -> Result<CreatedEphemeral, HostError>;

    /// Lists every sandbox, newest first.
    async fn sandbox_list(&self) -> Result<SandboxList, HostError>;

    async fn sandbox_get(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError>;

    /// Stops a sandbox and deletes its disk. `force` includes a session's sandbox and one whose
    /// record is unreadable.
    async fn sandbox_delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), HostError>;

    /// Stops a sandbox; its disk stays. Idempotent.
    async fn sandbox_stop(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError>;

    /// Restarts a stopped or dead sandbox with its disk. Idempotent.
    async fn sandbox_start(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError>;

    /// Takes a snapshot of a running sandbox under the given id; durable on return.
    async fn sandbox_snapshot(
        &self,
        sandbox: &SandboxId,
        snapshot: SnapshotId,
    ) -> Result<SandboxSnapshot, HostError>;

    /// Starts new sandboxes from the current disk of this one.
    async fn sandbox_fork(
        &self,
        sandbox: &SandboxId,
        forks: ForkSpec,
    ) -> Result<ForkedSandbox, HostError>;

    /// Restores a sandbox to a snapshot, after saving its current disk as another snapshot.
    async fn sandbox_restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, HostError>;

    /// Connects to the sandbox's supervisor.
    async fn sandbox_dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, HostError>;

    /// Waits until the sandbox has exited.
    async fn sandbox_wait(&self, sandbox: &SandboxId) -> Result<(), HostError>;

    /// Why an unreachable sandbox exited, if known.
    async fn sandbox_exit_reason(&self, sandbox: &SandboxId) -> Option<String>;

    /// The limit for which its processes were last killed, if any.
    async fn sandbox_exceeded_limit(&self, sandbox: &SandboxId) -> Option<String>;
}
