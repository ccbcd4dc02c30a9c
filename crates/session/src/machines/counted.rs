//! Sandboxes that no session has, made and ended where a server counts: each takes a place for as long as it runs, as
//! a session's does. Without a server nobody counts, and what is asked for is done.

use std::{sync::Arc, time::Duration};

use harvest_proto::{
    SandboxId, SnapshotId,
    api::machines::{
        CreateSandbox, CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxSnapshot,
        SandboxStatus,
    },
};

use super::{Commands, Forks, MachineError, Machines, NewSandbox};
use crate::{
    Sessions,
    wiring::{Shared, words},
};

// A machine that cannot say whether a sandbox has ended can in a while.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Who asks for a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asker {
    /// The user whose place it takes; nobody where there is no server to know them.
    pub user: Option<String>,
}

impl Commands {
    /// The same; from here on sandboxes take the places that the sessions have. Those that run already do so
    /// until they end.
    #[must_use]
    pub fn counted(mut self, sessions: &Sessions) -> Self {
        let hall = Arc::clone(&sessions.shared);
        for (sandbox, number) in hall.usher.all_raw() {
            Place { hall: Arc::clone(&hall), sandbox, number }.watch(Arc::clone(&self.machines));
        }
        self.hall = Some(hall);
        self
    }

    /// Starts a sandbox that stays until it is deleted.
    ///
    /// # Errors
    /// When there is no place for it, or it cannot be started.
    pub async fn create(&self, asker: &Asker, order: CreateSandbox) -> Result<CreatedSandbox, MachineError> {
        let id = SandboxId::random();
        let mut places = self.claim(std::slice::from_ref(&id), asker.user.as_deref())?;
        let made_by = asker.user.clone();
        let made = self.machines.sandbox_create(NewSandbox { id, made_by, order }).await?;
        self.hold(places.drain(..));
        Ok(made)
    }

    /// Starts others from a sandbox's disk as it is now; there is a place for all of them, or none is started.
    ///
    /// # Errors
    /// When there is no place for them, or not one can be started.
    pub async fn fork(
        &self,
        asker: &Asker,
        sandbox: &SandboxId,
        count: u16,
    ) -> Result<ForkedSandbox, MachineError> {
        let ids: Vec<SandboxId> = (0..count).map(|_| SandboxId::random()).collect();
        let mut places = self.claim(&ids, asker.user.as_deref())?;
        let forks = Forks { ids, made_by: asker.user.clone(), through: SnapshotId::random() };
        let made = self.machines.sandbox_fork(sandbox, forks).await?;
        self.hold(places.drain(..).filter(|place| made.forks.contains(&place.sandbox)));
        Ok(made)
    }

    /// Keeps the disk of a sandbox, which goes on.
    ///
    /// # Errors
    /// When it cannot be kept.
    pub async fn snapshot(&self, sandbox: &SandboxId) -> Result<SandboxSnapshot, MachineError> {
        self.machines.sandbox_snapshot(sandbox, SnapshotId::random()).await
    }

    /// Starts one that was stopped or died, with the disk it left. The place is its maker's.
    ///
    /// # Errors
    /// When there is no place for it, or it cannot be started.
    pub async fn start(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let found = self.machines.sandbox_get(sandbox).await?;
        if found.state == SandboxStatus::Running {
            return Ok(found);
        }
        let mut places = self.claim(std::slice::from_ref(sandbox), found.made_by.as_deref())?;
        let started = self.machines.sandbox_start(sandbox).await?;
        self.hold(places.drain(..));
        Ok(started)
    }

    /// Ends what runs in one; its disk stays.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub async fn stop(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let stopped = self.machines.sandbox_stop(sandbox).await?;
        self.left(sandbox);
        Ok(stopped)
    }

    /// Puts one back to a snapshot.
    ///
    /// # Errors
    /// When there is no place for it, or it cannot be put back.
    pub async fn restore(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<RestoredSandbox, MachineError> {
        let found = self.machines.sandbox_get(sandbox).await?;
        let mut places = self.claim(std::slice::from_ref(sandbox), found.made_by.as_deref())?;
        let restored = self.machines.sandbox_restore(sandbox, snapshot).await;
        // Whether or not it was put back: it may run as it did before.
        if self.machines.sandbox_get(sandbox).await.is_ok_and(|found| found.state == SandboxStatus::Running) {
            self.hold(places.drain(..));
        }
        restored
    }

    /// Ends one and throws its disk away.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub async fn delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), MachineError> {
        self.machines.sandbox_delete(sandbox, force).await?;
        self.left(sandbox);
        Ok(())
    }

    /// Places for these sandboxes, to be left when they are dropped; none where nobody counts.
    pub(super) fn claim(&self, ids: &[SandboxId], user: Option<&str>) -> Result<Vec<Place>, MachineError> {
        let Some(hall) = &self.hall else { return Ok(Vec::new()) };
        let number = hall.usher.claim_raw(ids, user)?;
        let place = |id: &SandboxId| Place { hall: Arc::clone(hall), sandbox: id.clone(), number };
        Ok(ids.iter().map(place).collect())
    }

    /// These sandboxes run: their places are left when they end.
    fn hold(&self, places: impl Iterator<Item = Place>) {
        places.for_each(|place| place.watch(Arc::clone(&self.machines)));
    }

    /// A sandbox has ended, and who waits for its place need not wait until somebody notices.
    fn left(&self, sandbox: &SandboxId) {
        if let Some(hall) = &self.hall {
            hall.usher.leave_raw(sandbox, None);
        }
    }
}

/// A sandbox's place, until this is dropped.
pub(super) struct Place {
    hall: Arc<Shared>,
    sandbox: SandboxId,
    number: u64,
}

impl Place {
    /// Has the place for as long as the sandbox runs.
    pub(super) fn watch(self, machines: Arc<dyn Machines>) {
        let hall = Arc::clone(&self.hall);
        hall.spawn(async move {
            while let Err(error) = machines.sandbox_ended(&self.sandbox).await {
                tracing::warn!(sandbox = %self.sandbox, error = words(&error), "cannot wait for a sandbox's end");
                tokio::time::sleep(LOOK_AGAIN).await;
            }
        });
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.hall.usher.leave_raw(&self.sandbox, Some(self.number));
    }
}
