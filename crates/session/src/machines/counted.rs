//! Sandboxes that no session has, made and ended where a server counts: each takes a place for as long as it runs, as
//! a session's does. Without a server nobody counts, and what is asked for is done.
//!
//! What is asked for under a key is made once. No transaction can hold a sandbox, so its id is written down first: who
//! asks again after a server died in between gets the sandbox of that id, made then or made now.

use std::{str::FromStr, sync::Arc, time::Duration};

use harvest_proto::{
    SandboxId, SnapshotId,
    api::machines::{
        CreateSandbox, CreatedSandbox, ForkedSandbox, RestoredSandbox, Sandbox, SandboxSnapshot,
        SandboxStatus,
    },
};

use tokio::time::{Instant, timeout_at};

use super::{Commands, Forks, MachineError, Machines, NewSandbox};
use crate::{
    Sessions,
    decide::Limit,
    wiring::{Shared, words},
};

// A machine that cannot say whether a sandbox has ended can in a while.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

// Most commands are over by then; no session is paused for what a moment's wait gives.
const ASKS_AFTER: Duration = Duration::from_secs(2);

/// Who asks for a sandbox.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Asker {
    /// The user whose place it takes; nobody where there is no server to know them.
    pub user: Option<String>,
    /// The idempotency key it is asked for under, which was claimed before.
    pub key: Option<String>,
    /// What a server that died was about to make under this key.
    pub meant: Vec<String>,
}

impl Asker {
    /// Whether a server died over this.
    fn asks_again(&self) -> bool {
        !self.meant.is_empty()
    }

    /// The ids that were meant by this kind of thing, else new ones.
    fn ids<T: FromStr>(&self, count: usize, new: impl Fn() -> T) -> Vec<T> {
        let meant: Vec<T> = self.meant.iter().filter_map(|id| id.parse().ok()).collect();
        if meant.len() == count { meant } else { (0..count).map(|_| new()).collect() }
    }
}

/// What came of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome<T> {
    /// What it made.
    pub made: T,
    /// It was there already, for an earlier request under the same key.
    pub again: bool,
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
    pub async fn create(
        &self,
        asker: &Asker,
        order: CreateSandbox,
    ) -> Result<Outcome<CreatedSandbox>, MachineError> {
        let id = asker.ids(1, SandboxId::random).remove(0);
        if asker.asks_again() && self.is_there(&id).await? {
            // Half of it may be there. What it has to do without was told to nobody, and nobody knows it now.
            let status = self.start(&id).await?.state;
            return Ok(Outcome {
                made: CreatedSandbox { sandbox_id: id, status, warnings: Vec::new() },
                again: true,
            });
        }
        let places = self.claim(std::slice::from_ref(&id), asker.user.as_deref())?;
        self.mean(asker, &[id.to_string()]).await?;
        let new = NewSandbox { id: id.clone(), made_by: asker.user.clone(), order };
        let made = self.machines.sandbox_create(new).await;
        self.seat(places).await;
        match made {
            Ok(made) => Ok(Outcome { made, again: false }),
            Err(error) => Err(self.unmade(asker, &id, error).await),
        }
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
    ) -> Result<Outcome<ForkedSandbox>, MachineError> {
        let through = asker.ids(1, SnapshotId::random).remove(0);
        let ids = asker.ids(usize::from(count), SandboxId::random);
        let there = if asker.asks_again() { self.those_there(&ids).await? } else { Vec::new() };
        let places = self.claim(&ids, asker.user.as_deref())?;
        let forks = Forks { ids, made_by: asker.user.clone(), through: through.clone() };
        let made = self.make_forks(asker, sandbox, forks, &there).await;
        if asker.asks_again() {
            self.forget(&through).await;
        }
        self.seat(places).await;
        made
    }

    async fn make_forks(
        &self,
        asker: &Asker,
        sandbox: &SandboxId,
        forks: Forks,
        there: &[SandboxId],
    ) -> Result<Outcome<ForkedSandbox>, MachineError> {
        let (first, again) = (forks.ids[0].clone(), there.len() == forks.ids.len());
        let made = if again {
            ForkedSandbox { source: sandbox.clone(), forks: forks.ids, failed: None }
        } else {
            let ids = forks.ids.iter().map(SandboxId::to_string);
            let meant: Vec<_> = std::iter::once(forks.through.to_string()).chain(ids).collect();
            self.mean(asker, &meant).await?;
            match self.machines.sandbox_fork(sandbox, forks).await {
                Ok(made) => made,
                Err(error) => return Err(self.unmade(asker, &first, error).await),
            }
        };
        for half_made in there {
            self.machines.sandbox_start(half_made).await?;
        }
        Ok(Outcome { made, again })
    }

    /// A server that died over its forks may have left the snapshot they began as.
    async fn forget(&self, through: &SnapshotId) {
        match self.machines.snapshot_delete(through, true).await {
            Ok(()) | Err(MachineError::Missing { .. }) => {}
            Err(error) => {
                tracing::warn!(snapshot = %through, error = words(&error), "a snapshot nobody asked for stays");
            }
        }
    }

    /// Keeps the disk of a sandbox, which goes on.
    ///
    /// # Errors
    /// When it cannot be kept.
    pub async fn snapshot(
        &self,
        asker: &Asker,
        sandbox: &SandboxId,
    ) -> Result<SandboxSnapshot, MachineError> {
        let kept = asker.ids(1, SnapshotId::random).remove(0);
        self.mean(asker, &[kept.to_string()]).await?;
        // One that is there is not taken again.
        let taken = self.machines.sandbox_snapshot(sandbox, kept.clone()).await;
        if let Err(MachineError::Missing { .. } | MachineError::Invalid { .. }) = &taken
            && !asker.asks_again()
        {
            self.give_back(asker).await;
        }
        taken
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
        let places = self.claim(std::slice::from_ref(sandbox), found.made_by.as_deref())?;
        let started = self.machines.sandbox_start(sandbox).await;
        self.seat(places).await;
        started
    }

    /// Ends what runs in one; its disk stays.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub async fn stop(&self, sandbox: &SandboxId) -> Result<Sandbox, MachineError> {
        let place = self.number(sandbox);
        let stopped = self.machines.sandbox_stop(sandbox).await?;
        self.left(sandbox, place);
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
        // Another's is refused, and takes no place for it.
        let own: &[SandboxId] =
            if found.owner == "you" { std::slice::from_ref(sandbox) } else { &[] };
        let places = self.claim(own, found.made_by.as_deref())?;
        let restored = self.machines.sandbox_restore(sandbox, snapshot).await;
        self.seat(places).await;
        restored
    }

    /// Ends one and throws its disk away.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub async fn delete(&self, sandbox: &SandboxId, force: bool) -> Result<(), MachineError> {
        let place = self.number(sandbox);
        self.machines.sandbox_delete(sandbox, force).await?;
        self.left(sandbox, place);
        Ok(())
    }

    /// Writes down what is about to be made, where it is made under a key.
    async fn mean(&self, asker: &Asker, ids: &[String]) -> Result<(), MachineError> {
        let (Some(hall), Some(key)) = (&self.hall, &asker.key) else { return Ok(()) };
        hall.store.idempotency_mean(key, ids).await.map_err(|error| match error.is_full() {
            true => MachineError::NoRoom {
                what: "there is no room to write down what is to be made".to_owned(),
                hint: "make room on the server's disk (`harvest df`, `harvest gc`), then try again"
                    .to_owned(),
            },
            false => MachineError::Failed {
                doing: "cannot write down what is to be made".to_owned(),
                hint: None,
                source: error.into(),
            },
        })
    }

    /// It could not be made: whoever asks for something else under the key may, if nothing is there.
    async fn unmade(
        &self,
        asker: &Asker,
        sandbox: &SandboxId,
        error: MachineError,
    ) -> MachineError {
        if let Ok(false) = self.is_there(sandbox).await {
            self.give_back(asker).await;
        }
        error
    }

    /// Nothing is made under the key, and it is free for something else.
    async fn give_back(&self, asker: &Asker) {
        if let Err(error) = self.mean(asker, &[]).await {
            tracing::warn!(error = words(&error), "a key cannot be given back");
        }
    }

    async fn is_there(&self, sandbox: &SandboxId) -> Result<bool, MachineError> {
        match self.machines.sandbox_get(sandbox).await {
            Ok(_) => Ok(true),
            Err(MachineError::Missing { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn those_there(&self, sandboxes: &[SandboxId]) -> Result<Vec<SandboxId>, MachineError> {
        let mut there = Vec::new();
        for sandbox in sandboxes {
            there.extend(self.is_there(sandbox).await?.then(|| sandbox.clone()));
        }
        Ok(there)
    }

    /// Places for these sandboxes, to be left when they are dropped; none where nobody counts.
    fn claim(&self, ids: &[SandboxId], user: Option<&str>) -> Result<Vec<Place>, MachineError> {
        self.claim_asking(ids, user, true)
    }

    fn claim_asking(
        &self,
        ids: &[SandboxId],
        user: Option<&str>,
        ask: bool,
    ) -> Result<Vec<Place>, MachineError> {
        let Some(hall) = &self.hall else { return Ok(Vec::new()) };
        let number = hall.usher.claim_raw(ids, user, ask)?;
        let place = |id: &SandboxId| Place { hall: Arc::clone(hall), sandbox: id.clone(), number };
        Ok(ids.iter().map(place).collect())
    }

    /// A place for one sandbox as soon as there is one: what it is for is short, and so may be what it waits for.
    /// Sessions in line come first.
    pub(super) async fn wait(
        &self,
        id: &SandboxId,
        user: Option<&str>,
    ) -> Result<Option<Place>, MachineError> {
        let Some(hall) = &self.hall else { return Ok(None) };
        let (mut moved, now) = (hall.usher.moved(), Instant::now());
        let (until, asks_at) = (now + self.patience, now + ASKS_AFTER.min(self.patience));
        let mut waits = None;
        loop {
            moved.borrow_and_update();
            let asks = Instant::now() >= asks_at;
            let refused = match self.claim_asking(std::slice::from_ref(id), user, asks) {
                Ok(mut places) => return Ok(places.pop()),
                Err(refused) => refused,
            };
            // A server that ends has no place for anybody, and a line that long moves too slowly.
            waits = waits.or_else(|| self.waiting.try_acquire().ok());
            if waits.is_none() || matches!(refused, MachineError::Full { limit: Limit::Closed, .. })
            {
                return Err(refused);
            }
            let look = timeout_at(if asks { until } else { asks_at }, moved.changed()).await;
            if matches!(look, Ok(Err(_))) || Instant::now() >= until {
                return Err(refused);
            }
        }
    }

    /// Something was done with these sandboxes, well or not: those that run keep their places until they end.
    async fn seat(&self, places: Vec<Place>) {
        for place in places {
            match self.machines.sandbox_get(&place.sandbox).await {
                Ok(found) if found.state != SandboxStatus::Running => {}
                Err(MachineError::Missing { .. }) => {}
                Ok(_) | Err(_) => place.watch(Arc::clone(&self.machines)),
            }
        }
    }

    fn number(&self, sandbox: &SandboxId) -> Option<u64> {
        self.hall.as_ref()?.usher.number_raw(sandbox)
    }

    /// A sandbox has ended that had this place: who waits for it need not wait until somebody notices.
    fn left(&self, sandbox: &SandboxId, place: Option<u64>) {
        if let (Some(hall), Some(number)) = (&self.hall, place) {
            hall.usher.leave_raw(sandbox, number);
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
        self.hall.usher.leave_raw(&self.sandbox, self.number);
    }
}
