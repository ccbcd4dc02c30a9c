//! The one writer at work. It takes everything that waits, runs each request in a savepoint of its own (those
//! that only append events share one, see `append.rs`) and commits them together, so that a hundred sessions
//! cost one sync to disk and one bad request spoils nobody else's.
//!
//! ```text
//! waiting ─ begin ─ run each ─ COMMIT ─┬─ answered: published, then the callers hear of it
//!    │        │         │              ├─ refused (SQLite): nothing is stored
//!    │        │         └ broken: nothing is stored
//!    │        └ no connection: tried for a while, then nothing is stored
//!    └─ unsettled: the answer to COMMIT was lost (PostgreSQL). The callers wait until a new connection
//!       has asked what became of it; nothing else is written before.
//! ```

use std::{io, sync::Arc, time::Duration};

use sqlx::Connection;
use tokio::{sync::mpsc, time::Instant};

use crate::{
    DbConnection, StoreError, Topics, append,
    dialect::Source,
    leases, row,
    watch::Watcher,
    writer::{Held, Job, Message, News},
};

// Enough to share a sync among many, small enough that the first of them does not wait long.
const GROUP: usize = 256;

// Between attempts to reach a database that went away.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

// Between attempts to learn the outcome of a commit while nobody else wants to write.
const SETTLE_PAUSE: Duration = Duration::from_secs(1);

// What reads under way may still take when the store is closed.
const READERS_PATIENCE: Duration = Duration::from_secs(10);

const SAVEPOINT: &str = "SAVEPOINT request";
// Also how a request is found out that met an error and did not say so: PostgreSQL then refuses the RELEASE.
const NEXT: &str = "RELEASE SAVEPOINT request; SAVEPOINT request";
const UNDO: &str = "ROLLBACK TO SAVEPOINT request";

type Jobs = Vec<Box<dyn Job>>;
type Failures = Vec<Option<StoreError>>;

/// A group whose COMMIT was sent and not answered.
struct Unsettled {
    transaction: String,
    jobs: Jobs,
    failures: Failures,
    news: News,
    reason: String,
}

/// The writer.
pub(crate) struct Task {
    source: Source,
    connection: Option<DbConnection>,
    topics: Arc<Topics>,
    held: Held,
    watcher: Watcher,
    unsettled: Option<Unsettled>,
}

impl Task {
    pub(crate) fn new(
        connection: DbConnection,
        source: Source,
        topics: Arc<Topics>,
        held: Held,
    ) -> Self {
        Self {
            source,
            connection: Some(connection),
            topics,
            held,
            watcher: Watcher::default(),
            unsettled: None,
        }
    }

    pub(crate) fn watched_by(self, watcher: Watcher) -> Self {
        Self { watcher, ..self }
    }

    /// Until it is closed, or nobody can ask any more.
    pub(crate) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        let mut waiting = Vec::new();
        loop {
            let taken = inbox.recv_many(&mut waiting, GROUP);
            let taken = match self.unsettled {
                None => Ok(taken.await),
                Some(_) => tokio::time::timeout(SETTLE_PAUSE, taken).await,
            };
            match taken {
                Ok(0) => return self.close().await,
                Ok(_) => {}
                Err(_) => self.settle_now().await,
            }
            // Those who were answered a moment ago are about to ask again: one sync for all of them.
            tokio::task::yield_now().await;
            while waiting.len() < GROUP
                && let Ok(message) = inbox.try_recv()
            {
                waiting.push(message);
            }
            let mut jobs = Vec::new();
            let mut closing = None;
            for message in waiting.drain(..) {
                match message {
                    Message::Run(job) => jobs.push(job),
                    Message::Close(readers, reply) => closing = Some((readers, reply)),
                }
            }
            if !jobs.is_empty() {
                self.group(jobs).await;
            }
            if let Some((readers, reply)) = closing {
                inbox.close();
                // A read that never ends must not keep the program from ending.
                let _ = tokio::time::timeout(READERS_PATIENCE, readers.close()).await;
                self.close().await;
                let _ = reply.send(());
                return;
            }
        }
    }

    async fn close(&mut self) {
        if self.unsettled.is_some() {
            self.settle_now().await;
        }
        if let Some(left) = self.unsettled.take() {
            let reason = left.reason;
            refuse(left.jobs, left.failures, || StoreError::Unknown { reason: reason.clone() });
        }
        if let Some(connection) = self.connection.take() {
            let _ = within(self.source.dialect.limit(), connection.close()).await;
        }
    }

    /// One transaction for all of them.
    async fn group(&mut self, mut jobs: Jobs) {
        let mut failures: Failures = jobs.iter().map(|_| None).collect();
        let transaction = match self.begin(self.source.dialect.patience()).await {
            Ok(transaction) => transaction,
            Err(error) => return self.broken(jobs, failures, StoreError::words(&error)),
        };
        let Some(connection) = &mut self.connection else { return };
        let limit = self.source.dialect.limit();
        if let Some(lease) = self.held.get() {
            match within(limit, leases::check(connection, lease)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return self.fenced(jobs, failures, &error),
                Err(silent) => return self.broken(jobs, failures, silent.to_string()),
            }
        }
        let news = match within(limit, each(connection, &mut jobs, &mut failures)).await {
            Ok(Ok(news)) => news,
            Ok(Err(reason)) => return self.broken(jobs, failures, reason),
            Err(silent) => return self.broken(jobs, failures, silent.to_string()),
        };
        let committed = within(limit, run(connection, "COMMIT")).await;
        match (committed.unwrap_or_else(|silent| Err(silent.into())), transaction) {
            (Ok(()), _) => self.stored(jobs, failures, news),
            (Err(error), None) => self.broken(jobs, failures, StoreError::words(&error)),
            (Err(error), Some(transaction)) => {
                self.connection = None;
                let reason = StoreError::words(&error);
                tracing::warn!(reason, "the answer to a commit was lost; asking what became of it");
                self.unsettled = Some(Unsettled { transaction, jobs, failures, news, reason });
                self.settle_now().await;
            }
        }
    }

    /// Opens the transaction, on a new connection if need be, and settles what is unsettled first.
    async fn begin(&mut self, patience: Duration) -> Result<Option<String>, sqlx::Error> {
        let until = Instant::now() + patience;
        let limit = self.source.dialect.limit();
        loop {
            let idle = self.connection.is_some();
            let begun =
                within(limit, self.try_begin()).await.unwrap_or_else(|silent| Err(silent.into()));
            let error = match begun {
                Ok(transaction) => return Ok(transaction),
                Err(error) => error,
            };
            self.connection = None;
            if Instant::now() >= until {
                return Err(error);
            }
            // A connection may have died while nobody used it; a new one may well stand.
            if !idle {
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
        }
    }

    async fn try_begin(&mut self) -> Result<Option<String>, sqlx::Error> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(self.source.connect().await?),
        };
        let begun = sqlx::raw_sql(self.source.dialect.begin()).fetch_all(&mut *connection).await?;
        let transaction = self.source.dialect.transaction_id(&begun)?;
        if let Some(left) = &self.unsettled {
            // The lock is ours, so the transaction before has ended one way or the other.
            match outcome(connection, &left.transaction).await {
                Ok(outcome) => self.settled(&outcome),
                Err(error) => {
                    if !lost(&error) {
                        self.settled("unknown");
                    }
                    return Err(error);
                }
            }
        }
        Ok(transaction)
    }

    async fn settle_now(&mut self) {
        if self.begin(Duration::ZERO).await.is_ok()
            && let Some(connection) = &mut self.connection
            && !matches!(
                within(self.source.dialect.limit(), run(connection, "ROLLBACK")).await,
                Ok(Ok(()))
            )
        {
            self.connection = None;
        }
    }

    fn settled(&mut self, outcome: &str) {
        let Some(left) = self.unsettled.take() else { return };
        match outcome {
            "committed" => self.stored(left.jobs, left.failures, left.news),
            "aborted" => {
                refuse(left.jobs, left.failures, || StoreError::Commit {
                    reason: left.reason.clone(),
                });
            }
            _ => refuse(left.jobs, left.failures, || StoreError::Unknown {
                reason: left.reason.clone(),
            }),
        }
    }

    /// The callers hear of it after everybody who follows can see it.
    fn stored(&self, jobs: Jobs, failures: Failures, news: News) {
        self.publish(news);
        for (job, failure) in jobs.into_iter().zip(failures) {
            job.answer(failure);
        }
    }

    /// Whatever state the connection is in, the next group begins with a clean one: dropping it makes the
    /// database roll the transaction back.
    fn broken(&mut self, jobs: Jobs, failures: Failures, reason: String) {
        self.connection = None;
        tracing::error!(reason, "a group of writes was rolled back");
        refuse(jobs, failures, || StoreError::Commit { reason: reason.clone() });
    }

    fn fenced(&mut self, jobs: Jobs, failures: Failures, error: &StoreError) {
        if let StoreError::Database(error) = error {
            return self.broken(jobs, failures, StoreError::words(error));
        }
        self.connection = None;
        refuse(jobs, failures, || StoreError::LeaseLost);
    }

    fn publish(&self, news: News) {
        self.watcher.show(news.iter().map(|(_, event)| event.as_ref()));
        let topics = self.topics.lock().expect("no holder of this lock can panic");
        for (session, event) in news {
            if let Some(topic) = topics.get(&session) {
                // Nobody follows: everybody has gone since the topic was made.
                let _ = topic.send(event);
            }
        }
    }
}

/// Runs every request, those that only append together with their neighbours. The error is why nobody's writes
/// survive.
async fn each(
    connection: &mut DbConnection,
    jobs: &mut Jobs,
    failures: &mut Failures,
) -> Result<News, String> {
    let mut news = Vec::new();
    run(connection, SAVEPOINT).await.map_err(|error| StoreError::words(&error))?;
    let mut begin = 0;
    while begin < jobs.len() {
        let row = append::in_a_row(&mut jobs[begin..]).max(1);
        let range = begin..begin + row;
        begin += row;
        if row > 1 {
            let done = append::together(connection, &mut jobs[range.clone()]).await;
            // An error may be one's own: whose it is, and what the others can do, is seen one by one.
            if let Ok(Some(mut events)) = keep(connection, done).await? {
                news.append(&mut events);
                continue;
            }
        }
        for (job, failure) in jobs[range.clone()].iter_mut().zip(&mut failures[range]) {
            let done = job.run(connection).await;
            match keep(connection, done).await? {
                Ok(mut events) => news.append(&mut events),
                Err(error) => *failure = Some(error),
            }
        }
    }
    Ok(news)
}

/// Keeps what was written since the savepoint, or undoes it when there was an error. Fails when the whole
/// transaction is lost.
async fn keep<T>(
    connection: &mut DbConnection,
    mut done: Result<T, StoreError>,
) -> Result<Result<T, StoreError>, String> {
    if done.is_ok()
        && let Err(error) = run(connection, NEXT).await
    {
        done = Err(error.into());
    }
    let Err(error) = &done else { return Ok(done) };
    // A full disk or a lost connection ends the whole transaction; the first error says why.
    match (run(connection, UNDO).await, error) {
        (Ok(()), _) => Ok(done),
        (Err(_), StoreError::Database(cause)) => Err(StoreError::words(cause)),
        (Err(undo), _) => Err(StoreError::words(&undo)),
    }
}

/// Waits no longer than this. A network that swallows everything is a lost connection, too.
async fn within<T>(limit: Option<Duration>, work: impl Future<Output = T>) -> Result<T, io::Error> {
    let Some(limit) = limit else { return Ok(work.await) };
    let silent = |_| io::Error::new(io::ErrorKind::TimedOut, "the database does not answer");
    tokio::time::timeout(limit, work).await.map_err(silent)
}

async fn run(connection: &mut DbConnection, sql: &'static str) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(sql).execute(connection).await.map(drop)
}

/// What became of a transaction: `committed`, `aborted`, or something else when the database does not know.
async fn outcome(connection: &mut DbConnection, transaction: &str) -> Result<String, sqlx::Error> {
    let row = sqlx::query("SELECT pg_xact_status(CAST(CAST($1 AS TEXT) AS xid8)) AS status")
        .bind(transaction.to_owned())
        .fetch_one(connection)
        .await?;
    Ok(row::optional(&row, "status").ok().flatten().unwrap_or_default())
}

/// Whether the connection went away, rather than that the database answered no. Classes 08 and 57 are the
/// server's own words for going away.
fn lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(inner) => {
            inner.code().is_some_and(|code| code.starts_with("08") || code.starts_with("57"))
        }
        _ => true,
    }
}

/// Everybody who has not failed already fails with `error`.
fn refuse(jobs: Jobs, failures: Failures, error: impl Fn() -> StoreError) {
    for (job, failure) in jobs.into_iter().zip(failures) {
        job.answer(failure.or_else(|| Some(error())));
    }
}
