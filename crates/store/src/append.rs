//! Appends of many sessions at once. Most commits only append events, and what they cost is the way to the
//! database and back: so those that wait in a row are looked up, written and counted together, in a handful of
//! statements. What is not plain (a session that is gone, a number that is stored already or skips one) is not
//! decided here; `commit.rs` does those of that row one by one.

use std::{
    cmp::Ordering,
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use harvest_proto::{Event, SessionId, Timestamp};
use sqlx::AssertSqlSafe;

use crate::{
    DbConnection, DbQuery, DbRow, Lease, StoreError,
    batch::places,
    commit::{self, Committed, Write},
    events, row,
    writer::{self, Doing, Job, News, Reply},
};

/// At most so many sessions at once.
pub(crate) const MOST: usize = 64;

/// A list of writes that are events and nothing else.
pub(crate) struct Append {
    session: SessionId,
    lease: Lease,
    at: Timestamp,
    writes: Vec<Write>,
    done: Option<Committed>,
    reply: Reply<Committed>,
}

impl Append {
    pub(crate) fn new(
        session: SessionId,
        lease: Lease,
        at: Timestamp,
        writes: Vec<Write>,
        reply: Reply<Committed>,
    ) -> Self {
        Self { session, lease, at, writes, done: None, reply }
    }
}

impl Job for Append {
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> Doing<'c, News> {
        Box::pin(async move {
            let writes = std::mem::take(&mut self.writes);
            let done =
                commit::apply(connection, &self.session, self.lease, self.at, writes).await?;
            let news = done.news(&self.session);
            self.done = Some(done);
            Ok(news)
        })
    }

    fn append(&mut self) -> Option<&mut Append> {
        Some(self)
    }

    fn answer(self: Box<Self>, failure: Option<StoreError>) {
        writer::answer(self.reply, self.done, failure);
    }
}

/// Whether nothing but events is to be written, and at least one.
pub(crate) fn only_appends(writes: &[Write]) -> bool {
    !writes.is_empty()
        && writes.iter().all(|write| matches!(write, Write::Event { .. } | Write::Outbox { .. }))
}

/// How many of these, from the first on, only append; no more than can be done together.
pub(crate) fn in_a_row(jobs: &mut [Box<dyn Job>]) -> usize {
    jobs.iter_mut().take(MOST).map(|job| job.append()).take_while(Option::is_some).count()
}

/// Does all of them. `None` when one is not plain: nothing is written then.
pub(crate) async fn together(
    connection: &mut DbConnection,
    jobs: &mut [Box<dyn Job>],
) -> Result<Option<News>, StoreError> {
    let mut appends: Vec<&mut Append> = jobs.iter_mut().filter_map(|job| job.append()).collect();
    let known = known(connection, &appends).await?;
    let Some(plan) = plan(&appends, known) else { return Ok(None) };
    events::insert(connection, &plan.news).await?;
    events::outbox_insert(connection, &plan.outboxes).await?;
    count(connection, &appends).await?;
    for (append, done) in appends.iter_mut().zip(plan.done) {
        append.done = Some(done);
    }
    Ok(Some(plan.news))
}

/// What a session has before.
#[derive(Debug, Clone, Copy)]
struct Known {
    lease: u64,
    next_seq: u64,
    /// Of the newest sandbox that sent anything.
    epoch: u64,
    stored: u64,
}

static KNOWN: LazyLock<String> = LazyLock::new(|| {
    format!(
        "SELECT s.id, s.next_seq, o.epoch, o.stored,
         (SELECT number FROM leases WHERE name = 'server') AS lease
         FROM sessions s LEFT JOIN outboxes o ON o.session = s.id
         AND o.epoch = (SELECT MAX(newest.epoch) FROM outboxes newest WHERE newest.session = s.id)
         WHERE s.id IN ({})",
        places(1, MOST)
    )
});

async fn known(
    connection: &mut DbConnection,
    appends: &[&mut Append],
) -> Result<HashMap<String, Known>, StoreError> {
    let query = bind_ids(sqlx::query(AssertSqlSafe(KNOWN.as_str())), appends);
    let rows = query.fetch_all(&mut *connection).await?;
    let read = |row: &DbRow| {
        let known = Known {
            lease: row::count_optional(row, "lease")?.unwrap_or(0),
            next_seq: row::count(row, "next_seq")?,
            epoch: row::count_optional(row, "epoch")?.unwrap_or(0),
            stored: row::count_optional(row, "stored")?.unwrap_or(0),
        };
        Ok((row::text(row, "id")?, known))
    };
    rows.iter().map(read).collect()
}

static COUNT: LazyLock<String> = LazyLock::new(|| {
    format!(
        "UPDATE sessions SET next_seq = (SELECT MAX(e.seq) + 1 FROM events e WHERE e.session = sessions.id),
         last_activity = CASE WHEN last_activity > $1 THEN last_activity ELSE $1 END WHERE id IN ({})",
        places(2, MOST)
    )
});

/// Each of them has at least one new event, and all happen now.
async fn count(connection: &mut DbConnection, appends: &[&mut Append]) -> Result<(), StoreError> {
    let now = appends.iter().map(|append| append.at.as_millis()).max();
    let query = bind_ids(sqlx::query(AssertSqlSafe(COUNT.as_str())).bind(now), appends);
    query.execute(&mut *connection).await?;
    Ok(())
}

/// A place that nobody takes gets what is no session's id: one statement serves any number of them.
fn bind_ids<'q>(query: DbQuery<'q>, appends: &[&mut Append]) -> DbQuery<'q> {
    let id =
        |at: usize| appends.get(at).map(|append| append.session.to_string()).unwrap_or_default();
    (0..MOST).fold(query, |query, at| query.bind(id(at)))
}

/// What is to be written, and what each is answered.
struct Plan {
    news: News,
    outboxes: Vec<(SessionId, u64, u64)>,
    done: Vec<Committed>,
}

/// Numbers the events. `None` when one of them is not plain.
fn plan(appends: &[&mut Append], mut known: HashMap<String, Known>) -> Option<Plan> {
    let mut plan = Plan { news: Vec::new(), outboxes: Vec::new(), done: Vec::new() };
    let mut stored: HashMap<(&SessionId, u64), u64> = HashMap::new();
    for append in appends {
        let session = known
            .get_mut(&append.session.to_string())
            .filter(|known| known.lease == append.lease.0)?;
        let mut done = Committed { events: Vec::new(), seq: 0 };
        for write in &append.writes {
            let (at, turn, body) = match write {
                Write::Event { at, turn, body } => (*at, turn, body.as_ref()),
                Write::Outbox { epoch, event } => {
                    session.take(*epoch, event.number)?;
                    stored.insert((&append.session, *epoch), event.number);
                    (event.at, &event.turn, &event.body)
                }
                _ => return None,
            };
            let event = Event { seq: session.next_seq, at, turn: turn.clone(), body: body.clone() };
            session.next_seq += 1;
            done.events.push(Arc::new(event));
        }
        done.seq = session.next_seq - 1;
        plan.news.extend(done.news(&append.session));
        plan.done.push(done);
    }
    plan.outboxes =
        stored.into_iter().map(|((session, epoch), n)| (session.clone(), epoch, n)).collect();
    Some(plan)
}

impl Known {
    /// The next event of the newest sandbox, or the first of one that is newer still; `None` for all others.
    fn take(&mut self, epoch: u64, number: u64) -> Option<()> {
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
