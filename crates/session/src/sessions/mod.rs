//! The sessions of a server. Changes go through the session's driver, reads to the store.

mod artifacts;
mod attachments;
mod budgets;
mod bundles;
mod children;
mod create;
mod diffs;
mod follow;
mod forks;
mod idempotency;
mod pool;
mod retention;
mod sandbox;
mod secrets;
mod snapshots;
mod stats;
mod suspend;
mod syncs;
mod tool_host;
mod verbs;

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use harvest_proto::{
    BranchName, PromptId, SessionId, Timestamp,
    api::{Page, Session, Turn},
    bridge::Author,
};
use tokio::sync::Notify;

use harvest_store::{
    NewPrompt, NewSession, SessionCursor, SessionFilter, SessionRecord, StoreError, Write,
};

use crate::{
    context::Shared,
    decide::{Limit, Mode, SandboxState, State, Waiting},
    driver::{Command, Driver, DriverHandle},
    error::SessionError,
    error_chain::error_chain,
    jobs::Job,
    metrics::Metrics,
    pool::branch as branch_without_title,
    reconcile::Reconcile,
    tasks::Tasks,
    wall_clock::now,
};

pub use bundles::{BundleBytes, SessionBundle};
pub use diffs::DiffRange;
pub use forks::MAX_FORKS;
pub use idempotency::CreatedUnderKey;
pub use snapshots::RestorePoint;
pub use stats::ServerStats;

const PAGE: u32 = 200;

const UNLOAD_PERIOD: Duration = Duration::from_secs(60);

/// A session to insert: its row, its state, its first prompt, and further writes.
type SessionInsert = (NewSession, State, Option<NewPrompt>, Vec<Write>);

/// All sessions of one server. Cheap to clone; drivers stop when the last clone is dropped.
#[derive(Clone)]
pub struct Sessions {
    shared: Arc<Shared>,
    drivers: Arc<Mutex<HashMap<SessionId, DriverHandle>>>,
    metrics: Arc<Metrics>,
    /// The idempotency key of the request in progress.
    key: Option<Arc<str>>,
    _stop: Arc<StopOnDrop>,
}

struct StopOnDrop(Tasks);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Sessions {
    /// Recovers every stored session: running sandboxes are adopted, dead ones saved as recovered,
    /// orphaned ones removed.
    pub(crate) async fn open(shared: Shared) -> Result<Self, SessionError> {
        let metrics = Arc::new(Metrics::default());
        let counted = Arc::clone(&metrics);
        shared.store.event_watch(move |event| counted.record(event));
        let stop = Arc::new(StopOnDrop(shared.tasks.clone()));
        let sessions = Self {
            shared: Arc::new(shared),
            drivers: Arc::default(),
            metrics,
            key: None,
            _stop: stop,
        };
        sessions.serve_tools();
        sessions.recover().await?;
        Ok(sessions)
    }

    /// Grants no more slots; waiting sessions stay queued.
    pub fn stop_admitting(&self) {
        self.shared.sandboxes.admission.set_open(false);
    }

    /// Stops all drivers, builds, checks and background jobs. Sandboxes and their turns keep
    /// running; the next server adopts them.
    pub async fn close(&self) {
        self.stop_admitting();
        self.shared.tasks.close().await;
    }

    async fn recover(&self) -> Result<(), SessionError> {
        let store = &self.shared.store;
        store.idempotency_release_all().await?;
        let charged = store.call_charge_unsettled(self.shared.lease).await?;
        if charged > 0 {
            tracing::warn!(charged, "charged model calls of an earlier server as they were held");
        }
        // Lists the sandboxes first: any that a driver starts from here on are not orphans.
        let reconcile = Reconcile::begin(&self.shared).await?;
        // Oldest first; no slot is granted before all holders are known.
        for record in store.session_at_work().await? {
            if self.needs_driver(&record) {
                self.start_driver(record).await;
            }
        }
        self.shared.sandboxes.service.adopt_running().await?;
        self.shared.pool.adopt().await?;
        self.shared.sandboxes.admission.set_open(true);
        reconcile.finish(&self.shared).await?;
        self.shared.pool.spawn();
        self.shared.removals.spawn();
        self.shared.retention.spawn();
        self.shared.sandboxes.meter.spawn(&self.shared.tasks);
        self.spawn_unload();
        Ok(())
    }

    /// Starts the job that unloads resting sessions.
    fn spawn_unload(&self) {
        let job =
            Job { name: "unload", period: Some(UNLOAD_PERIOD), wake: Arc::new(Notify::new()) };
        let drivers = Arc::clone(&self.drivers);
        job.spawn(&self.shared.tasks, move || {
            unload_resting(&drivers);
            std::future::ready(Ok(()))
        });
    }

    /// Ends the drivers of resting sessions, so that memory does not grow with the number of
    /// sessions; the next request loads them again. Returns how many are loaded.
    pub fn unload_resting(&self) -> usize {
        unload_resting(&self.drivers)
    }

    /// A session without work gets a driver only on the next request.
    fn needs_driver(&self, record: &SessionRecord) -> bool {
        !serde_json::from_str::<State>(&record.driver_state).is_ok_and(|state| {
            if let Some(waiting) = state.waiting {
                self.shared.sandboxes.admission.reserve_sequence(waiting.sequence);
            }
            let queued = record.session.queued > 0;
            let nothing_to_do = match &state.mode {
                Mode::Active => !queued && !state.start_requested,
                mode if mode.is_suspended() => !queued,
                Mode::Failed { .. } => state.retry_at.is_none(),
                _ => true,
            };
            state.sandbox == SandboxState::Absent
                && nothing_to_do
                && record.checkouts.iter().all(|checkout| checkout.unreviewed().is_none())
        })
    }

    async fn start_driver(&self, record: SessionRecord) {
        let id = record.session.id.clone();
        let queue = self.shared.store.prompt_queue(&id).await.map_err(SessionError::from);
        match queue.and_then(|queue| Driver::spawn(&self.shared, record, queue)) {
            Ok(handle) => {
                self.drivers().insert(id, handle);
            }
            // One unreadable session must not block the others.
            Err(error) => {
                tracing::error!(session = %id, error = error_chain(&error), "cannot recover a session")
            }
        }
    }

    fn drivers(&self) -> MutexGuard<'_, HashMap<SessionId, DriverHandle>> {
        self.drivers.lock().expect("no holder of this lock can panic")
    }

    /// The handle of a session's driver, which is started if there is none. The stored state is
    /// read without the lock, and discarded if another driver was started meanwhile.
    async fn handle(&self, session: &SessionId) -> Result<DriverHandle, SessionError> {
        loop {
            let before = self.drivers().get(session).cloned();
            if let Some(handle) = &before {
                handle.wait_while_leaving().await;
            }
            if let Some(handle) = before.as_ref().filter(|handle| !handle.is_closed()) {
                return Ok(handle.clone());
            }
            let record = self.shared.store.session_get(session).await?;
            let queue = self.shared.store.prompt_queue(session).await?;
            if let Some(handle) = self.replace_driver(before.as_ref(), record, queue)? {
                return Ok(handle);
            }
        }
    }

    /// Starts a driver in place of `before`; `None` when another one was started meanwhile.
    fn replace_driver(
        &self,
        before: Option<&DriverHandle>,
        record: SessionRecord,
        queue: Vec<PromptId>,
    ) -> Result<Option<DriverHandle>, SessionError> {
        let mut drivers = self.drivers();
        let id = record.session.id.clone();
        let same = match (before, drivers.get(&id)) {
            (None, None) => true,
            (Some(before), Some(now)) => now.same_driver(before),
            _ => false,
        };
        if !same {
            return Ok(None);
        }
        let handle = Driver::spawn(&self.shared, record, queue)?;
        drivers.insert(id, handle.clone());
        Ok(Some(handle))
    }

    async fn insert(
        &self,
        new: NewSession,
        state: State,
        prompt: Option<NewPrompt>,
        writes: Vec<Write>,
    ) -> Result<Session, SessionError> {
        let mut sessions = self.insert_all(vec![(new, state, prompt, writes)]).await?;
        Ok(sessions.remove(0))
    }

    /// Creates all of these sessions in one transaction.
    async fn insert_all(&self, all: Vec<SessionInsert>) -> Result<Vec<Session>, SessionError> {
        let queues: Vec<(SessionId, Vec<PromptId>)> = all
            .iter()
            .map(|(new, _, prompt, _)| {
                (new.id.clone(), prompt.iter().map(|prompt| prompt.id.clone()).collect())
            })
            .collect();
        let inserts = all.into_iter().map(|(new, mut state, prompt, mut writes)| {
            state.start_requested = true;
            if state.sandbox == SandboxState::Absent {
                // Queued at once: the order of creation is the order in the queue, whichever driver
                // is faster.
                let sequence = self.shared.sandboxes.admission.next_sequence();
                state.waiting = Some(Waiting { sequence, limit: Limit::Closed, position: 0 });
            }
            let json =
                serde_json::to_string(&state).expect("a state holds only maps with text keys");
            writes.insert(0, crate::driver::created(new.at));
            writes.push(crate::driver::state_write(&state, json, false));
            writes.extend(prompt.map(|prompt| Write::PromptInsert(Box::new(prompt))));
            writes.extend(self.created_write(&new.id.to_string()));
            (new, writes)
        });
        self.shared.store.session_insert_all(self.shared.lease, inserts.collect()).await?;
        let mut sessions = Vec::new();
        for (id, queue) in queues {
            let record = self.shared.store.session_get(&id).await?;
            sessions.push(self.with_current_urls(record.session.clone()));
            self.replace_driver(None, record, queue)?;
        }
        Ok(sessions)
    }

    /// # Errors
    /// When there is no such session.
    pub async fn get(&self, session: &SessionId) -> Result<Session, SessionError> {
        Ok(self.with_current_urls(self.shared.store.session_get(session).await?.session))
    }

    /// # Errors
    /// When there is no such session.
    pub async fn author(&self, session: &SessionId) -> Result<Author, SessionError> {
        Ok(self.shared.store.session_author(session).await?)
    }

    /// Replaces stored URLs of the forge by current ones.
    fn with_current_urls(&self, mut session: Session) -> Session {
        let current = |url: &mut String| *url = self.shared.repositories.current_url(url);
        for repository in &mut session.repositories {
            current(&mut repository.url);
            repository.pr.iter_mut().for_each(|pull| current(&mut pull.url));
        }
        session.pr_url.iter_mut().for_each(current);
        session
    }

    /// Sessions, newest first.
    ///
    /// # Errors
    /// When the cursor is invalid.
    pub async fn list(
        &self,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<Page<Session>, SessionError> {
        self.find(&SessionFilter::default(), cursor, limit).await
    }

    /// Sessions that match a filter, newest first.
    ///
    /// # Errors
    /// When the cursor is invalid.
    pub async fn find(
        &self,
        filter: &SessionFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<Page<Session>, SessionError> {
        let before = cursor.map(parse_cursor).transpose()?;
        let page = self.shared.store.session_find(filter, before, limit.clamp(1, PAGE)).await?;
        let sessions = page.records.into_iter();
        let items = sessions.map(|record| self.with_current_urls(record.session)).collect();
        let next_cursor = page.next.map(|(at, id)| format!("{}.{id}", at.as_millis()));
        Ok(Page { items, next_cursor })
    }

    /// The number of sessions in each state; states without sessions are left out.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn counts(&self) -> Result<BTreeMap<String, u64>, SessionError> {
        let counts = self.shared.store.session_count().await?;
        Ok(counts.into_iter().map(|(state, count)| (state.as_str().to_owned(), count)).collect())
    }

    /// Deletes a session, its sandbox and its snapshots.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn delete(&self, session: &SessionId) -> Result<(), SessionError> {
        let handle = match self.handle(session).await {
            Err(SessionError::Store(StoreError::Corrupt { .. })) => {
                return self.delete_damaged(session).await;
            }
            handle => handle?,
        };
        let deleted = handle.call(|reply| Command::Delete { reply }).await;
        self.not_found_if_deleted(session, deleted).await?;
        self.drivers().remove(session);
        Ok(())
    }

    /// Deletes a session that has no driver, because its row cannot be read.
    async fn delete_damaged(&self, session: &SessionId) -> Result<(), SessionError> {
        let Shared { store, lease, removals, .. } = &*self.shared;
        let removed = store.session_delete(session, *lease, Vec::new(), now()).await?;
        removals.remove_now(&removed).await;
        Ok(())
    }

    /// Turns `Stopped` into `NotFound` if the session was deleted during the call.
    async fn not_found_if_deleted<T>(
        &self,
        session: &SessionId,
        result: Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        if matches!(result, Err(SessionError::Stopped)) {
            self.check_exists(session).await?;
        }
        result
    }

    async fn check_exists(&self, session: &SessionId) -> Result<(), SessionError> {
        match self.shared.store.session_exists(session).await? {
            true => Ok(()),
            false => Err(SessionError::missing(format!("session {session}"))),
        }
    }

    /// Returns the rows of a session; fails if there are none because there is no such session.
    pub(crate) async fn exists_if_empty<T>(
        &self,
        session: &SessionId,
        rows: Vec<T>,
    ) -> Result<Vec<T>, SessionError> {
        if rows.is_empty() {
            self.check_exists(session).await?;
        }
        Ok(rows)
    }

    /// A session's turns, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn turns(&self, session: &SessionId) -> Result<Vec<Turn>, SessionError> {
        let turns = self.shared.store.turn_list(session).await?;
        self.exists_if_empty(session, turns).await
    }

    /// A session's turn, with the full text of its prompt.
    ///
    /// # Errors
    /// When there is no such session or turn.
    pub async fn turn(&self, session: &SessionId, number: u32) -> Result<Turn, SessionError> {
        Ok(self.shared.store.turn_get(session, number).await?)
    }
}

fn unload_resting(drivers: &Mutex<HashMap<SessionId, DriverHandle>>) -> usize {
    let mut drivers = drivers.lock().expect("no holder of this lock can panic");
    drivers.retain(|_, handle| !handle.is_closed());
    drivers.shrink_to_fit();
    drivers.values().for_each(DriverHandle::exit_if_resting);
    drivers.len()
}

fn branch(session: &SessionId, title: Option<&str>) -> BranchName {
    let Some(title) = title else { return branch_without_title(session) };
    let name = format!("harvest/{}-{}", harvest_forge::slug(title), session.part());
    name.parse().expect("slugs and ids have only letters, digits and hyphens")
}

fn parse_cursor(cursor: &str) -> Result<SessionCursor, SessionError> {
    cursor
        .split_once('.')
        .filter(|(_, id)| !id.contains('\0'))
        .and_then(|(at, id)| Some((Timestamp::from_millis(at.parse().ok()?), id.to_owned())))
        .ok_or_else(|| SessionError::invalid("invalid_cursor", "invalid cursor"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cursors_round_trip_and_garbage_is_refused() {
        assert_eq!(parse_cursor("17.ses_a").unwrap(), (Timestamp::from_millis(17), "ses_a".into()));
        assert!(parse_cursor("x").is_err() && parse_cursor("x.ses_a").is_err());
    }
}
