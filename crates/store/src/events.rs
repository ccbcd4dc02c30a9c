//! Events: append-only, numbered per session without gaps or repeats.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use futures_util::TryStreamExt;
use harvest_proto::{Event, EventBody, SessionId, Timestamp, TurnId, bridge::OutboxEvent};
use sqlx::AssertSqlSafe;

use crate::{
    DbConnection, DbRow, Store, StoreError,
    batch::Batch,
    row::{self, bigint, to_json},
    target::{Outbox, Target},
};

/// Events of any sessions, to insert and to publish after the commit.
pub(crate) type NewEvents = Vec<(SessionId, Arc<Event>)>;

const RANGE: &str =
    "SELECT seq, at, turn, body FROM events WHERE session = $1 AND seq > $2 ORDER BY seq LIMIT $3";
// Of the events' texts. The last event of a page may exceed it.
const PAGE_BYTES: usize = 128 * 1024;

const STORED: &str = "SELECT stored FROM outboxes WHERE session = $1 AND epoch = $2";

impl Store {
    /// A session's events after number `after`, oldest first, at most `limit`. A page ends early
    /// after [`PAGE_BYTES`]: it is in memory while a client reads it.
    pub async fn event_list(
        &self,
        session: &SessionId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let query =
            sqlx::query(RANGE).bind(session.to_string()).bind(bigint(after)).bind(i64::from(limit));
        let mut rows = query.fetch(&self.readers);
        let (mut events, mut bytes) = (Vec::new(), 0);
        while bytes < PAGE_BYTES
            && let Some(row) = rows.try_next().await?
        {
            bytes += row::text(&row, "body").map_or(0, |body| body.len());
            let mut read: Vec<Event> = row::readable(std::slice::from_ref(&row), event)?;
            events.append(&mut read);
        }
        Ok(events)
    }

    /// The highest stored outbox number of a sandbox.
    pub async fn outbox_stored(&self, session: &SessionId, epoch: u64) -> Result<u64, StoreError> {
        let query = sqlx::query(STORED).bind(session.to_string()).bind(bigint(epoch));
        Ok(self.optional(query, |row| row::count(row, "stored")).await?.unwrap_or(0))
    }

    /// The bytes and the number of the events of a turn.
    pub async fn turn_history(
        &self,
        session: &SessionId,
        turn: &TurnId,
    ) -> Result<(u64, u64), StoreError> {
        let query = sqlx::query(
            "SELECT CAST(COALESCE(SUM(OCTET_LENGTH(body)), 0) AS BIGINT) AS bytes, COUNT(*) AS events
             FROM events WHERE session = $1 AND turn = $2",
        );
        let row =
            query.bind(session.to_string()).bind(turn.to_string()).fetch_one(&self.readers).await?;
        Ok((row::count(&row, "bytes")?, row::count(&row, "events")?))
    }

    /// The agent's text in a turn, from its end: the events that hold the last `limit` bytes.
    pub async fn turn_text(
        &self,
        session: &SessionId,
        turn: &TurnId,
        limit: usize,
    ) -> Result<String, StoreError> {
        let query = sqlx::query(
            r#"SELECT seq, at, turn, body FROM events WHERE session = $1 AND turn = $2
             AND body LIKE '{"type":"text_delta"%' ORDER BY seq DESC"#,
        );
        let query = query.bind(session.to_string()).bind(turn.to_string());
        let mut rows = query.fetch(&self.readers);
        let (mut texts, mut bytes) = (Vec::new(), 0);
        while bytes < limit
            && let Some(row) = rows.try_next().await?
        {
            if let EventBody::TextDelta { text } = event(&row)?.body {
                bytes += text.len();
                texts.push(text);
            }
        }
        texts.reverse();
        Ok(texts.concat())
    }

    /// Whether the session has this event, of this turn or of none.
    pub async fn event_exists(
        &self,
        session: &SessionId,
        turn: Option<&TurnId>,
        body: &EventBody,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "SELECT seq FROM events WHERE session = $1 AND COALESCE(turn, '') = $2 AND body = $3
             LIMIT 1",
        );
        let turn = turn.map_or_else(String::new, ToString::to_string);
        let query = query.bind(session.to_string()).bind(turn).bind(to_json(body));
        Ok(query.fetch_optional(&self.readers).await?.is_some())
    }

    /// Calls `callback` with every event stored from now on; replaces an earlier callback. The
    /// writer calls it, so it must not block.
    pub fn event_watch(&self, callback: impl Fn(&Event) + Send + Sync + 'static) {
        *self.writer.watcher.0.write().unwrap_or_else(PoisonError::into_inner) =
            Some(Box::new(callback));
    }
}

type Callback = dyn Fn(&Event) + Send + Sync;

/// A callback for every stored event, for metrics.
#[derive(Clone, Default)]
pub(crate) struct Watcher(Arc<RwLock<Option<Box<Callback>>>>);

impl Watcher {
    pub(crate) fn notify<'e>(&self, events: impl Iterator<Item = &'e Event>) {
        if let Some(callback) = &*self.0.read().unwrap_or_else(PoisonError::into_inner) {
            events.for_each(callback);
        }
    }
}

/// A damaged event is replaced by a warning: its number must not be missing.
fn event(row: &DbRow) -> Result<Event, StoreError> {
    let seq = row::count(row, "seq")?;
    let content = || {
        let turn = row::parsed_optional(row, "turn")?;
        Ok((row::time(row, "at")?, turn, row::json(row, "body")?))
    };
    let (at, turn, body) = match content() {
        Err(StoreError::Corrupt { column }) => {
            tracing::error!(seq, column, "an event in the database is damaged");
            let at = row::time(row, "at").unwrap_or(Timestamp::from_millis(0));
            let message = format!("event {seq} is damaged and cannot be shown");
            (at, None, EventBody::Warning { message })
        }
        content => content?,
    };
    Ok(Event { seq, at, turn, body })
}

/// SQL for the size of a session's history after an append, before `next_seq` is updated.
pub(crate) const HISTORY_BYTES: &str = "history_bytes + (SELECT COALESCE(SUM(OCTET_LENGTH(e.body)), 0) \
     FROM events e WHERE e.session = sessions.id AND e.seq >= sessions.next_seq)";

static INSERT: LazyLock<Batch> =
    LazyLock::new(|| Batch::new("events (session, seq, at, turn, body)", 5, ""));

/// Inserts the appended events.
pub(crate) async fn flush(target: &mut Target<'_>) -> Result<(), StoreError> {
    let session = &target.session;
    let events: NewEvents =
        target.events.iter().map(|event| (session.clone(), Arc::clone(event))).collect();
    insert(target.connection, &events).await
}

/// Inserts events of any sessions.
pub(crate) async fn insert(
    connection: &mut DbConnection,
    events: &NewEvents,
) -> Result<(), StoreError> {
    for (sql, chunk) in INSERT.chunks(events) {
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for (session, event) in chunk {
            query = query
                .bind(session.to_string())
                .bind(bigint(event.seq))
                .bind(event.at.as_millis())
                .bind(event.turn.as_ref().map(ToString::to_string))
                .bind(to_json(&event.body));
        }
        query.execute(&mut *connection).await?;
    }
    Ok(())
}

/// Appends an event unless its number is stored already.
pub(crate) async fn append_outbox(
    target: &mut Target<'_>,
    epoch: u64,
    event: OutboxEvent,
) -> Result<(), StoreError> {
    if advance_outbox(target, epoch, event.number).await? {
        target.append(event.at, event.turn, event.body);
    }
    Ok(())
}

/// Advances the outbox number; `false` when the number is stored already. Refuses a number that
/// skips one: the supervisor resends all unacknowledged events, so a gap means a lost event.
pub(crate) async fn advance_outbox(
    target: &mut Target<'_>,
    epoch: u64,
    number: u64,
) -> Result<bool, StoreError> {
    if target.outbox.epoch != epoch {
        outbox_flush(target).await?;
        let row = sqlx::query(STORED)
            .bind(target.session.to_string())
            .bind(bigint(epoch))
            .fetch_optional(&mut *target.connection)
            .await?;
        target.outbox = Outbox::new(epoch, row.map_or(Ok(0), |row| row::count(&row, "stored"))?);
    }
    let stored = target.outbox.stored;
    if number <= stored {
        return Ok(false);
    }
    if number != stored + 1 {
        return Err(StoreError::OutboxGap { epoch, number, stored });
    }
    target.outbox = Outbox { epoch, stored: number, changed: true };
    Ok(true)
}

pub(crate) async fn outbox_flush(target: &mut Target<'_>) -> Result<(), StoreError> {
    if target.outbox.changed {
        let row = (target.session.clone(), target.outbox.epoch, target.outbox.stored);
        outbox_insert(target.connection, &[row]).await?;
        target.outbox.changed = false;
    }
    Ok(())
}

static OUTBOX_INSERT: LazyLock<Batch> = LazyLock::new(|| {
    let stored = "ON CONFLICT (session, epoch) DO UPDATE SET stored = excluded.stored";
    Batch::new("outboxes (session, epoch, stored)", 3, stored)
});

/// Records the highest stored outbox numbers: session, epoch, number. No session and epoch may
/// occur twice.
pub(crate) async fn outbox_insert(
    connection: &mut DbConnection,
    outboxes: &[(SessionId, u64, u64)],
) -> Result<(), StoreError> {
    for (sql, chunk) in OUTBOX_INSERT.chunks(outboxes) {
        let mut query = sqlx::query(AssertSqlSafe(sql));
        for (session, epoch, stored) in chunk {
            query = query.bind(session.to_string()).bind(bigint(*epoch)).bind(bigint(*stored));
        }
        query.execute(&mut *connection).await?;
    }
    Ok(())
}
