//! Sandboxes: the provider trait, admission, and one service for the sandboxes of sessions and for
//! standalone ones. The service works without a server too, then without limits.

pub(crate) mod admission;
mod ephemeral_guard;
mod error;
mod exec;
mod files;
mod handle;
mod host;
mod lifecycle;
mod member_limits;
mod provider;
mod slots;
mod snapshots;
mod spec;
mod standalone_doors;
mod terminals;

use std::{sync::Arc, time::Duration};

use harvest_store::Store;
use tokio::sync::Semaphore;

pub use admission::Limits;
pub(crate) use ephemeral_guard::EphemeralGuard;
pub use error::{MissingObject, SandboxError};
pub use exec::{CommandHandle, ExecLines, check_command};
pub use files::{FileDownload, PathContent};
pub use handle::{CommandDefaults, SandboxHandle, UseGuard};
pub use host::{Archive, Host, ImageLines, Images, ImportImage, StandbyCounts};
pub use lifecycle::{Outcome, Requester};
pub use provider::{
    BridgeStream, ComputeUsage, Created, Found, FreezeControl, ListedSandbox, SandboxProvider,
};
pub use snapshots::{Captured, DiffBase, Durability, SnapshotSize, Snapshots};
pub use spec::{SandboxSpec, StartFrom, StateVolume};
pub use standalone_doors::{DoorGuard, StandaloneDoors, allow_rules};
pub use terminals::TerminalRequest;

use admission::Admission;
use standalone_doors::OpenDoors;

use crate::{compute_meter::ComputeMeter, tasks::Tasks};

// How long a standalone sandbox or a one-shot command waits for a slot before it is refused.
const SLOT_TIMEOUT: Duration = Duration::from_secs(30);

// The most requests that wait for a slot at once.
const MAX_WAITING: usize = 64;

/// Creates sandboxes and runs commands in them. Clones share one state.
#[derive(Clone)]
pub struct Sandboxes {
    provider: Arc<dyn SandboxProvider>,
    admission: Arc<Admission>,
    /// Records the ids that an idempotent request is about to create; `None` without a server.
    store: Option<Store>,
    tasks: Tasks,
    slot_timeout: Duration,
    /// Requests that wait for a slot.
    waiting: Arc<Semaphore>,
    /// The doors of standalone sandboxes.
    doors: Arc<OpenDoors>,
    /// Reads ephemeral sandboxes of builds and checks before they are removed; `None` without a
    /// server.
    meter: Option<Arc<ComputeMeter>>,
    /// How many sandboxes a member may have for whom no other number is set.
    member_sandboxes: u32,
}

impl Sandboxes {
    /// Sandboxes without a server: there is no limit.
    #[must_use]
    pub fn without_server(provider: Arc<dyn SandboxProvider>) -> Self {
        let sandboxes = Self::new(provider, Limits::UNLIMITED, None, Tasks::default());
        sandboxes.admission.set_open(true);
        sandboxes
    }

    /// Sandboxes until `tasks` are stopped. Nothing is admitted before admission is opened.
    pub(crate) fn new(
        provider: Arc<dyn SandboxProvider>,
        limits: Limits,
        store: Option<Store>,
        tasks: Tasks,
    ) -> Self {
        Self {
            provider,
            admission: Arc::new(Admission::new(limits)),
            store,
            tasks,
            slot_timeout: SLOT_TIMEOUT,
            waiting: Arc::new(Semaphore::new(MAX_WAITING)),
            doors: Arc::default(),
            meter: None,
            member_sandboxes: limits.member_sandboxes,
        }
    }

    #[must_use]
    pub(crate) fn with_meter(self, meter: Arc<ComputeMeter>) -> Self {
        Self { meter: Some(meter), ..self }
    }

    /// Sets how long a request waits for a slot.
    #[must_use]
    pub fn with_slot_timeout(mut self, slot_timeout: Duration) -> Self {
        self.slot_timeout = slot_timeout;
        self
    }

    #[must_use]
    pub fn provider(&self) -> &Arc<dyn SandboxProvider> {
        &self.provider
    }

    pub(crate) fn admission(&self) -> &Arc<Admission> {
        &self.admission
    }

    /// Images, volumes and disks of the provider's machine.
    ///
    /// # Errors
    /// When the provider has none.
    pub fn host(&self) -> Result<&dyn Host, SandboxError> {
        self.provider.host().ok_or_else(|| unsupported("images, volumes or disks to manage"))
    }

    /// The snapshots of the provider.
    ///
    /// # Errors
    /// When the provider has none.
    pub fn snapshots(&self) -> Result<&dyn Snapshots, SandboxError> {
        self.provider.snapshots().ok_or_else(|| unsupported("snapshots"))
    }

    /// Waits until all ephemeral sandboxes are removed. No command may be started meanwhile.
    pub async fn settle(&self) {
        self.tasks.close().await;
    }
}

fn unsupported(what: &str) -> SandboxError {
    SandboxError::invalid("unsupported", format!("this sandbox provider has no {what}"))
}
