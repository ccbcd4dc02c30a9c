//! Creates, forks, starts, stops and deletes standalone sandboxes. With a server, each running
//! sandbox holds a slot, like a session's; without one there is no limit.
//!
//! A request with an idempotency key creates its sandboxes once. A sandbox cannot be part of a
//! transaction, so its id is stored first: a retry after a crash finds or creates the sandbox with
//! that id.

use std::{str::FromStr, sync::Arc, time::Duration};

use harvest_proto::{
    SandboxId, SnapshotId,
    api::{
        CreateSandbox, CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxSnapshot,
        SandboxStatus,
    },
};

use tokio::time::{Instant, timeout_at};

use super::{ForkSpec, HostError, NewSandbox, SandboxHost, StandaloneSandboxes};
use crate::{
    Sessions,
    context::{Shared, error_chain},
    decide::Limit,
};

// Retry interval while the host cannot report whether a sandbox has exited.
const WAIT_RETRY: Duration = Duration::from_secs(5);

// Idle sessions are asked for their slot only after this time: most commands end sooner.
const PREEMPT_AFTER: Duration = Duration::from_secs(2);

/// The origin of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requester {
    /// The user who gets the slot; `None` without a server.
    pub user: Option<String>,
    /// The idempotency key of the request; already claimed.
    pub key: Option<String>,
    /// The ids that a server which crashed had planned under this key.
    pub planned: Vec<String>,
}

impl Requester {
    /// Whether a server crashed while it handled this request.
    fn is_retry(&self) -> bool {
        !self.planned.is_empty()
    }

    /// The planned ids of type `T`, or new ones.
    fn ids<T: FromStr>(&self, count: usize, new: impl Fn() -> T) -> Vec<T> {
        let planned: Vec<T> = self.planned.iter().filter_map(|id| id.parse().ok()).collect();
        if planned.len() == count { planned } else { (0..count).map(|_| new()).collect() }
    }
}

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome<T> {
    pub created: T,
    /// Created by an earlier request with the same key.
    pub replayed: bool,
}

impl StandaloneSandboxes {
    /// Enables admission: sandboxes share the slots of the server's sessions. Running ones keep
    /// their slots until they exit.
    #[must_use]
    pub fn with_admission(mut self, sessions: &Sessions) -> Self {
        let shared = Arc::clone(&sessions.shared);
        for (sandbox, number) in shared.admission.standalone_claims() {
            SandboxSlot { shared: Arc::clone(&shared), sandbox, number }
                .watch(Arc::clone(&self.host));
        }
        self.shared = Some(shared);
        self
    }

    /// Starts a sandbox that stays until it is deleted.
    ///
    /// # Errors
    /// When no slot is free or the sandbox cannot be started.
    pub async fn create(
        &self,
        requester: &Requester,
        order: CreateSandbox,
    ) -> Result<Outcome<CreatedSandbox>, HostError> {
        let id = requester.ids(1, SandboxId::random).remove(0);
        if requester.is_retry() && self.exists(&id).await? {
            // It may be half created. The warnings of the first attempt are lost.
            let status = self.start(&id).await?.state;
            return Ok(Outcome {
                created: CreatedSandbox { sandbox_id: id, status, warnings: Vec::new() },
                replayed: true,
            });
        }
        let slots = self.claim(std::slice::from_ref(&id), requester.user.as_deref())?;
        self.plan(requester, &[id.to_string()]).await?;
        let new = NewSandbox { id: id.clone(), made_by: requester.user.clone(), order };
        let created = self.host.sandbox_create(new).await;
        self.keep_slots(slots).await;
        match created {
            Ok(created) => Ok(Outcome { created, replayed: false }),
            Err(error) => Err(self.on_create_failed(requester, &id, error).await),
        }
    }

    /// Starts new sandboxes from the current disk of this one. Needs a free slot for each of them.
    ///
    /// # Errors
    /// When too few slots are free or no fork can be started.
    pub async fn fork(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
        count: u16,
    ) -> Result<Outcome<ForkedSandbox>, HostError> {
        let snapshot = requester.ids(1, SnapshotId::random).remove(0);
        let ids = requester.ids(usize::from(count), SandboxId::random);
        let existing = if requester.is_retry() { self.existing(&ids).await? } else { Vec::new() };
        let slots = self.claim(&ids, requester.user.as_deref())?;
        let forks = ForkSpec { ids, made_by: requester.user.clone(), snapshot: snapshot.clone() };
        let outcome = self.make_forks(requester, sandbox, forks, &existing).await;
        if requester.is_retry() {
            self.remove_leftover(&snapshot).await;
        }
        self.keep_slots(slots).await;
        outcome
    }

    async fn make_forks(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
        forks: ForkSpec,
        existing: &[SandboxId],
    ) -> Result<Outcome<ForkedSandbox>, HostError> {
        let (first, replayed) = (forks.ids[0].clone(), existing.len() == forks.ids.len());
        let created = if replayed {
            ForkedSandbox { source: sandbox.clone(), forks: forks.ids, failed: None }
        } else {
            let ids = forks.ids.iter().map(SandboxId::to_string);
            let planned: Vec<_> = std::iter::once(forks.snapshot.to_string()).chain(ids).collect();
            self.plan(requester, &planned).await?;
            match self.host.sandbox_fork(sandbox, forks).await {
                Ok(created) => created,
                Err(error) => return Err(self.on_create_failed(requester, &first, error).await),
            }
        };
        for half_made in existing {
            self.host.sandbox_start(half_made).await?;
        }
        Ok(Outcome { created, replayed })
    }

    /// A server that crashed while forking may have left the forks' snapshot.
    async fn remove_leftover(&self, snapshot: &SnapshotId) {
        match self.host.snapshot_delete(snapshot, true).await {
            Ok(()) | Err(HostError::Missing { .. }) => {}
            Err(error) => {
                tracing::warn!(snapshot = %snapshot, error = error_chain(&error), "cannot remove the temporary snapshot of a fork");
            }
        }
    }

    /// Takes a snapshot of a running sandbox.
    ///
    /// # Errors
    /// When the snapshot cannot be taken.
    pub async fn snapshot(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
    ) -> Result<SandboxSnapshot, HostError> {
        let snapshot = requester.ids(1, SnapshotId::random).remove(0);
        self.plan(requester, &[snapshot.to_string()]).await?;
        // Idempotent: an existing snapshot with this id is not taken again.
        let taken = self.host.sandbox_snapshot(sandbox, snapshot.clone()).await;
        if let Err(HostError::Missing { .. } | HostError::Invalid { .. }) = &taken
            && !requester.is_retry()
        {
            self.unplan(requester).await;
        }
        taken
    }

    /// Restarts a stopped or dead sandbox with its disk. The slot counts for the user who created
    /// it.
    ///
    /// # Errors
    /// When no slot is free or the sandbox cannot be started.
    pub async fn start(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        let found = self.host.sandbox_get(sandbox).await?;
        if found.state == SandboxStatus::Running {
            return Ok(found);
        }
        let slots = self.claim(std::slice::from_ref(sandbox), found.made_by.as_deref())?;
        let started = self.host.sandbox_start(sandbox).await;
        self.keep_slots(slots).await;
        started
    }

    /// Stops a sandbox; its disk stays.
    ///
    /// # Errors
    /// When it cannot be stopped.
    pub async fn stop(&self, sandbox: &SandboxId) -> Result<Sandbox, HostError> {
        let slot = self.slot_number(sandbox);
        let stopped = self.host.sandbox_stop(sandbox).await?;
        self.release(sandbox, slot);
        Ok(stopped)
    }

    /// Restores a sandbox to a snapshot.
    ///
    /// # Errors
    /// When no slot is free or the sandbox cannot be restored.
    pub async fn restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, HostError> {
        let found = self.host.sandbox_get(sandbox).await?;
        // A session's sandbox is refused below, so it claims no slot.
        let own: &[SandboxId] =
            if found.owner == "you" { std::slice::from_ref(sandbox) } else { &[] };
        let slots = self.claim(own, found.made_by.as_deref())?;
        let restored = self.host.sandbox_restore(sandbox, snapshot).await;
        self.keep_slots(slots).await;
        restored
    }

    /// Stops a sandbox and deletes its disk.
    ///
    /// # Errors
    /// When it cannot be deleted.
    pub async fn delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), HostError> {
        let slot = self.slot_number(sandbox);
        self.host.sandbox_delete(sandbox, force).await?;
        self.release(sandbox, slot);
        Ok(())
    }

    /// Stores the ids that are about to be created, if the request has a key.
    async fn plan(&self, requester: &Requester, ids: &[String]) -> Result<(), HostError> {
        let (Some(shared), Some(key)) = (&self.shared, &requester.key) else { return Ok(()) };
        shared.store.idempotency_plan(key, ids).await.map_err(|error| match error.is_disk_full() {
            true => HostError::NoSpace {
                what: "no space left to record the request".to_owned(),
                hint:
                    "free space on the server's disk (`harvest df`, `harvest gc`), then try again"
                        .to_owned(),
            },
            false => HostError::Failed {
                doing: "cannot record the request".to_owned(),
                hint: None,
                source: error.into(),
            },
        })
    }

    /// Frees the key for another request, if nothing was created.
    async fn on_create_failed(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
        error: HostError,
    ) -> HostError {
        if let Ok(false) = self.exists(sandbox).await {
            self.unplan(requester).await;
        }
        error
    }

    /// Clears the planned ids, which frees the key.
    async fn unplan(&self, requester: &Requester) {
        if let Err(error) = self.plan(requester, &[]).await {
            tracing::warn!(error = error_chain(&error), "cannot free an idempotency key");
        }
    }

    async fn exists(&self, sandbox: &SandboxId) -> Result<bool, HostError> {
        match self.host.sandbox_get(sandbox).await {
            Ok(_) => Ok(true),
            Err(HostError::Missing { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn existing(&self, sandboxes: &[SandboxId]) -> Result<Vec<SandboxId>, HostError> {
        let mut existing = Vec::new();
        for sandbox in sandboxes {
            existing.extend(self.exists(sandbox).await?.then(|| sandbox.clone()));
        }
        Ok(existing)
    }

    /// Claims a slot for each sandbox, released on drop; empty without a server.
    fn claim(&self, ids: &[SandboxId], user: Option<&str>) -> Result<Vec<SandboxSlot>, HostError> {
        self.try_claim(ids, user, true)
    }

    fn try_claim(
        &self,
        ids: &[SandboxId],
        user: Option<&str>,
        preempt: bool,
    ) -> Result<Vec<SandboxSlot>, HostError> {
        let Some(shared) = &self.shared else { return Ok(Vec::new()) };
        let number = shared.admission.claim_standalone(ids, user, preempt)?;
        let slot = |id: &SandboxId| SandboxSlot {
            shared: Arc::clone(shared),
            sandbox: id.clone(),
            number,
        };
        Ok(ids.iter().map(slot).collect())
    }

    /// Waits for a free slot for a short command. Queued sessions come first.
    pub(super) async fn wait_for_slot(
        &self,
        id: &SandboxId,
        user: Option<&str>,
    ) -> Result<Option<SandboxSlot>, HostError> {
        let Some(shared) = &self.shared else { return Ok(None) };
        let (mut moved, now) = (shared.admission.changes(), Instant::now());
        let (deadline, preempt_at) =
            (now + self.slot_timeout, now + PREEMPT_AFTER.min(self.slot_timeout));
        let mut permit = None;
        loop {
            moved.borrow_and_update();
            let preempt = Instant::now() >= preempt_at;
            let refused = match self.try_claim(std::slice::from_ref(id), user, preempt) {
                Ok(mut slots) => return Ok(slots.pop()),
                Err(refused) => refused,
            };
            // A server that shuts down has no slots, and a longer queue would move too slowly.
            permit = permit.or_else(|| self.waiting.try_acquire().ok());
            let closed = matches!(refused, HostError::LimitReached { limit: Limit::Closed, .. });
            if permit.is_none() || closed {
                return Err(refused);
            }
            let change =
                timeout_at(if preempt { deadline } else { preempt_at }, moved.changed()).await;
            if matches!(change, Ok(Err(_))) || Instant::now() >= deadline {
                return Err(refused);
            }
        }
    }

    /// Keeps the slots of sandboxes that run, until they exit; the others are released.
    async fn keep_slots(&self, slots: Vec<SandboxSlot>) {
        for slot in slots {
            match self.host.sandbox_get(&slot.sandbox).await {
                Ok(found) if found.state != SandboxStatus::Running => {}
                Err(HostError::Missing { .. }) => {}
                Ok(_) | Err(_) => slot.watch(Arc::clone(&self.host)),
            }
        }
    }

    fn slot_number(&self, sandbox: &SandboxId) -> Option<u64> {
        self.shared.as_ref()?.admission.standalone_claim(sandbox)
    }

    /// Releases the slot of an exited sandbox at once, without waiting for its watcher.
    fn release(&self, sandbox: &SandboxId, slot: Option<u64>) {
        if let (Some(shared), Some(number)) = (&self.shared, slot) {
            shared.admission.release_standalone(sandbox, number);
        }
    }
}

/// A sandbox's slot, released on drop.
pub(super) struct SandboxSlot {
    shared: Arc<Shared>,
    sandbox: SandboxId,
    number: u64,
}

impl SandboxSlot {
    /// Holds the slot until the sandbox exits.
    pub(super) fn watch(self, host: Arc<dyn SandboxHost>) {
        let shared = Arc::clone(&self.shared);
        shared.spawn(async move {
            while let Err(error) = host.sandbox_wait(&self.sandbox).await {
                tracing::warn!(sandbox = %self.sandbox, error = error_chain(&error), "cannot wait for a sandbox to exit");
                tokio::time::sleep(WAIT_RETRY).await;
            }
        });
    }
}

impl Drop for SandboxSlot {
    fn drop(&mut self) {
        self.shared.admission.release_standalone(&self.sandbox, self.number);
    }
}
