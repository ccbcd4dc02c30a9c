//! Batched appends. Most commits only append events, and their cost is the round trip to the
//! database. So consecutive ones are looked up, numbered and written together, in a handful of
//! statements. A batch with an unusual append (session deleted, event number stored already or
//! skipped) is not written here; its requests run one by one in `write.rs`.

use std::{
    cmp::Ordering,
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use harvest_proto::{Event, SessionId, Timestamp};
use sqlx::AssertSqlSafe;

use crate::{
    DbConnection, DbQuery, DbRow, Lease, StoreError,
    batch::placeholders,
    events::{self, HISTORY_BYTES, NewEvents},
    job::{self, Job, JobFuture, Reply},
    reserve::OnFullDisk,
    row,
    write::{self, Committed, Write},
};

// Sessions per batch.
pub(crate) const MAX_BATCH: usize = 64;

/// A request whose writes are all events.
pub(crate) struct Append {
    pub(crate) session: SessionId,
    pub(crate) lease: Lease,
    pub(crate) at: Timestamp,
    pub(crate) writes: Vec<Write>,
    pub(crate) done: Option<Committed>,
    pub(crate) reply: Reply<Committed>,
}

impl Job for Append {
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> JobFuture<'c, NewEvents> {
        Box::pin(async move {
            let writes = std::mem::take(&mut self.writes);
            let done = write::apply(connection, &self.session, self.lease, self.at, writes).await?;
            let events = done.new_events(&self.session);
            self.done = Some(done);
            Ok(events)
        })
    }

    fn reply(self: Box<Self>, failure: Option<StoreError>) {
        job::reply(self.reply, self.done, failure);
    }

    fn append(&mut self) -> Option<&mut Append> {
        Some(self)
    }

    fn on_full_disk(&self) -> OnFullDisk {
        OnFullDisk::Refuse
    }
}

/// True when there is at least one write and all of them are events.
pub(crate) fn only_appends(writes: &[Write]) -> bool {
    !writes.is_empty()
        && writes.iter().all(|write| {
            matches!(write, Write::Event { .. } | Write::Outbox { .. } | Write::OutboxSkip { .. })
        })
}

/// Runs a batch. Returns `None` and writes nothing when one of the appends is unusual.
pub(crate) async fn append_batch(
    connection: &mut DbConnection,
    appends: &mut [&mut Append],
) -> Result<Option<NewEvents>, StoreError> {
    let cursors = read_cursors(connection, appends).await?;
    let Some(plan) = plan(appends, cursors) else { return Ok(None) };
    events::insert(connection, &plan.events).await?;
    events::outbox_insert(connection, &plan.outboxes).await?;
    update_sessions(connection, appends).await?;
    for (append, done) in appends.iter_mut().zip(plan.done) {
        append.done = Some(done);
    }
    Ok(Some(plan.events))
}

/// Position of a session before the batch.
#[derive(Debug, Clone, Copy)]
struct Cursor {
    lease: u64,
    next_seq: u64,
    /// Epoch of the newest sandbox that has sent events.
    epoch: u64,
    stored: u64,
}

static SELECT_CURSORS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT s.id, s.next_seq, o.epoch, o.stored,
         (SELECT number FROM leases WHERE name = 'server') AS lease
         FROM sessions s LEFT JOIN outboxes o ON o.session = s.id
         AND o.epoch = (SELECT MAX(newest.epoch) FROM outboxes newest WHERE newest.session = s.id)
         WHERE s.id IN ({})",
        placeholders(1, MAX_BATCH)
    )
});

async fn read_cursors(
    connection: &mut DbConnection,
    appends: &[&mut Append],
) -> Result<HashMap<String, Cursor>, StoreError> {
    let query = bind_ids(sqlx::query(AssertSqlSafe(SELECT_CURSORS.as_str())), appends);
    let rows = query.fetch_all(&mut *connection).await?;
    let read = |row: &DbRow| {
        let cursor = Cursor {
            lease: row::count_optional(row, "lease")?.unwrap_or(0),
            next_seq: row::count(row, "next_seq")?,
            epoch: row::count_optional(row, "epoch")?.unwrap_or(0),
            stored: row::count_optional(row, "stored")?.unwrap_or(0),
        };
        Ok((row::text(row, "id")?, cursor))
    };
    rows.iter().map(read).collect()
}

static UPDATE_SESSIONS: LazyLock<String> = LazyLock::new(|| {
    format!(
        "UPDATE sessions SET history_bytes = {HISTORY_BYTES},
         next_seq = (SELECT COALESCE(MAX(e.seq), 0) + 1 FROM events e WHERE e.session = sessions.id),
         last_activity = CASE WHEN last_activity > $1 THEN last_activity ELSE $1 END WHERE id IN ({})",
        placeholders(2, MAX_BATCH)
    )
});

async fn update_sessions(
    connection: &mut DbConnection,
    appends: &[&mut Append],
) -> Result<(), StoreError> {
    let now = appends.iter().map(|append| append.at.as_millis()).max();
    let query = bind_ids(sqlx::query(AssertSqlSafe(UPDATE_SESSIONS.as_str())).bind(now), appends);
    query.execute(&mut *connection).await?;
    Ok(())
}

/// Unused placeholders are bound to '' (no session has that id), so one prepared statement fits
/// any batch size.
fn bind_ids<'q>(query: DbQuery<'q>, appends: &[&mut Append]) -> DbQuery<'q> {
    let id =
        |at: usize| appends.get(at).map(|append| append.session.to_string()).unwrap_or_default();
    (0..MAX_BATCH).fold(query, |query, at| query.bind(id(at)))
}

struct Plan {
    events: NewEvents,
    outboxes: Vec<(SessionId, u64, u64)>,
    done: Vec<Committed>,
}

/// Numbers the events. Returns `None` when one of the appends is unusual.
fn plan(appends: &[&mut Append], mut cursors: HashMap<String, Cursor>) -> Option<Plan> {
    let mut plan = Plan { events: Vec::new(), outboxes: Vec::new(), done: Vec::new() };
    let mut stored: HashMap<(&SessionId, u64), u64> = HashMap::new();
    for append in appends {
        let session = cursors
            .get_mut(&append.session.to_string())
            .filter(|cursor| cursor.lease == append.lease.0)?;
        let mut done = Committed { events: Vec::new(), seq: 0 };
        for write in &append.writes {
            let (at, turn, body) = match write {
                Write::Event { at, turn, body } => (*at, turn, body.as_ref()),
                Write::Outbox { epoch, event } => {
                    session.advance(*epoch, event.number)?;
                    stored.insert((&append.session, *epoch), event.number);
                    (event.at, &event.turn, &event.body)
                }
                Write::OutboxSkip { epoch, number } => {
                    session.advance(*epoch, *number)?;
                    stored.insert((&append.session, *epoch), *number);
                    continue;
                }
                _ => return None,
            };
            let event = Event { seq: session.next_seq, at, turn: turn.clone(), body: body.clone() };
            session.next_seq += 1;
            done.events.push(Arc::new(event));
        }
        done.seq = session.next_seq - 1;
        plan.events.extend(done.new_events(&append.session));
        plan.done.push(done);
    }
    plan.outboxes =
        stored.into_iter().map(|((session, epoch), n)| (session.clone(), epoch, n)).collect();
    Some(plan)
}

impl Cursor {
    /// Accepts the next event of the newest sandbox, or the first event of a newer one.
    fn advance(&mut self, epoch: u64, number: u64) -> Option<()> {
        let stored = match epoch.cmp(&self.epoch) {
            Ordering::Less => return None,
            Ordering::Equal => self.stored,
            Ordering::Greater => 0,
        };
        if number != stored + 1 {
            return None;
        }
        (self.epoch, self.stored) = (epoch, number);
        Some(())
    }
}
