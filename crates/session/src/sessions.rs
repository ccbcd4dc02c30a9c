//! What the server asks of sessions. Every change goes to the session's driver; looking goes to the
//! store.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
};

use futures_util::FutureExt;
use harvest_proto::{
    SessionId, SnapshotId, Timestamp,
    api::{ForkSession, Page, Pull, Session, Snapshot, Turn},
    bridge::Author,
};
use harvest_store::{
    CheckoutRecord, NewCheckout, NewPrompt, NewSession, SessionFilter, SessionRecord, Write,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    asks::{new_prompt, title},
    decide::{Machine, Rest, State},
    driver::{Command, Driver, Handle},
    error::SessionError,
    wiring::{Parts, Shared, now, words},
};

const PAGE: u32 = 200;

/// All sessions of one server. Cheap to clone; drivers stop when the last clone is dropped.
#[derive(Clone)]
pub struct Sessions {
    pub(crate) shared: Arc<Shared>,
    drivers: Arc<tokio::sync::Mutex<HashMap<SessionId, Handle>>>,
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
        let shared = Arc::new(Shared {
            store: parts.store,
            lease: parts.lease,
            provider: parts.provider,
            doors: parts.doors,
            pulls: parts.pulls,
            vault: parts.vault,
            config: parts.config,
            trusted: trusted.boxed().shared(),
            stop: stop.clone(),
            tracker: TaskTracker::new(),
            hidden: Mutex::default(),
        });
        let sessions = Self { shared, drivers: Arc::default(), _stop: Arc::new(StopOnDrop(stop)) };
        sessions.pick_up().await?;
        Ok(sessions)
    }

    /// Stops driving. Sandboxes and their turns go on; the next server adopts them.
    pub async fn close(&self) {
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
        let found = self.shared.provider.list().await?;
        let (mut owned, mut cursor) = (HashSet::new(), None);
        loop {
            let page = store.session_list(cursor.clone(), PAGE).await?;
            let Some(last) = page.last() else { break };
            cursor = Some((last.session.created_at, last.session.id.clone()));
            for record in page {
                owned.extend(record.session.sandbox.clone());
                self.take_up(record).await?;
            }
        }
        for sandbox in found.into_iter().filter(|sandbox| !owned.contains(sandbox)) {
            tracing::info!(%sandbox, "ending a sandbox nobody owns");
            if let Err(error) = self.shared.provider.end(&sandbox).await {
                tracing::warn!(%sandbox, error = words(&error), "a sandbox nobody owns cannot be ended");
            }
        }
        // Last, when no sandbox starts from them any more.
        for (snapshot, _) in store.build_unfinished().await? {
            store.build_fail(self.shared.lease, &snapshot, "the server was restarted", now()).await?;
            if let Some(snapshots) = self.shared.provider.snapshots() {
                let _ = snapshots.remove(&snapshot).await;
            }
        }
        Ok(())
    }

    /// A session that rests is left alone until somebody asks for it.
    async fn take_up(&self, record: SessionRecord) -> Result<(), SessionError> {
        let resting = serde_json::from_str::<State>(&record.drive).is_ok_and(|state| {
            let nothing_to_do = state.rest != Rest::Open || (record.session.queued == 0 && !state.wake);
            state.machine == Machine::Absent
                && nothing_to_do
                && record.checkouts.iter().all(|checkout| checkout.unreviewed().is_none())
        });
        if resting {
            return Ok(());
        }
        let id = record.session.id.clone();
        match Driver::spawn(&self.shared, record).await {
            Ok(handle) => {
                self.drivers.lock().await.insert(id, handle);
            }
            // One unreadable session must not keep the others from going on.
            Err(error) => {
                tracing::error!(session = %id, error = words(&error), "a session cannot be taken up")
            }
        }
        Ok(())
    }

    pub(crate) async fn handle(&self, session: &SessionId) -> Result<Handle, SessionError> {
        let mut drivers = self.drivers.lock().await;
        if let Some(handle) = drivers.get(session).filter(|handle| !handle.is_over()) {
            return Ok(handle.clone());
        }
        let record = self.shared.store.session_get(session).await?;
        let handle = Driver::spawn(&self.shared, record).await?;
        drivers.insert(session.clone(), handle.clone());
        Ok(handle)
    }

    /// Creates a session that goes on from the end of a turn of another.
    ///
    /// # Errors
    /// When the turn is not known or left no snapshot.
    pub async fn fork(
        &self,
        session: &SessionId,
        fork: ForkSession,
        user: Author,
    ) -> Result<Session, SessionError> {
        let source = self.shared.store.session_get(session).await?;
        let turns = self.shared.store.turn_list(session).await?;
        let (snapshot, at) = fork_point(&source.session, &turns, fork.turn)?;
        let ended = turns.iter().find(|turn| turn.snapshot.as_ref() == Some(&snapshot));
        let forked_turn = ended.map(|turn| turn.number);
        let prompt = fork.prompt.map(|text| new_prompt(text, user.clone())).transpose()?;
        let title =
            prompt.as_ref().map_or_else(|| source.session.title.clone(), |prompt| title(&prompt.text));
        let id = SessionId::random();
        let new = NewSession {
            branch: branch(&id, Some(&title)),
            id,
            title,
            checkouts: source.checkouts.iter().map(same_start).collect(),
            agent: source.session.agent.clone(),
            model: source.session.model.clone(),
            network: source.session.network.clone(),
            author: user,
            conversation: source.conversation.clone(),
            forked_from: Some(session.clone()),
            forked_turn,
            key: None,
            env: source.env.clone(),
            at: now(),
        };
        let detail = format!("fork of {session} at {at}");
        let began = fork_writes(&snapshot, detail, new.at);
        self.insert(new, State::new(Some(snapshot), true), prompt, began).await
    }

    pub(crate) async fn insert(
        &self,
        new: NewSession,
        mut state: State,
        prompt: Option<NewPrompt>,
        mut writes: Vec<Write>,
    ) -> Result<Session, SessionError> {
        let (id, at) = (new.id.clone(), new.at);
        state.wake = true;
        let drive = serde_json::to_string(&state).expect("a state holds only maps with text keys");
        writes.insert(0, crate::driver::created(at));
        writes.push(Write::Drive {
            drive,
            state: state.shown.state,
            reason: state.shown.reason.clone(),
            sandbox: None,
            epoch: 0,
            snapshot: state.disk.clone(),
        });
        writes.extend(prompt.map(|prompt| Write::PromptInsert(Box::new(prompt))));
        self.shared.store.session_insert(self.shared.lease, new, writes).await?;
        self.handle(&id).await?;
        self.get(&id).await
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
    pub async fn list(&self, cursor: Option<&str>, limit: u32) -> Result<Page<Session>, SessionError> {
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
        self.drivers.lock().await.remove(session);
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

/// What a fork begins with, and where in the session that was, in words.
fn fork_point(
    source: &Session,
    turns: &[Turn],
    wanted: Option<u32>,
) -> Result<(SnapshotId, String), SessionError> {
    let at = |number: u32| format!("turn {number}");
    let newest = || turns.iter().rev().find_map(|turn| Some((turn.snapshot.clone()?, at(turn.number))));
    let Some(number) = wanted else {
        // A fork that has had no turn yet, or a session put away: only what was kept last is there.
        let kept = || Some((source.snapshot.clone()?, "its newest snapshot".to_owned()));
        return newest().or_else(kept).ok_or_else(|| {
            let what = "the session has ended no turn yet";
            SessionError::conflict("no_snapshot", what, "wait for its first turn to end")
        });
    };
    let turn = turns.iter().find(|turn| turn.number == number);
    let turn = turn.ok_or_else(|| SessionError::missing(at(number)))?;
    let snapshot = turn.snapshot.clone().ok_or_else(|| {
        SessionError::conflict(
            "no_snapshot",
            format!("turn {number} left no snapshot"),
            "wait for the turn to end, or fork from another",
        )
    })?;
    Ok((snapshot, at(number)))
}

/// A fork's work is compared with what its source's is compared with.
fn same_start(source: &CheckoutRecord) -> NewCheckout {
    NewCheckout {
        repository: source.repository.clone(),
        base: source.base.clone(),
        base_commit: source.base_commit.clone(),
    }
}

/// What a session begins with that starts from a snapshot of another.
pub(crate) fn fork_writes(snapshot: &SnapshotId, detail: String, at: Timestamp) -> Vec<Write> {
    let body = harvest_proto::EventBody::Restored { snapshot: snapshot.clone(), detail };
    vec![
        Write::Event { at, turn: None, body: Box::new(body) },
        // A row of its own, so that the snapshot outlives the session that took it.
        Write::SnapshotInsert {
            snapshot: snapshot.clone(),
            kind: harvest_proto::event::SnapshotKind::Turn,
            turn: None,
            at,
        },
    ]
}

pub(crate) fn named_agent(agent: Option<String>) -> Result<String, SessionError> {
    match agent.as_deref() {
        None | Some("claude") => Ok("claude".to_owned()),
        Some(other) => {
            Err(SessionError::invalid("invalid_agent", format!("there is no agent `{other}`; use `claude`")))
        }
    }
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
    getrandom::fill(&mut bytes).expect("the kernel's random source is there on every Linux we support");
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
