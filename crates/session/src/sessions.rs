//! What the server asks of sessions. Every change goes to the session's driver; looking goes to the
//! store.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use futures_util::FutureExt;
use harvest_proto::{
    AgentName, SessionId, Timestamp,
    agents::UnknownAgent,
    api::{Page, Pull, Session, Snapshot, Turn},
};
use harvest_store::{NewPrompt, NewSession, SessionFilter, SessionRecord, Write};
use tokio::sync::Semaphore;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    decide::{Limit, Machine, Rest, SUSPENDED, State, Waiting},
    driver::{Command, Driver, Handle},
    error::SessionError,
    meters::Meters,
    reconcile::Reconcile,
    steady::Steady,
    usher::Usher,
    wiring::{Parts, Shared, words},
};

const PAGE: u32 = 200;

/// A session to be: what it is, where it stands, its first prompt, and what else is written with it.
pub(crate) type Birth = (NewSession, State, Option<NewPrompt>, Vec<Write>);

/// All sessions of one server. Cheap to clone; drivers stop when the last clone is dropped.
#[derive(Clone)]
pub struct Sessions {
    pub(crate) shared: Arc<Shared>,
    drivers: Arc<Mutex<HashMap<SessionId, Handle>>>,
    /// The idempotency key that what is made now is made under.
    pub(crate) key: Option<Arc<str>>,
    _stop: Arc<StopOnDrop>,
}

struct StopOnDrop(CancellationToken);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Sessions {
    /// Takes up every session where the store says it stands: sandboxes that run are adopted, dead
    /// ones kept as recovered, those nobody owns ended.
    ///
    /// # Errors
    /// When the store cannot be read, or the provider cannot say which sandboxes it holds.
    pub async fn open(parts: Parts) -> Result<Self, SessionError> {
        let known = parts.config.trusted.clone();
        Self::open_trusting(parts, std::future::ready(known)).await
    }

    /// As [`Sessions::open`], with the trusted names still to come, in place of those in the
    /// configuration: finding them out takes a host seconds. Everything but the doors of `trusted`
    /// sandboxes goes on meanwhile.
    ///
    /// # Errors
    /// As [`Sessions::open`].
    pub async fn open_trusting(
        parts: Parts,
        trusted: impl Future<Output = Vec<String>> + Send + 'static,
    ) -> Result<Self, SessionError> {
        let stop = CancellationToken::new();
        let meters = Arc::new(Meters::default());
        let counted = Arc::clone(&meters);
        parts.store.event_watch(move |event| counted.stored(event));
        let mut config = parts.config;
        config.clocks.idle_freeze =
            config.clocks.idle_freeze.filter(|_| parts.provider.freezing().is_some());
        let limits = config.limits;
        let shared = Arc::new(Shared {
            steady: Steady::open(&parts.store).await?,
            store: parts.store,
            lease: parts.lease,
            provider: parts.provider,
            doors: parts.doors,
            pulls: parts.pulls,
            vault: parts.vault,
            config,
            trusted: trusted.boxed().shared(),
            stop: stop.clone(),
            tracker: TaskTracker::new(),
            hidden: Mutex::default(),
            meters,
            removals: tokio::sync::Notify::new(),
            usher: Usher::new(limits),
            checks: Semaphore::new(limits.checks.min(Semaphore::MAX_PERMITS)),
        });
        let sessions =
            Self { shared, drivers: Arc::default(), key: None, _stop: Arc::new(StopOnDrop(stop)) };
        sessions.pick_up().await?;
        Ok(sessions)
    }

    /// From here on nobody gets a place, and whoever waits for one is told so.
    pub fn give_no_more_places(&self) {
        self.shared.usher.set_open(false);
    }

    /// Stops driving. Sandboxes and their turns go on; the next server adopts them.
    pub async fn close(&self) {
        self.give_no_more_places();
        self.shared.stop.cancel();
        self.shared.tracker.close();
        self.shared.tracker.wait().await;
        // A build or a check that was under way: no server will look for it before the next one starts.
        for sandbox in self.shared.hidden() {
            if let Err(error) = self.shared.provider.end(&sandbox).await {
                tracing::warn!(%sandbox, error = words(&error), "the sandbox of a build or check cannot be ended");
            }
        }
    }

    async fn pick_up(&self) -> Result<(), SessionError> {
        let store = &self.shared.store;
        store.idempotency_release_all().await?;
        // Before the walk: what a session starts from here on, for itself or for a check, is nobody's stray.
        let mut reconcile = Reconcile::begin(&self.shared).await?;
        let (mut cursor, mut driven) = (None, Vec::new());
        loop {
            let page = store.session_list(cursor.clone(), PAGE).await?;
            let Some(last) = page.last() else { break };
            cursor = Some((last.session.created_at, last.session.id.clone()));
            for record in page {
                reconcile.owned_by(&record);
                if !self.is_resting(&record) {
                    driven.push(record);
                }
            }
        }
        // The oldest first, and nobody gets a place before everybody who has one is known.
        for record in driven.into_iter().rev() {
            self.take_up(record).await;
        }
        for (sandbox, user) in self.shared.provider.others().await? {
            self.shared.usher.take_raw(sandbox, user);
        }
        self.shared.usher.set_open(true);
        reconcile.finish(&self.shared).await?;
        crate::removals::spawn(&self.shared);
        crate::retention::spawn(&self.shared);
        Ok(())
    }

    /// A session that rests is left alone until somebody asks for it.
    fn is_resting(&self, record: &SessionRecord) -> bool {
        serde_json::from_str::<State>(&record.drive).is_ok_and(|state| {
            if let Some(waiting) = state.waiting {
                self.shared.usher.tickets_after(waiting.ticket);
            }
            let queued = record.session.queued > 0;
            let nothing_to_do = match &state.rest {
                Rest::Open => !queued && !state.wake,
                Rest::Paused { reason } if reason == SUSPENDED => !queued,
                _ => true,
            };
            state.machine == Machine::Absent
                && nothing_to_do
                && record.checkouts.iter().all(|checkout| checkout.unreviewed().is_none())
        })
    }

    async fn take_up(&self, record: SessionRecord) {
        let id = record.session.id.clone();
        let queue = self.shared.store.prompt_queue(&id).await.map_err(SessionError::from);
        match queue.and_then(|queue| Driver::spawn(&self.shared, record, queue)) {
            Ok(handle) => {
                self.drivers().insert(id, handle);
            }
            // One unreadable session must not keep the others from going on.
            Err(error) => {
                tracing::error!(session = %id, error = words(&error), "a session cannot be taken up")
            }
        }
    }

    fn drivers(&self) -> MutexGuard<'_, HashMap<SessionId, Handle>> {
        self.drivers.lock().expect("no holder of this lock can panic")
    }

    /// The way to a session's driver, which is started if there is none. Nobody else waits while it is read
    /// where the session stands; what was read counts only if nobody else has driven it meanwhile.
    pub(crate) async fn handle(&self, session: &SessionId) -> Result<Handle, SessionError> {
        loop {
            let before = self.drivers().get(session).cloned();
            if let Some(handle) = before.as_ref().filter(|handle| !handle.is_over()) {
                return Ok(handle.clone());
            }
            let record = self.shared.store.session_get(session).await?;
            let queue = self.shared.store.prompt_queue(session).await?;
            let mut drivers = self.drivers();
            let same = match (&before, drivers.get(session)) {
                (None, None) => true,
                (Some(before), Some(now)) => now.is(before),
                _ => false,
            };
            if same {
                let handle = Driver::spawn(&self.shared, record, queue)?;
                drivers.insert(session.clone(), handle.clone());
                return Ok(handle);
            }
        }
    }

    pub(crate) async fn insert(
        &self,
        new: NewSession,
        state: State,
        prompt: Option<NewPrompt>,
        writes: Vec<Write>,
    ) -> Result<Session, SessionError> {
        let mut sessions = self.insert_all(vec![(new, state, prompt, writes)]).await?;
        Ok(sessions.remove(0))
    }

    /// Creates all of these sessions, or none.
    pub(crate) async fn insert_all(&self, all: Vec<Birth>) -> Result<Vec<Session>, SessionError> {
        let ids: Vec<SessionId> = all.iter().map(|(new, ..)| new.id.clone()).collect();
        let births = all.into_iter().map(|(new, mut state, prompt, mut writes)| {
            state.wake = true;
            // From here on: who is created first is first in line, whichever driver is faster.
            let ticket = self.shared.usher.ticket();
            state.waiting = Some(Waiting { ticket, limit: Limit::Closed, position: 0 });
            let drive =
                serde_json::to_string(&state).expect("a state holds only maps with text keys");
            writes.insert(0, crate::driver::created(new.at));
            writes.push(Write::Drive {
                drive,
                state: state.shown.state,
                reason: state.shown.reason.clone(),
                sandbox: None,
                epoch: 0,
                snapshot: state.disk.clone(),
            });
            writes.extend(prompt.map(|prompt| Write::PromptInsert(Box::new(prompt))));
            writes.extend(self.made(&new.id.to_string()));
            (new, writes)
        });
        self.shared.store.session_insert_all(self.shared.lease, births.collect()).await?;
        let mut sessions = Vec::new();
        for id in &ids {
            self.handle(id).await?;
            sessions.push(self.get(id).await?);
        }
        Ok(sessions)
    }

    /// A session.
    ///
    /// # Errors
    /// When there is none.
    pub async fn get(&self, session: &SessionId) -> Result<Session, SessionError> {
        Ok(self.shown(self.shared.store.session_get(session).await?.session))
    }

    /// With URLs that lead where they lead now.
    fn shown(&self, mut session: Session) -> Session {
        let current = |url: &mut String| *url = self.shared.pulls.current(url);
        for repository in &mut session.repositories {
            current(&mut repository.url);
            repository.pull.iter_mut().for_each(|pull| current(&mut pull.url));
        }
        session.pull.iter_mut().for_each(|pull| current(&mut pull.url));
        session.pr_url.iter_mut().for_each(current);
        session
    }

    /// Sessions, newest first.
    ///
    /// # Errors
    /// When the cursor is not one of ours.
    pub async fn list(
        &self,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<Page<Session>, SessionError> {
        self.find(&SessionFilter::default(), cursor, limit).await
    }

    /// The same, only those that fit.
    ///
    /// # Errors
    /// When the cursor is not one of ours.
    pub async fn find(
        &self,
        filter: &SessionFilter,
        cursor: Option<&str>,
        limit: u32,
    ) -> Result<Page<Session>, SessionError> {
        let limit = limit.clamp(1, PAGE);
        let before = cursor.map(parse_cursor).transpose()?;
        let mut items: Vec<Session> = self
            .shared
            .store
            .session_find(filter, before, limit + 1)
            .await?
            .into_iter()
            .map(|record| self.shown(record.session))
            .collect();
        let more = items.len() > limit as usize;
        items.truncate(limit as usize);
        let next_cursor = items.last().filter(|_| more).map(cursor_of);
        Ok(Page { items, next_cursor })
    }

    /// Forgets a session, its machine and its snapshots.
    ///
    /// # Errors
    /// When there is none.
    pub async fn delete(&self, session: &SessionId) -> Result<(), SessionError> {
        let deleted = self.handle(session).await?.call(|reply| Command::Delete { reply }).await;
        self.or_missing(session, deleted).await?;
        self.drivers().remove(session);
        Ok(())
    }

    /// Who asked while somebody else deleted the session hears that it is not there.
    pub(crate) async fn or_missing<T>(
        &self,
        session: &SessionId,
        answer: Result<T, SessionError>,
    ) -> Result<T, SessionError> {
        if matches!(answer, Err(SessionError::Stopped)) {
            self.shared.store.session_get(session).await?;
        }
        answer
    }

    /// A session's turns, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn turns(&self, session: &SessionId) -> Result<Vec<Turn>, SessionError> {
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.turn_list(session).await?)
    }

    /// A session's turn, with the whole of its prompt.
    ///
    /// # Errors
    /// When there is no such session or turn.
    pub async fn turn(&self, session: &SessionId, number: u32) -> Result<Turn, SessionError> {
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.turn_get(session, number).await?)
    }

    /// A session's snapshots, oldest first.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn snapshots(&self, session: &SessionId) -> Result<Vec<Snapshot>, SessionError> {
        self.shared.store.session_get(session).await?;
        Ok(self.shared.store.snapshot_list(session).await?)
    }

    /// A session's pull request, if there is one.
    ///
    /// # Errors
    /// When there is no such session.
    pub async fn pull(&self, session: &SessionId) -> Result<Option<Pull>, SessionError> {
        Ok(self.get(session).await?.pull)
    }

    /// Every session's pull request, the last changed first.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn pulls(&self) -> Result<Vec<(SessionId, Pull)>, SessionError> {
        let mut all = self.shared.store.pull_list().await?;
        all.iter_mut().for_each(|(_, pull)| pull.url = self.shared.pulls.current(&pull.url));
        Ok(all)
    }
}

pub(crate) fn named_agent(agent: Option<String>) -> Result<String, SessionError> {
    let named = agent.map_or(Ok(AgentName::default()), |name| name.parse());
    let unknown =
        |unknown: UnknownAgent| SessionError::invalid("invalid_agent", unknown.to_string());
    named.map(String::from).map_err(unknown)
}

pub(crate) fn named_network(network: Option<String>) -> Result<String, SessionError> {
    match network.as_deref() {
        None | Some("trusted") => Ok("trusted".to_owned()),
        Some("none") => Ok("none".to_owned()),
        Some(other) => {
            let what = format!("there is no network policy `{other}`; use `trusted` or `none`");
            Err(SessionError::invalid("invalid_network", what))
        }
    }
}

pub(crate) fn branch(session: &SessionId, title: Option<&str>) -> String {
    match title {
        Some(title) => format!("harvest/{}-{}", harvest_github::slug(title), session.part()),
        None => format!("harvest/{}", session.part()),
    }
}

fn cursor_of(session: &Session) -> String {
    format!("{}.{}", session.created_at.as_millis(), session.id)
}

fn parse_cursor(cursor: &str) -> Result<(Timestamp, SessionId), SessionError> {
    cursor
        .split_once('.')
        .and_then(|(at, id)| Some((Timestamp::from_millis(at.parse().ok()?), id.parse().ok()?)))
        .ok_or_else(|| SessionError::invalid("invalid_cursor", "that is not a cursor of ours"))
}

/// A random UUID (version 4): what agents take for the id of a conversation.
pub(crate) fn uuid() -> String {
    let mut bytes = [0u8; 16];
    getrandom::fill(&mut bytes)
        .expect("the kernel's random source is there on every Linux we support");
    bytes[6] = (bytes[6] & 0x0f) | 0x40;
    bytes[8] = (bytes[8] & 0x3f) | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_survives_the_round_trip_and_garbage_is_refused() {
        let id = SessionId::random();
        let cursor = format!("17.{id}");
        assert_eq!(parse_cursor(&cursor).unwrap(), (Timestamp::from_millis(17), id));
        assert!(parse_cursor("x").is_err());
    }
}
