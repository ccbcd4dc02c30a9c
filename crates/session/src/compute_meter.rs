//! Counts what sandboxes use of the machine: a job reads every running sandbox from time to time,
//! and each is read a last time before it is removed. What a killed server did not store of the CPU
//! time is in the sandbox's own count, which the next server reads.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use harvest_proto::{SandboxId, Timestamp};
use harvest_store::{ComputeOwner, ComputeReading, Lease, SessionRecord, Store, StoreError};
use tokio::sync::Notify;

use crate::{
    jobs::Job, monotonic_clock::MonotonicClock, sandboxes::SandboxProvider, tasks::Tasks,
    wall_clock::now,
};

const PERIOD: Duration = Duration::from_secs(30);

// Ending a sandbox waits no longer for its last reading.
const LAST_READING: Duration = Duration::from_secs(2);

/// Whom the sandbox of a session counts for, and the check of what it pushed.
pub(crate) fn compute_owner(record: &SessionRecord) -> ComputeOwner {
    ComputeOwner {
        session: Some(record.session.id.clone()),
        repository: record.checkouts.first().map(|first| first.repository.clone()),
        user: Some(record.session.author.email.clone()),
    }
}

/// A sandbox that is read.
#[derive(Clone)]
struct Metered {
    owner: ComputeOwner,
    /// When this server started or found it, by the monotonic clock.
    since: Timestamp,
}

pub(crate) struct ComputeMeter {
    store: Store,
    lease: Lease,
    provider: Arc<dyn SandboxProvider>,
    clock: MonotonicClock,
    running: Mutex<BTreeMap<SandboxId, Metered>>,
    /// Held from a reading until it is stored: an older one must not follow it.
    reading: tokio::sync::Mutex<()>,
}

impl ComputeMeter {
    pub(crate) fn new(
        store: Store,
        lease: Lease,
        provider: Arc<dyn SandboxProvider>,
        clock: MonotonicClock,
    ) -> Self {
        let (running, reading) = Default::default();
        Self { store, lease, provider, clock, running, reading }
    }

    /// Starts the job that reads all running sandboxes.
    pub(crate) fn spawn(self: &Arc<Self>, tasks: &Tasks) {
        let job = Job { name: "compute", period: Some(PERIOD), wake: Arc::new(Notify::new()) };
        let meter = Arc::clone(self);
        job.spawn(tasks, move || {
            let meter = Arc::clone(&meter);
            async move { Ok(meter.read_all().await?) }
        });
    }

    /// Counts a sandbox from now on, for this owner.
    pub(crate) fn begin(&self, sandbox: SandboxId, owner: ComputeOwner) {
        let new = Metered { owner, since: self.clock.now() };
        match self.running().entry(sandbox) {
            Entry::Occupied(mut known) => known.get_mut().owner = new.owner,
            Entry::Vacant(place) => {
                place.insert(new);
            }
        }
    }

    /// Reads a sandbox now.
    pub(crate) async fn read_one(&self, sandbox: &SandboxId) -> Result<(), StoreError> {
        let metered = self.running().get(sandbox).cloned();
        self.read(metered.map(|metered| (sandbox.clone(), metered)).into_iter().collect()).await
    }

    /// Reads a sandbox a last time, before it is removed.
    pub(crate) async fn end(&self, sandbox: &SandboxId) {
        let Some(metered) = self.running().remove(sandbox) else { return };
        let last = self.read(vec![(sandbox.clone(), metered)]);
        match tokio::time::timeout(LAST_READING, last).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%sandbox, %error, "cannot count what a sandbox used"),
            Err(_) => tracing::warn!(%sandbox, "no time to count what a sandbox used"),
        }
    }

    /// Reads all running sandboxes.
    pub(crate) async fn read_all(&self) -> Result<(), StoreError> {
        let running = self.running().clone().into_iter().collect();
        self.read(running).await
    }

    async fn read(&self, sandboxes: Vec<(SandboxId, Metered)>) -> Result<(), StoreError> {
        let _one_at_a_time = self.reading.lock().await;
        let mut readings = Vec::new();
        for (sandbox, Metered { owner, since }) in sandboxes {
            match self.provider.usage(&sandbox).await {
                Ok(Some(usage)) => readings.push(ComputeReading {
                    sandbox,
                    owner,
                    since,
                    cpu_micros: usage.cpu_micros,
                    memory_bytes: usage.memory_bytes,
                }),
                // Removed by other means, or nothing counts here.
                Ok(None) => {
                    self.running().remove(&sandbox);
                }
                Err(error) => tracing::debug!(%sandbox, %error, "cannot measure a sandbox"),
            }
        }
        if readings.is_empty() {
            return Ok(());
        }
        self.store.compute_add(self.lease, readings, self.clock.now(), now()).await
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<SandboxId, Metered>> {
        self.running.lock().expect("no holder of this lock can panic")
    }
}
