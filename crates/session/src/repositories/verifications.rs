//! The record of each run of a check: a row in the store, and, while it runs, a value that clients
//! follow. A server that is killed leaves a row in progress, which the next one ends.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures_util::stream::{BoxStream, StreamExt};
use harvest_proto::{
    RepositoryName, SnapshotId, VerificationId,
    api::{Evidence, Verification, VerificationStatus},
    bridge::Author,
};
use harvest_store::StoreError;
use tokio::sync::watch;

use super::{Repositories, RepositoryContext, builds::STORE_RETRY};
use crate::{
    ephemeral::EphemeralError, error::SessionError, error_chain::error_chain, wall_clock::now,
};

/// Verifications that a user may have waiting and running, to order another one. Checks after a
/// push count, and are never refused.
const MAX_UNFINISHED: usize = 20;

/// The verifications in progress.
#[derive(Default)]
pub(crate) struct LiveVerifications(Mutex<HashMap<VerificationId, Live>>);

struct Live {
    now: watch::Sender<Verification>,
    /// The e-mail address of the user that it runs for, in lower case.
    user: String,
}

/// What becomes of an ordered verification.
pub(super) enum Ordered {
    Begun(VerificationRecord),
    /// The same check waits or runs already.
    Same(Box<Verification>),
}

impl LiveVerifications {
    fn lock(&self) -> MutexGuard<'_, HashMap<VerificationId, Live>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn follow(&self, id: &VerificationId) -> Option<watch::Receiver<Verification>> {
        self.lock().get(id).map(|live| live.now.subscribe())
    }

    fn add(&self, live: Live) {
        let id = live.now.borrow().id.clone();
        self.lock().insert(id, live);
    }

    /// Adds an ordered one, unless the same is in progress or the user has too many.
    fn order(&self, new: Live) -> Result<Option<Verification>, SessionError> {
        let mut all = self.lock();
        let id = {
            let wanted = new.now.borrow();
            let found = all.values().find(|live| is_same(&live.now.borrow(), &wanted));
            if let Some(same) = found {
                return Ok(Some(same.now.borrow().clone()));
            }
            wanted.id.clone()
        };
        if all.values().filter(|live| live.user == new.user).count() >= MAX_UNFINISHED {
            let what = format!("{MAX_UNFINISHED} checks of {} wait or run", new.user);
            let hint = "try again when one of them has ended";
            return Err(SessionError::conflict("too_many_verifications", what, hint));
        }
        all.insert(id, new);
        Ok(None)
    }
}

/// Whether two verifications in progress have the same result.
fn is_same(one: &Verification, other: &Verification) -> bool {
    let key = |of: &Verification| {
        let (repository, session) = (of.repository.clone(), of.session.clone());
        (repository, session, of.pull_request, of.commit.clone(), of.base.clone())
    };
    !one.status.has_ended() && one.revision == other.revision && key(one) == key(other)
}

/// A verification in progress. Dropped before its end, it ends as cancelled.
pub(super) struct VerificationRecord {
    shared: Arc<RepositoryContext>,
    now: watch::Sender<Verification>,
    /// Where the disk of its sandbox is saved.
    pub(super) snapshot: SnapshotId,
    ended: bool,
}

impl VerificationRecord {
    /// The record of a check after a push.
    pub(super) async fn begin(
        repositories: &Repositories,
        new: Verification,
        user: &Author,
    ) -> Result<Self, StoreError> {
        let (now, live) = entry(new, user);
        repositories.shared.verifications.add(live);
        Self::store(repositories, now).await
    }

    /// The record of a check that a user orders.
    pub(super) async fn order(
        repositories: &Repositories,
        new: Verification,
        user: &Author,
    ) -> Result<Ordered, SessionError> {
        let (now, live) = entry(new, user);
        match repositories.shared.verifications.order(live)? {
            Some(same) => Ok(Ordered::Same(Box::new(same))),
            None => Ok(Ordered::Begun(Self::store(repositories, now).await?)),
        }
    }

    async fn store(
        repositories: &Repositories,
        now: watch::Sender<Verification>,
    ) -> Result<Self, StoreError> {
        let shared = Arc::clone(&repositories.shared);
        let mut record = Self { shared, now, snapshot: SnapshotId::random(), ended: false };
        let (lease, new) = (record.shared.sandboxes.lease, record.current());
        let stored = record.shared.store.verification_insert(lease, &new, &record.snapshot).await;
        // Without a row there is nothing to end.
        record.ended = stored.is_err();
        stored.map(|()| record)
    }

    pub(super) fn current(&self) -> Verification {
        self.now.borrow().clone()
    }

    pub(super) fn step(&self, step: &str) {
        self.now.send_modify(|now| step.clone_into(&mut now.step));
    }

    /// Records that the verification has its slot.
    pub(super) async fn running(&self) -> Result<(), StoreError> {
        self.now.send_modify(|now| now.status = VerificationStatus::Running);
        let (current, lease) = (self.current(), self.shared.sandboxes.lease);
        self.shared.store.verification_update(lease, &current).await
    }

    /// Stores the result, and removes what later verifications have replaced.
    pub(super) async fn end(
        mut self,
        result: Result<Evidence, String>,
        unpublished: Option<String>,
    ) -> Verification {
        let ended = ended(self.current(), result, unpublished);
        store_end(&self.shared, &ended).await;
        self.ended = true;
        remove_outdated(&self.shared, &ended.repository).await;
        self.now.send_replace(ended.clone());
        ended
    }
}

fn entry(new: Verification, user: &Author) -> (watch::Sender<Verification>, Live) {
    let now = watch::Sender::new(new);
    // E-mail addresses are compared without case.
    (now.clone(), Live { now, user: user.email.to_lowercase() })
}

impl Drop for VerificationRecord {
    fn drop(&mut self) {
        let current = self.current();
        self.shared.verifications.lock().remove(&current.id);
        if self.ended {
            return;
        }
        let ended = ended(current, Err("it was cancelled".to_owned()), None);
        self.now.send_replace(ended.clone());
        let shared = Arc::clone(&self.shared);
        self.shared.sandboxes.tasks.spawn_to_completion(async move {
            let _ended_by_the_next_server =
                shared.store.verification_update(shared.sandboxes.lease, &ended).await;
        });
    }
}

/// Stores an end. Retried: the row would count as running until the next start of the server.
async fn store_end(shared: &RepositoryContext, ended: &Verification) {
    loop {
        match shared.store.verification_update(shared.sandboxes.lease, ended).await {
            Ok(()) | Err(StoreError::LeaseLost | StoreError::Closed) => return,
            Err(error) => {
                let error = error_chain(&error);
                tracing::warn!(id = %ended.id, error, "cannot store a verification; retrying");
            }
        }
        tokio::time::sleep(STORE_RETRY).await;
    }
}

fn ended(
    current: Verification,
    result: Result<Evidence, String>,
    unpublished: Option<String>,
) -> Verification {
    let (status, evidence, error) = match result {
        Ok(evidence) => (VerificationStatus::Done, Some(evidence), None),
        Err(error) => (VerificationStatus::NotRun, None, Some(error)),
    };
    let (step, ended_at) = (String::new(), Some(now()));
    Verification { status, step, evidence, error, unpublished, ended_at, ..current }
}

/// Removes each snapshot before its row forgets it, so that the next verification retries after a
/// crash in between.
async fn remove_outdated(shared: &RepositoryContext, repository: &RepositoryName) {
    let outdated = shared.store.verification_outdated(repository).await.unwrap_or_default();
    let (lease, store) = (shared.sandboxes.lease, &shared.store);
    let Some(snapshots) = shared.sandboxes.provider.snapshots() else { return };
    for snapshot in &outdated {
        match snapshots.remove(snapshot).await {
            Ok(()) => {
                let _ = store.verification_forget(lease, repository, Some(snapshot)).await;
            }
            Err(error) => {
                tracing::warn!(%snapshot, error = error_chain(&error), "cannot remove the snapshot of a check")
            }
        }
    }
    let _ = store.verification_forget(lease, repository, None).await;
}

impl Repositories {
    /// The verifications of a repository that are kept, newest first.
    ///
    /// # Errors
    /// When the repository does not exist.
    pub async fn verifications(
        &self,
        name: &RepositoryName,
    ) -> Result<Vec<Verification>, SessionError> {
        self.get(name).await?;
        let mut all = self.shared.store.verification_list(name).await?;
        let live = self.shared.verifications.lock();
        for one in &mut all {
            if let Some(live) = live.get(&one.id) {
                *one = live.now.borrow().clone();
            }
        }
        Ok(all)
    }

    /// A verification of a repository, as it is now.
    ///
    /// # Errors
    /// When the repository has no such verification.
    pub async fn verification(
        &self,
        name: &RepositoryName,
        id: &VerificationId,
    ) -> Result<Verification, SessionError> {
        let stored = self.shared.store.verification_get(name, id).await?;
        let live = self.shared.verifications.follow(id);
        Ok(live.map_or(stored, |live| live.borrow().clone()))
    }

    /// A verification of a repository each time it changes, until it has ended.
    ///
    /// # Errors
    /// When the repository has no such verification.
    pub async fn verification_follow(
        &self,
        name: &RepositoryName,
        id: &VerificationId,
    ) -> Result<BoxStream<'static, Verification>, SessionError> {
        // Before the row is read: in between it may end.
        let live = self.shared.verifications.follow(id);
        let stored = self.shared.store.verification_get(name, id).await?;
        let Some(live) = live else {
            return Ok(futures_util::stream::iter([stored]).boxed());
        };
        let states = futures_util::stream::unfold(Some((live, true)), async |state| {
            let (mut live, first) = state?;
            // The last value stays when the sender is gone.
            let gone = !first && live.changed().await.is_err();
            let now = live.borrow_and_update().clone();
            let is_last = gone || now.status.has_ended();
            Some((now, (!is_last).then_some((live, false))))
        });
        Ok(states.boxed())
    }
}

/// Why a check could not run, for the row.
pub(super) fn describe(error: &EphemeralError) -> String {
    error_chain(error)
}
