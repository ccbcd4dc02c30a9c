//! Ephemeral sandboxes: they build a repository, check a pushed commit or compare snapshots, and
//! are removed afterwards. After a crash, startup finds them as orphans and removes them.

use std::{any::Any, collections::BTreeMap, sync::Arc, time::Duration};

use harvest_gateway::{DoorObserver, ledger::DoorPolicy};
use harvest_proto::{
    BranchName, EventBody, RepositoryName, SandboxId, SessionId, SnapshotId,
    bridge::{Author, Boot, BootStart, BridgeRole, Checkout, ToSupervisor},
    event::{BootFailure, BootPhase, PhaseStatus, SnapshotKind},
};
use harvest_store::ComputeOwner;
use tokio::sync::mpsc;

use crate::{
    bridge::{Bridge, BridgeError, OpenedBridge, OwnerMessage},
    git_remote::remote,
    sandbox_context::SandboxContext,
    sandboxes::{EphemeralGuard, SandboxError, SandboxSpec, StartFrom, StateVolume},
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum EphemeralError {
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("timed out after {} s", .limit.as_secs())]
    TimedOut { limit: Duration },
    #[error("{0}")]
    Other(String),
}

impl From<BridgeError> for EphemeralError {
    fn from(error: BridgeError) -> Self {
        Self::Sandbox(error.into())
    }
}

/// The door of a sandbox that belongs to no session. Events go to the observer if there is one,
/// else to the session in the policy.
pub(crate) struct EphemeralDoor {
    pub(crate) policy: DoorPolicy,
    pub(crate) observer: Option<DoorObserver>,
}

/// A sandbox that belongs to no session. Removed when dropped.
pub(crate) struct EphemeralSandbox {
    shared: Arc<SandboxContext>,
    guard: EphemeralGuard,
    pub(crate) bridge: Bridge,
    events: mpsc::Receiver<OwnerMessage>,
    _door: Option<Box<dyn Any + Send>>,
}

impl EphemeralSandbox {
    /// Starts a sandbox and opens its bridge. Without a door it has no network. What it uses counts
    /// for `owner`.
    pub(crate) async fn start(
        shared: &Arc<SandboxContext>,
        sandbox: SandboxId,
        from: StartFrom,
        door: Option<EphemeralDoor>,
        owner: ComputeOwner,
    ) -> Result<Self, EphemeralError> {
        // No state volume: content that sessions leave there must not end up in an image.
        let spec = SandboxSpec::of_session(sandbox, from, shared.resources);
        Self::start_spec(shared, spec, door, owner).await
    }

    /// Starts a sandbox without a network that has this state volume.
    pub(crate) async fn start_with_state(
        shared: &Arc<SandboxContext>,
        sandbox: SandboxId,
        from: StartFrom,
        state: StateVolume,
        owner: ComputeOwner,
    ) -> Result<Self, EphemeralError> {
        let spec = SandboxSpec {
            state: Some(state),
            ..SandboxSpec::of_session(sandbox, from, shared.resources)
        };
        Self::start_spec(shared, spec, None, owner).await
    }

    async fn start_spec(
        shared: &Arc<SandboxContext>,
        spec: SandboxSpec,
        door: Option<EphemeralDoor>,
        owner: ComputeOwner,
    ) -> Result<Self, EphemeralError> {
        let sandbox = spec.id.clone();
        let (guard, _, stream) = shared.service.create_ephemeral(spec, None).await?;
        shared.meter.begin(sandbox.clone(), owner);
        let door = match door {
            Some(EphemeralDoor { policy, observer }) => {
                let listener = shared.provider.listen(&sandbox).await?;
                Some(shared.doors.open(listener, policy, observer, None))
            }
            None => None,
        };
        let role = BridgeRole::Owner { lease: shared.lease.0, epoch: 1, stored: 0 };
        let opened = Bridge::open(stream, role, Some(shared.timeouts.liveness())).await?;
        let OpenedBridge { bridge, events, .. } = opened;
        Ok(Self { shared: Arc::clone(shared), guard, bridge, events, _door: door })
    }

    /// Boots the sandbox and reports its events. An error of the observer ends the boot.
    pub(crate) async fn boot(
        &mut self,
        (repository, url): (&RepositoryName, String),
        base: Option<BranchName>,
        start: BootStart,
        author: Option<&Author>,
        mut observe: impl FnMut(&EventBody) -> Result<(), EphemeralError>,
    ) -> Result<(), EphemeralError> {
        let boot = Boot {
            session: SessionId::random(),
            epoch: 1,
            start,
            author: author.cloned(),
            repositories: vec![Checkout {
                name: repository.clone(),
                folder: repository.folder(),
                remote: remote(repository),
                url: Some(url),
                base,
                branch: None,
                clone_missing: false,
            }],
            agent: None,
            mcp_servers: Vec::new(),
            git_hosts: self.shared.doors.git_hosts(),
            env: BTreeMap::new(),
            hook_millis: None,
            standby: false,
        };
        self.bridge.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).await?;
        while let Some(message) = self.events.recv().await {
            let OwnerMessage::Event(event) = message else { continue };
            self.bridge.send(ToSupervisor::EventsStored { upto: event.number });
            observe(&event.body)?;
            let EventBody::BootPhase { phase, status, tail, failure, .. } = event.body else {
                continue;
            };
            if let Some(BootFailure { message, .. }) = failure {
                let lines = [message, tail.unwrap_or_default()].join("\n");
                return Err(EphemeralError::Other(lines.trim_end().to_owned()));
            }
            if (phase, status) == (BootPhase::Ready, PhaseStatus::Done) {
                return Ok(());
            }
        }
        Err(BridgeError::Lost.into())
    }

    /// Removes the sandbox and saves its disk as a snapshot.
    pub(crate) async fn save(
        self,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), EphemeralError> {
        let sandbox = self.guard.sandbox();
        self.shared.meter.end(sandbox).await;
        self.shared.provider.snapshot_and_remove(sandbox, snapshot, kind).await?;
        self.guard.forget();
        Ok(())
    }

    pub(crate) async fn remove(self) {
        self.guard.remove().await;
    }
}
