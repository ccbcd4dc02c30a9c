//! Creates, forks, starts, stops, restores and deletes standalone sandboxes. Each running one holds
//! a slot.
//!
//! A request with an idempotency key creates its sandboxes once. A sandbox cannot be part of a
//! transaction, so its id is stored first: a retry after a crash finds or creates the sandbox with
//! that id.

use std::str::FromStr;

use harvest_proto::{
    SandboxId, SnapshotId,
    api::{
        CreateSandbox, CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxDoor,
        SandboxOwner, SandboxSnapshot, SandboxStatus, SnapshotOwner,
    },
    event::SnapshotKind,
};

use super::{
    Captured, Created, Found, SandboxError, SandboxSpec, Sandboxes, Snapshots, StartFrom,
    admission::Claimant, member_limits,
};
use crate::error_chain::error_chain;

/// The origin of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Requester {
    /// The user who gets the slot; `None` without a server.
    pub user: Option<String>,
    /// Whether the user's own limits apply: not to admins.
    pub limited: bool,
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

impl Sandboxes {
    /// Starts a sandbox that stays until it is deleted. Waits a while for a free slot.
    ///
    /// # Errors
    /// When no slot becomes free or the sandbox cannot be started.
    pub async fn create(
        &self,
        requester: &Requester,
        order: CreateSandbox,
    ) -> Result<Outcome<CreatedSandbox>, SandboxError> {
        let id = requester.ids(1, SandboxId::random).remove(0);
        if requester.is_retry() && self.exists(&id).await? {
            // It may be half created. The warnings of the first attempt are lost.
            let status = self.start(requester, &id).await?.state;
            let created = CreatedSandbox { sandbox_id: id, status, warnings: Vec::new() };
            return Ok(Outcome { created, replayed: true });
        }
        let (made_by, own) = (requester.user.clone(), std::slice::from_ref(&id));
        let limits = self.member_limits(requester).await?;
        let order = member_limits::applied(limits.as_ref(), order)?;
        let spec = SandboxSpec::standalone(id.clone(), SandboxOwner::Standalone, made_by, order)?;
        let claimant = member_limits::claimant(requester, limits.as_ref())?;
        let slots = self.wait_for_slots(own, claimant).await?;
        self.plan(requester, &[id.to_string()]).await?;
        let door = spec.door.clone();
        let created = self.create_with_door(spec, door).await;
        self.keep_slots(slots).await;
        match created {
            Ok(Created { warnings }) => {
                let status = SandboxStatus::Running;
                let created = CreatedSandbox { sandbox_id: id, status, warnings };
                Ok(Outcome { created, replayed: false })
            }
            Err(error) => Err(self.on_create_failed(requester, &id, error).await),
        }
    }

    /// Creates a sandbox and opens its door. Without its door it is removed again.
    async fn create_with_door(
        &self,
        spec: SandboxSpec,
        door: Option<SandboxDoor>,
    ) -> Result<Created, SandboxError> {
        let id = spec.id.clone();
        let created = self.provider.create(spec).await?;
        match self.open_door(&id, door.as_ref()).await {
            Ok(()) => Ok(created),
            Err(error) => {
                self.provider.remove(&id).await?;
                Err(error)
            }
        }
    }

    /// Starts new sandboxes from the current disk of this one. Needs a slot for each of them, for
    /// which it waits a while. For admins: a fork keeps the disk of its source below an empty
    /// writable layer, so a chain of forks would exceed a member's limit of the disk.
    ///
    /// # Errors
    /// When too few slots become free or no fork can be started.
    pub async fn fork(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
        count: u16,
    ) -> Result<Outcome<ForkedSandbox>, SandboxError> {
        let (this, requester, sandbox) = (self.clone(), requester.clone(), sandbox.clone());
        let forking = async move { this.fork_now(&requester, &sandbox, count).await };
        self.uninterrupted("cannot fork the sandbox", forking).await
    }

    /// Runs work of several steps to its end, even if the caller goes away or the server stops.
    async fn uninterrupted<T: Send + 'static>(
        &self,
        doing: &str,
        work: impl Future<Output = Result<T, SandboxError>> + Send + 'static,
    ) -> Result<T, SandboxError> {
        let done = self.tasks.spawn_to_completion(work).await;
        done.unwrap_or_else(|panicked| Err(SandboxError::failed(doing, panicked)))
    }

    async fn fork_now(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
        count: u16,
    ) -> Result<Outcome<ForkedSandbox>, SandboxError> {
        let snapshot = requester.ids(1, SnapshotId::random).remove(0);
        let ids = requester.ids(usize::from(count), SandboxId::random);
        let existing = if requester.is_retry() { self.existing(&ids).await? } else { Vec::new() };
        let claimant = Claimant { user: requester.user.as_deref(), ..Claimant::default() };
        let slots = self.wait_for_slots(&ids, claimant).await?;
        let outcome = self.make_forks(requester, sandbox, &snapshot, ids, &existing).await;
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
        snapshot: &SnapshotId,
        ids: Vec<SandboxId>,
        existing: &[SandboxId],
    ) -> Result<Outcome<ForkedSandbox>, SandboxError> {
        let replayed = existing.len() == ids.len();
        let created = if replayed {
            ForkedSandbox { source: sandbox.clone(), forks: ids, failed: None }
        } else {
            let planned = std::iter::once(snapshot.to_string());
            let planned: Vec<_> = planned.chain(ids.iter().map(SandboxId::to_string)).collect();
            self.plan(requester, &planned).await?;
            let first = ids[0].clone();
            match self.start_forks(requester.user.clone(), sandbox, snapshot, ids).await {
                Ok(created) => created,
                Err(error) => return Err(self.on_create_failed(requester, &first, error).await),
            }
        };
        for half_made in existing {
            self.provider.restart(half_made).await?;
        }
        Ok(Outcome { created, replayed })
    }

    /// Starts the forks from a temporary snapshot.
    async fn start_forks(
        &self,
        made_by: Option<String>,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        ids: Vec<SandboxId>,
    ) -> Result<ForkedSandbox, SandboxError> {
        let (snapshots, source) = (self.snapshots()?, self.provider.get(sandbox).await?);
        snapshots.capture(sandbox, snapshot, None).await?;
        let (count, mut forks, mut failed) = (ids.len(), Vec::new(), None);
        for id in ids {
            let copy = SandboxSpec::copy_of(&source, snapshot);
            let spec = SandboxSpec { id: id.clone(), made_by: made_by.clone(), ..copy };
            let door = spec.door.clone();
            match self.create_with_door(spec, door).await {
                // An earlier attempt of the same request created it.
                Ok(_) | Err(SandboxError::Conflict { code: "exists", .. }) => forks.push(id),
                Err(error) if forks.is_empty() => {
                    // A snapshot that stays is listed, and the first error matters more.
                    self.remove_leftover(snapshot).await;
                    return Err(error);
                }
                Err(error) => {
                    let started = forks.len();
                    let why = error_chain(&error);
                    failed = Some(format!("started {started} of {count} forks: {why}"));
                    break;
                }
            }
        }
        // The forks now hold the layers themselves.
        snapshots.remove(snapshot).await?;
        Ok(ForkedSandbox { source: sandbox.clone(), forks, failed })
    }

    /// Removes the temporary snapshot of a fork, which a crashed server may have left.
    async fn remove_leftover(&self, snapshot: &SnapshotId) {
        let Some(snapshots) = self.provider.snapshots() else { return };
        if let Err(error) = snapshots.remove(snapshot).await {
            tracing::warn!(%snapshot, error = error_chain(&error), "cannot remove the temporary snapshot of a fork");
        }
    }

    /// Takes a snapshot of a running sandbox; it would survive a power cut on return.
    ///
    /// # Errors
    /// When the snapshot cannot be taken.
    pub async fn snapshot(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
    ) -> Result<SandboxSnapshot, SandboxError> {
        let id = requester.ids(1, SnapshotId::random).remove(0);
        self.plan(requester, &[id.to_string()]).await?;
        match self.capture(sandbox, &id).await {
            Ok(Captured { frozen_millis, bytes }) => {
                Ok(SandboxSnapshot { id, sandbox: sandbox.clone(), frozen_millis, bytes })
            }
            Err(error) => {
                let nothing_made = matches!(
                    error,
                    SandboxError::Missing(_)
                        | SandboxError::NotRunning { .. }
                        | SandboxError::Invalid { .. }
                );
                if nothing_made && !requester.is_retry() {
                    self.unplan(requester).await;
                }
                Err(error)
            }
        }
    }

    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<Captured, SandboxError> {
        let snapshots = self.snapshots()?;
        if !self.exists(sandbox).await? {
            return Err(SandboxError::no_sandbox(sandbox));
        }
        // Idempotent: an existing snapshot with this id is not taken again.
        let captured = snapshots.capture(sandbox, snapshot, None).await?;
        // Before the reply: this process may exit before a background sync would run.
        snapshots.sync().await?;
        Ok(captured)
    }

    /// Restarts a stopped or dead sandbox with its disk. The slot counts for the user who created
    /// it.
    ///
    /// # Errors
    /// When no slot is free or the sandbox cannot be started.
    pub async fn start(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
    ) -> Result<Sandbox, SandboxError> {
        let found = self.standalone(sandbox, "start").await?;
        if found.state == SandboxStatus::Running {
            return Ok(found);
        }
        let own = std::slice::from_ref(sandbox);
        let limits = self.member_limits(requester).await?;
        member_limits::check_existing(limits.as_ref(), &found.limits)?;
        let claimant = Claimant {
            user: found.made_by.as_deref(),
            ..member_limits::claimant(requester, limits.as_ref())?
        };
        let slots = self.wait_for_slots(own, claimant).await?;
        // A sandbox that died by itself left its door.
        self.close_door(sandbox).await;
        let started = self.provider.restart(sandbox).await;
        self.keep_slots(slots).await;
        started?;
        self.open_door(sandbox, found.door.as_ref()).await?;
        self.provider.get(sandbox).await
    }

    /// Stops a sandbox; its disk stays.
    ///
    /// # Errors
    /// When it cannot be stopped.
    pub async fn stop(&self, sandbox: &SandboxId) -> Result<Sandbox, SandboxError> {
        self.standalone(sandbox, "stop").await?;
        let slot = self.admission.standalone_claim(sandbox);
        self.provider.stop(sandbox).await?;
        self.close_door(sandbox).await;
        self.release(sandbox, slot);
        self.provider.get(sandbox).await
    }

    /// Restores a sandbox to a snapshot. Its disk is saved as another snapshot first, so that a
    /// crash at any step loses nothing.
    ///
    /// # Errors
    /// When no slot is free or the sandbox cannot be restored.
    pub async fn restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, SandboxError> {
        let before = self.provider.get(sandbox).await?;
        if before.owner != SandboxOwner::Standalone {
            return Err(SandboxError::conflict(
                "not_yours",
                format!("{sandbox} cannot be restored: it is not a standalone sandbox"),
                "`harvest sandbox restore SNAPSHOT` starts a new sandbox from the snapshot",
            ));
        }
        if !self.provider.can_start_from(&StartFrom::Snapshot(snapshot.clone())).await? {
            return Err(SandboxError::no_snapshot(snapshot));
        }
        self.snapshots()?;
        let (this, snapshot) = (self.clone(), snapshot.clone());
        let restoring = async move {
            let own = std::slice::from_ref(&before.id);
            let user = before.made_by.as_deref();
            let claimant = Claimant { user, ..Claimant::default() };
            let slots = this.wait_for_slots(own, claimant).await?;
            let restored = this.replace(this.snapshots()?, &before, &snapshot).await;
            this.keep_slots(slots).await;
            restored
        };
        self.uninterrupted("cannot restore the sandbox", restoring).await
    }

    async fn replace(
        &self,
        snapshots: &dyn Snapshots,
        before: &Sandbox,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, SandboxError> {
        let (id, kept) = (&before.id, SnapshotId::random());
        let saved = self.provider.snapshot_and_remove(id, &kept, SnapshotKind::Pause).await;
        saved.map_err(|error| match error {
            SandboxError::Failed { hint, source, .. } => SandboxError::Failed {
                doing: format!("cannot save the disk of {id}; nothing was restored"),
                hint,
                source,
            },
            other => other,
        })?;
        let spec = SandboxSpec::copy_of(before, snapshot);
        let door = spec.door.clone();
        self.close_door(id).await;
        let started = async {
            self.create_with_door(spec, door).await?;
            snapshots.sync().await
        };
        started.await.map_err(|error| SandboxError::Failed {
            doing: format!(
                "cannot restore {id} to {snapshot}; its previous disk is saved as {kept}"
            ),
            hint: Some(format!("`harvest sandbox restore {kept}` starts a sandbox from it")),
            source: error.into(),
        })?;
        Ok(RestoredSandbox { id: id.clone(), snapshot_id: snapshot.clone(), kept })
    }

    /// Stops a sandbox and deletes its disk. `force` includes a session's sandbox and one whose
    /// record is unreadable.
    ///
    /// # Errors
    /// When it cannot be deleted.
    pub async fn delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), SandboxError> {
        if !force {
            self.standalone(sandbox, "remove").await?;
        } else if matches!(self.provider.find(sandbox).await, Ok(Found::Gone)) {
            return Err(SandboxError::no_sandbox(sandbox));
        }
        let slot = self.admission.standalone_claim(sandbox);
        self.provider.remove(sandbox).await?;
        self.close_door(sandbox).await;
        self.release(sandbox, slot);
        self.admission.standalone_deleted();
        Ok(())
    }

    /// Deletes a snapshot. `force` includes one that a session may continue from.
    ///
    /// # Errors
    /// When there is no such snapshot, or it belongs to a session.
    pub async fn snapshot_delete(
        &self,
        snapshot: &SnapshotId,
        force: bool,
    ) -> Result<(), SandboxError> {
        let snapshots = self.snapshots()?;
        let found = snapshots.find(snapshot).await?;
        let found = found.ok_or_else(|| SandboxError::no_snapshot(snapshot))?;
        if found.owner == SnapshotOwner::Session && !force {
            return Err(SandboxError::conflict(
                "of_a_session",
                format!("a session or repository may still use {snapshot}"),
                "`harvest rm SESSION` or `harvest repo rm` removes it with its owner; --force removes it anyway",
            ));
        }
        snapshots.remove(snapshot).await
    }

    /// A sandbox that belongs to no session: a session's may be frozen or paused at any time, so
    /// its users go through the session.
    pub(super) async fn standalone(
        &self,
        sandbox: &SandboxId,
        verb: &str,
    ) -> Result<Sandbox, SandboxError> {
        let found = self.provider.get(sandbox).await?;
        if found.owner == SandboxOwner::Session {
            return Err(SandboxError::conflict(
                "of_a_session",
                format!("cannot {verb} {sandbox}: it belongs to a session"),
                "use the session instead: `harvest exec SESSION` runs a command in it, `harvest terminate SESSION` stops it and saves its disk",
            ));
        }
        Ok(found)
    }

    /// Stores the ids that are about to be created, if the request has a key.
    pub(crate) async fn plan(
        &self,
        requester: &Requester,
        ids: &[String],
    ) -> Result<(), SandboxError> {
        let (Some(store), Some(key)) = (&self.store, &requester.key) else { return Ok(()) };
        store.idempotency_plan(key, ids).await.map_err(|error| match error.is_disk_full() {
            true => SandboxError::NoSpace {
                what: "no space left to record the request".to_owned(),
                hint:
                    "free space on the server's disk (`harvest df`, `harvest gc`), then try again"
                        .to_owned(),
            },
            false => SandboxError::failed("cannot record the request", error),
        })
    }

    /// Frees the key for another request, if nothing was created.
    async fn on_create_failed(
        &self,
        requester: &Requester,
        sandbox: &SandboxId,
        error: SandboxError,
    ) -> SandboxError {
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

    async fn exists(&self, sandbox: &SandboxId) -> Result<bool, SandboxError> {
        Ok(self.provider.find(sandbox).await? != Found::Gone)
    }

    async fn existing(&self, sandboxes: &[SandboxId]) -> Result<Vec<SandboxId>, SandboxError> {
        let mut existing = Vec::new();
        for sandbox in sandboxes {
            existing.extend(self.exists(sandbox).await?.then(|| sandbox.clone()));
        }
        Ok(existing)
    }
}
