//! The sandbox provider: creates, finds, connects to, stops and removes sandboxes. Commands, files,
//! terminals and agents go over the bridge and work the same on every provider.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use async_trait::async_trait;
use harvest_gateway::DoorListener;
use harvest_proto::{
    EventBody, SandboxId, SnapshotId,
    api::{Sandbox, SandboxList, SandboxOwner},
    event::SnapshotKind,
};
use tokio::io::{AsyncRead, AsyncWrite};

use super::{Host, SandboxError, SandboxSpec, Snapshots, StandaloneDoors, StartFrom};

/// Runs sandboxes somewhere. What a provider may lack is an optional value.
#[async_trait]
pub trait SandboxProvider: Send + Sync {
    /// The name under which sessions remember their provider.
    fn name(&self) -> &'static str;

    /// Sets what opens the doors of sandboxes that the provider starts itself, such as those of
    /// build steps.
    fn set_doors(&self, _opener: Arc<dyn StandaloneDoors>) {}

    /// Creates and starts a sandbox; its supervisor accepts connections on return.
    async fn create(&self, spec: SandboxSpec) -> Result<Created, SandboxError>;

    /// As [`SandboxProvider::create`], with a first connection; a provider may save a step.
    async fn create_connected(
        &self,
        spec: SandboxSpec,
    ) -> Result<(Created, Box<dyn BridgeStream>), SandboxError> {
        let id = spec.id.clone();
        Ok((self.create(spec).await?, self.connect(&id).await?))
    }

    /// Whether a sandbox created earlier, perhaps by another server process, still runs.
    async fn find(&self, sandbox: &SandboxId) -> Result<Found, SandboxError>;

    /// Describes a sandbox.
    async fn get(&self, sandbox: &SandboxId) -> Result<Sandbox, SandboxError>;

    /// Describes every sandbox, newest first.
    async fn get_all(&self) -> Result<SandboxList, SandboxError>;

    /// Lists every sandbox, running or dead, with its owner. Cheaper than
    /// [`SandboxProvider::get_all`]; a sandbox whose owner is unknown is left out.
    async fn list(&self) -> Result<Vec<ListedSandbox>, SandboxError>;

    /// Connects to the sandbox's supervisor.
    async fn connect(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, SandboxError>;

    /// Listens for the connections that the sandbox opens, in place of an earlier listener.
    async fn listen(&self, sandbox: &SandboxId) -> Result<Box<dyn DoorListener>, SandboxError>;

    /// Waits until a sandbox has exited, for whatever reason, and returns that reason.
    async fn wait(&self, sandbox: &SandboxId) -> Result<String, SandboxError>;

    /// Stops a sandbox; its disk stays. Idempotent.
    async fn stop(&self, sandbox: &SandboxId) -> Result<(), SandboxError>;

    /// Starts a stopped or dead sandbox with the disk it left. Idempotent.
    async fn restart(&self, sandbox: &SandboxId) -> Result<(), SandboxError>;

    /// Stops a sandbox and turns its disk into `snapshot` in one step. Also works on a sandbox that
    /// died by itself. Idempotent.
    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), SandboxError>;

    /// Stops a sandbox and deletes its disk. Idempotent: an unknown sandbox counts as removed.
    async fn remove(&self, sandbox: &SandboxId) -> Result<(), SandboxError>;

    /// The agents that the image or snapshot states, with their versions; `None` when it does not
    /// exist.
    async fn agents(
        &self,
        from: &StartFrom,
    ) -> Result<Option<BTreeMap<String, String>>, SandboxError>;

    /// Whether the image or snapshot exists.
    async fn can_start_from(&self, from: &StartFrom) -> Result<bool, SandboxError> {
        Ok(self.agents(from).await?.is_some())
    }

    /// The limit for which the sandbox's processes were last killed, if any.
    async fn exceeded_limit(&self, _: &SandboxId) -> Option<String> {
        None
    }

    /// What a sandbox uses; also after its end, until it is removed. `None` when the provider does
    /// not know.
    async fn usage(&self, _: &SandboxId) -> Result<Option<ComputeUsage>, SandboxError> {
        Ok(None)
    }

    /// `None` when running sandboxes cannot be saved, or snapshots not be managed.
    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }

    /// `None` when sandboxes cannot be frozen.
    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        None
    }

    /// Images, volumes and disks of the machine; `None` when there is no such machine.
    fn host(&self) -> Option<&dyn Host> {
        None
    }
}

/// Freezes the processes of a sandbox, except its supervisor, which keeps answering.
#[async_trait]
pub trait FreezeControl: Send + Sync {
    /// Freezes everything but the supervisor until [`FreezeControl::thaw`]. A freeze that is not
    /// renewed within `hold` ends by itself, because its requester may have died.
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), SandboxError>;

    /// Thaws the sandbox. Idempotent. A freeze in flight fails.
    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), SandboxError>;

    /// Thaws the sandbox unless it is frozen for a snapshot, which thaws it when done. Idempotent.
    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), SandboxError>;
}

/// A stream to a supervisor.
pub trait BridgeStream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> BridgeStream for T {}

/// A new sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Created {
    /// Features that the provider cannot give it.
    pub warnings: Vec<String>,
}

impl Created {
    /// The events that tell a session what its sandbox lacks.
    pub(crate) fn events(warnings: &[String]) -> impl Iterator<Item = EventBody> {
        let warning =
            |missing| EventBody::Warning { message: format!("the sandbox starts {missing}") };
        warnings.iter().map(warning)
    }
}

/// What a sandbox uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComputeUsage {
    /// CPU time since its start.
    pub cpu_micros: u64,
    /// Its memory now.
    pub memory_bytes: u64,
}

/// The state of a sandbox, as the provider finds it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Running,
    /// Exited; its disk still exists and `snapshot_and_remove` can save it.
    Dead {
        reason: String,
    },
    Gone,
}

/// A sandbox and what it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedSandbox {
    pub id: SandboxId,
    pub owner: SandboxOwner,
    pub made_by: Option<String>,
}
