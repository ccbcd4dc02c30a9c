//! Ephemeral sandboxes: they build a repository, check a pushed commit or compare snapshots, and
//! are removed afterwards. After a crash, startup finds them as orphans and removes them.

use std::{any::Any, collections::BTreeMap, sync::Arc, time::Duration};

use harvest_gateway::ledger::DoorPolicy;
use harvest_proto::{
    BranchName, EventBody, RepositoryName, SandboxId, SessionId, SnapshotId,
    bridge::{Boot, BootStart, BridgeRole, Checkout, ToSupervisor},
    event::{BootPhase, PhaseStatus, SnapshotKind},
};
use tokio::sync::{SemaphorePermit, mpsc};

use crate::{
    bridge::{Bridge, BridgeError, OpenedBridge, OwnerMessage},
    context::{Shared, error_chain, remote},
    provider::{ProviderError, StartFrom, StartSpec, Started},
};

#[derive(Debug, thiserror::Error)]
pub(crate) enum EphemeralError {
    #[error("the sandbox provider failed")]
    Provider(#[from] ProviderError),
    #[error("the sandbox failed")]
    Bridge(#[from] BridgeError),
    #[error("the sandbox's door cannot be opened")]
    Door(#[source] std::io::Error),
    #[error("boot phase `{phase}` failed\n{tail}")]
    Boot { phase: String, tail: String },
    #[error("not done after {} s", .limit.as_secs())]
    TimedOut { limit: Duration },
    #[error("{0}")]
    Other(String),
}

impl Shared {
    /// Waits for a free build-or-check slot.
    pub(crate) async fn check_slot(&self) -> Result<SemaphorePermit<'_>, EphemeralError> {
        self.checks.acquire().await.map_err(|closed| EphemeralError::Other(closed.to_string()))
    }
}

/// A sandbox that belongs to no session. Removed when dropped.
pub(crate) struct EphemeralSandbox {
    shared: Arc<Shared>,
    sandbox: SandboxId,
    pub(crate) bridge: Bridge,
    events: mpsc::Receiver<OwnerMessage>,
    _door: Option<Box<dyn Any + Send>>,
    removed: bool,
}

impl EphemeralSandbox {
    /// Starts a sandbox and opens its bridge. Without a pass it has no network.
    pub(crate) async fn start(
        shared: &Arc<Shared>,
        sandbox: SandboxId,
        from: StartFrom,
        pass: Option<DoorPolicy>,
    ) -> Result<Self, EphemeralError> {
        // Armed before anything can fail, so that a started sandbox is always removed.
        let mut cleanup =
            RemoveOnDrop { shared: Arc::clone(shared), sandbox: Some(sandbox.clone()) };
        shared.ephemeral.lock().expect("no holder of this lock can panic").insert(sandbox.clone());
        // No state volume: content that sessions leave there must not end up in an image.
        let order = StartSpec { sandbox: sandbox.clone(), from, state: None };
        let started = start(shared, order).await?;
        let door = pass.map(|pass| shared.doors.open(&started.door, pass)).transpose();
        let door = door.map_err(EphemeralError::Door)?;
        let stream = shared.provider.dial(&sandbox).await?;
        let role = BridgeRole::Owner { lease: shared.lease.0, epoch: 1, stored: 0 };
        let opened = Bridge::open(stream, role, Some(shared.config.timeouts.liveness())).await?;
        let OpenedBridge { bridge, events, .. } = opened;
        cleanup.sandbox = None;
        Ok(Self {
            shared: Arc::clone(shared),
            sandbox,
            bridge,
            events,
            _door: door,
            removed: false,
        })
    }

    /// Boots the sandbox and reports each phase as it starts.
    pub(crate) async fn boot(
        &mut self,
        repository: &RepositoryName,
        base: Option<BranchName>,
        start: BootStart,
        mut report: impl FnMut(&str),
    ) -> Result<(), EphemeralError> {
        let boot = Boot {
            session: SessionId::random(),
            epoch: 1,
            start,
            repositories: vec![Checkout {
                name: repository.clone(),
                remote: remote(repository),
                base,
                branch: None,
                clone_missing: false,
            }],
            agent: None,
            env: BTreeMap::new(),
            hook_millis: None,
        };
        self.bridge.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot) }).await?;
        while let Some(message) = self.events.recv().await {
            let OwnerMessage::Event(event) = message else { continue };
            self.bridge.send(ToSupervisor::EventsStored { upto: event.number });
            let EventBody::BootPhase { phase, status, tail, .. } = event.body else { continue };
            let name =
                serde_json::to_string(&phase).unwrap_or_default().trim_matches('"').to_owned();
            match status {
                PhaseStatus::Failed => {
                    return Err(EphemeralError::Boot {
                        phase: name,
                        tail: tail.unwrap_or_default(),
                    });
                }
                PhaseStatus::Done if phase == BootPhase::Ready => return Ok(()),
                PhaseStatus::Started => report(&name),
                PhaseStatus::Done | PhaseStatus::Skipped => {}
            }
        }
        Err(BridgeError::Lost.into())
    }

    /// Removes the sandbox and saves its disk as a snapshot.
    pub(crate) async fn save(mut self, snapshot: &SnapshotId) -> Result<(), EphemeralError> {
        self.shared
            .provider
            .snapshot_and_remove(&self.sandbox, snapshot, SnapshotKind::Build)
            .await?;
        self.mark_removed();
        Ok(())
    }

    pub(crate) async fn remove(mut self) -> Result<(), EphemeralError> {
        self.shared.provider.remove(&self.sandbox).await?;
        self.mark_removed();
        Ok(())
    }

    fn mark_removed(&mut self) {
        self.removed = true;
        unregister(&self.shared, &self.sandbox);
    }
}

/// Starts in a tracked task, so that a dropped caller cannot cancel a start halfway: shutdown waits
/// for the task and then removes the sandbox.
async fn start(shared: &Arc<Shared>, order: StartSpec) -> Result<Started, EphemeralError> {
    let provider = Arc::clone(&shared.provider);
    let started = shared.tracker.spawn(async move { provider.start(order).await }).await;
    Ok(started.map_err(|panicked| EphemeralError::Other(panicked.to_string()))??)
}

fn unregister(shared: &Shared, sandbox: &SandboxId) {
    shared.ephemeral.lock().expect("no holder of this lock can panic").remove(sandbox);
}

impl Drop for EphemeralSandbox {
    fn drop(&mut self) {
        if !self.removed {
            drop(RemoveOnDrop {
                shared: Arc::clone(&self.shared),
                sandbox: Some(self.sandbox.clone()),
            });
        }
    }
}

/// Removes a sandbox in the background when dropped.
struct RemoveOnDrop {
    shared: Arc<Shared>,
    sandbox: Option<SandboxId>,
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let Some(sandbox) = self.sandbox.take() else { return };
        let shared = Arc::clone(&self.shared);
        self.shared.spawn(async move {
            match shared.provider.remove(&sandbox).await {
                Ok(()) => unregister(&shared, &sandbox),
                Err(error) => {
                    tracing::warn!(%sandbox, error = error_chain(&error), "cannot remove an ephemeral sandbox");
                }
            }
        });
    }
}
