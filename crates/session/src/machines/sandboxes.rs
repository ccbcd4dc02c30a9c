//! Sandboxes of one's own, as a host offers them.

use async_trait::async_trait;
use harvest_proto::{
    SandboxId, SnapshotId,
    api::machines::{
        CreateSandbox, CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxList,
        SandboxSnapshot,
    },
};

use super::MachineError;
use crate::provider::BridgeStream;

/// A sandbox to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSandbox {
    /// Its id, chosen before it exists, so that a crash leaves no stranger.
    pub id: SandboxId,
    /// The user who asks for it; nobody where there is no server to know them.
    pub made_by: Option<String>,
    /// What it is to be.
    pub order: CreateSandbox,
}

/// Forks to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forks {
    /// Their ids, chosen before they exist.
    pub ids: Vec<SandboxId>,
    /// The user who asks for them.
    pub made_by: Option<String>,
    /// What their disks begin as; it is there only while they are made.
    pub through: SnapshotId,
}

/// A sandbox for one command.
pub struct Fresh {
    /// What was made.
    pub made: CreatedSandbox,
    /// A stream to its supervisor, which is of this version.
    pub bridge: Box<dyn BridgeStream>,
}

/// Makes, finds, keeps and ends sandboxes that no session has. Those of sessions are listed too, and
/// nothing is done to them that their session would miss.
#[async_trait]
pub trait Sandboxes: Send + Sync {
    /// Starts one that stays until somebody deletes it; its supervisor can be dialled when this returns.
    async fn sandbox_create(&self, new: NewSandbox) -> Result<CreatedSandbox, MachineError>;

    /// Starts one that lives at most as long as this process, and dials it: nothing of it is left then,
    /// however the process ends.
    async fn sandbox_fresh(&self, new: NewSandbox) -> Result<Fresh, MachineError>;

    /// Every sandbox, newest first.
    async fn sandbox_list(&self) -> Result<SandboxList, MachineError>;

    /// One of them.
    async fn sandbox_get(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError>;

    /// Ends it and throws its disk away. With `force` also one that is a session's, or of which nothing is
    /// known.
    async fn sandbox_delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), MachineError>;

    /// Ends what runs in it; its disk stays. Idempotent.
    async fn sandbox_stop(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError>;

    /// Starts one that was stopped or died, with the disk it left. Idempotent.
    async fn sandbox_start(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError>;

    /// Keeps the disk of one that goes on, under this id; durable when this returns.
    async fn sandbox_snapshot(
        &self,
        sandbox: &SandboxId,
        kept: SnapshotId,
    ) -> Result<SandboxSnapshot, MachineError>;

    /// Starts others from its disk as it is now.
    async fn sandbox_fork(
        &self,
        sandbox: &SandboxId,
        forks: Forks,
    ) -> Result<ForkedSandbox, MachineError>;

    /// Puts it back to a snapshot. What was on its disk is another snapshot before anything is let go.
    async fn sandbox_restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, MachineError>;

    /// Dials its supervisor.
    async fn sandbox_dial(
        &self,
        sandbox: &SandboxId,
    ) -> Result<Box<dyn BridgeStream>, MachineError>;

    /// Waits until it has ended, however it ends.
    async fn sandbox_ended(&self, sandbox: &SandboxId) -> Result<(), MachineError>;

    /// Why one that can no longer be spoken with went away, as far as anyone knows.
    async fn sandbox_why(&self, sandbox: &SandboxId) -> Option<String>;

    /// The limit for which what ran in it was last stopped; `None` when it never was.
    async fn sandbox_overdrawn(&self, sandbox: &SandboxId) -> Option<String>;
}
