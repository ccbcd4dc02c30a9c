//! Sandboxes that belong to no session: they build a repository or check a pushed commit, and are
//! gone afterwards. After a crash they are found without an owner and ended.

use std::{any::Any, collections::BTreeMap, sync::Arc, time::Duration};

use harvest_gateway::ledger::Pass;
use harvest_proto::{
    EventBody, SandboxId, SessionId, SnapshotId,
    bridge::{Boot, BootStart, Checkout, Role, ToSupervisor},
    event::{BootPhase, PhaseStatus, SnapshotKind},
};
use tokio::sync::{SemaphorePermit, mpsc};

use crate::{
    bridge::{Bridge, BridgeError, FromBridge, Opened},
    provider::{ProviderError, StartFrom, StartOrder, Started},
    wiring::{Shared, remote, words},
};

/// Why a hidden sandbox could not be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HiddenError {
    #[error("the machine failed")]
    Provider(#[from] ProviderError),
    #[error("the sandbox failed")]
    Bridge(#[from] BridgeError),
    #[error("the sandbox's door cannot be opened")]
    Door(#[source] std::io::Error),
    #[error("phase {phase} failed\n{tail}")]
    Boot { phase: String, tail: String },
    #[error("not done after {} s", .limit.as_secs())]
    TimedOut { limit: Duration },
    #[error("{0}")]
    Other(String),
}

impl Shared {
    /// Waits until another build or check may run, and holds its room.
    pub(crate) async fn room_for_check(&self) -> Result<SemaphorePermit<'_>, HiddenError> {
        self.checks.acquire().await.map_err(|closed| HiddenError::Other(closed.to_string()))
    }
}

/// A sandbox that belongs to no session. Ended when dropped.
pub(crate) struct Hidden {
    shared: Arc<Shared>,
    sandbox: SandboxId,
    pub(crate) bridge: Bridge,
    events: mpsc::Receiver<FromBridge>,
    _door: Option<Box<dyn Any + Send>>,
    over: bool,
}

impl Hidden {
    /// Starts one and says hello; without a pass it has no way out.
    pub(crate) async fn start(
        shared: &Arc<Shared>,
        sandbox: SandboxId,
        from: StartFrom,
        pass: Option<Pass>,
    ) -> Result<Self, HiddenError> {
        // Before anything can fail: whatever was started is ended.
        let mut ending = EndLater { shared: Arc::clone(shared), sandbox: Some(sandbox.clone()) };
        shared.hidden.lock().expect("no holder of this lock can panic").insert(sandbox.clone());
        // Without state: what sessions leave there must not find its way into an image.
        let order = StartOrder { sandbox: sandbox.clone(), from, state: None };
        let started = start(shared, order).await?;
        let door = pass.map(|pass| shared.doors.open(&started.door, pass)).transpose();
        let door = door.map_err(HiddenError::Door)?;
        let stream = shared.provider.dial(&sandbox).await?;
        let role = Role::Owner { lease: shared.lease.0, epoch: 1, stored: 0 };
        let opened = Bridge::open(stream, role, Some(shared.config.clocks.pulse())).await?;
        let Opened { bridge, events, .. } = opened;
        ending.sandbox = None;
        Ok(Self { shared: Arc::clone(shared), sandbox, bridge, events, _door: door, over: false })
    }

    /// Gets it ready, telling each phase as it comes.
    pub(crate) async fn boot(
        &mut self,
        repository: &str,
        base: Option<String>,
        start: BootStart,
        mut tell: impl FnMut(&str),
    ) -> Result<(), HiddenError> {
        let boot = Boot {
            session: SessionId::random(),
            epoch: 1,
            start,
            repositories: vec![Checkout {
                name: repository.to_owned(),
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
        while let Some(heard) = self.events.recv().await {
            let FromBridge::Event(event) = heard else { continue };
            self.bridge.say(ToSupervisor::EventsStored { upto: event.number });
            let EventBody::BootPhase { phase, status, tail, .. } = event.body else { continue };
            let name =
                serde_json::to_string(&phase).unwrap_or_default().trim_matches('"').to_owned();
            match status {
                PhaseStatus::Failed => {
                    return Err(HiddenError::Boot { phase: name, tail: tail.unwrap_or_default() });
                }
                PhaseStatus::Done if phase == BootPhase::Ready => return Ok(()),
                PhaseStatus::Started => tell(&name),
                PhaseStatus::Done | PhaseStatus::Skipped => {}
            }
        }
        Err(BridgeError::Lost.into())
    }

    /// Ends it and keeps its disk.
    pub(crate) async fn keep(mut self, snapshot: &SnapshotId) -> Result<(), HiddenError> {
        self.shared.provider.end_kept(&self.sandbox, snapshot, SnapshotKind::Build).await?;
        self.is_over();
        Ok(())
    }

    /// Ends it.
    pub(crate) async fn end(mut self) -> Result<(), HiddenError> {
        self.shared.provider.end(&self.sandbox).await?;
        self.is_over();
        Ok(())
    }

    fn is_over(&mut self) {
        self.over = true;
        forget(&self.shared, &self.sandbox);
    }
}

/// Goes on when nobody waits any more: closing waits for it, and then ends what came of it.
async fn start(shared: &Arc<Shared>, order: StartOrder) -> Result<Started, HiddenError> {
    let provider = Arc::clone(&shared.provider);
    let started = shared.tracker.spawn(async move { provider.start(order).await }).await;
    Ok(started.map_err(|panicked| HiddenError::Other(panicked.to_string()))??)
}

fn forget(shared: &Shared, sandbox: &SandboxId) {
    shared.hidden.lock().expect("no holder of this lock can panic").remove(sandbox);
}

impl Drop for Hidden {
    fn drop(&mut self) {
        if !self.over {
            drop(EndLater {
                shared: Arc::clone(&self.shared),
                sandbox: Some(self.sandbox.clone()),
            });
        }
    }
}

/// Ends a sandbox beside us when dropped.
struct EndLater {
    shared: Arc<Shared>,
    sandbox: Option<SandboxId>,
}

impl Drop for EndLater {
    fn drop(&mut self) {
        let Some(sandbox) = self.sandbox.take() else { return };
        let shared = Arc::clone(&self.shared);
        self.shared.spawn(async move {
            match shared.provider.end(&sandbox).await {
                Ok(()) => forget(&shared, &sandbox),
                Err(error) => {
                    tracing::warn!(%sandbox, error = words(&error), "a sandbox without an owner cannot be ended");
                }
            }
        });
    }
}
