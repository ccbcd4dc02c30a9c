//! Group commit: the writer task takes all waiting requests, runs each in its own savepoint
//! (consecutive appends share one, see `append.rs`) and commits them together. So a hundred
//! sessions cost one sync to disk, and a failing request does not affect the others.
//!
//! ```text
//! waiting ─ begin ─ run each ─ COMMIT ─┬─ acknowledged: events are published, callers get replies
//!    │        │         │              ├─ refused (SQLite): nothing is stored
//!    │        │         └ broken: nothing is stored
//!    │        └ no connection: retried until the timeout, then nothing is stored
//!    └─ unsettled: the reply to COMMIT was lost (PostgreSQL). The callers wait until the outcome
//!       is known from a new connection; nothing else is written before.
//! ```

mod jobs;
mod vacuum;

use std::{io, sync::Arc, time::Duration};

use sqlx::Connection;
use tokio::{
    sync::{mpsc, oneshot},
    time::Instant,
};

use crate::{
    DbConnection, DbPool, StoreError, Topics,
    dialect::Connector,
    events::{NewEvents, Watcher},
    job::Job,
    leases::{self, HeldLease},
    reserve::{OnFullDisk, Reserve},
    row,
};

use vacuum::Vacuum;

use jobs::{Failures, Jobs, refuse, run_jobs, run_sql};

// Large enough to share a sync among many, small enough not to delay the first request for long.
const MAX_GROUP: usize = 256;

// Between attempts to reconnect.
const RECONNECT_PAUSE: Duration = Duration::from_millis(100);

// Between attempts to query the outcome of a commit while there are no other requests.
const SETTLE_PAUSE: Duration = Duration::from_secs(1);

// For reads in progress when the store is closed.
const CLOSE_READERS_TIMEOUT: Duration = Duration::from_secs(10);

// SQLite's own message.
const DISK_FULL: &str = "database or disk is full";

pub(crate) enum Message {
    Run(Box<dyn Job>),
    /// Also closes the readers: the last connection to a SQLite file checkpoints it, and only a
    /// writing connection can.
    Close(DbPool, oneshot::Sender<()>),
}

/// A group whose COMMIT was sent and not acknowledged.
struct Unsettled {
    transaction: String,
    jobs: Jobs,
    failures: Failures,
    events: NewEvents,
    reason: String,
}

/// The writer task.
pub(crate) struct WriterTask {
    connector: Connector,
    connection: Option<DbConnection>,
    reserve: Option<Reserve>,
    topics: Arc<Topics>,
    held: HeldLease,
    watcher: Watcher,
    unsettled: Option<Unsettled>,
    vacuum: Vacuum,
}

impl WriterTask {
    pub(crate) fn new(
        connection: DbConnection,
        connector: Connector,
        reserve: Option<Reserve>,
        topics: Arc<Topics>,
        held: HeldLease,
        watcher: Watcher,
    ) -> Self {
        let (vacuum, connection) = (Vacuum::new(connector.dialect), Some(connection));
        Self { connector, connection, reserve, topics, held, watcher, unsettled: None, vacuum }
    }

    /// Runs until the store is closed or dropped.
    pub(crate) async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Message>) {
        let mut waiting = Vec::new();
        loop {
            let taken = inbox.recv_many(&mut waiting, MAX_GROUP);
            let pause = self.unsettled.as_ref().map(|_| SETTLE_PAUSE).or(self.vacuum.pause());
            let taken = match pause {
                None => Ok(taken.await),
                Some(pause) => tokio::time::timeout(pause, taken).await,
            };
            match taken {
                Ok(0) => return self.close().await,
                Ok(_) => {}
                Err(_) if self.unsettled.is_some() => self.settle_now().await,
                Err(_) => self.vacuum.step(&mut self.connection).await,
            }
            // Callers that just got a reply are about to send the next request: share one sync.
            tokio::task::yield_now().await;
            while waiting.len() < MAX_GROUP
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
            let jobs = self.refuse_growth_on_full_disk(jobs);
            if !jobs.is_empty() {
                self.group(jobs).await;
                self.vacuum.written();
            }
            if let Some((readers, reply)) = closing {
                inbox.close();
                // A read that never ends must not block the shutdown.
                let _ = tokio::time::timeout(CLOSE_READERS_TIMEOUT, readers.close()).await;
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
            let _ = within(self.connector.dialect.response_timeout(), connection.close()).await;
        }
    }

    /// Refuses the jobs that would use up the reserved disk space; returns the others.
    fn refuse_growth_on_full_disk(&mut self, jobs: Jobs) -> Jobs {
        let Some(reserve) = self.reserve.as_mut().filter(|_| !jobs.is_empty()) else { return jobs };
        if reserve.allows_growth() {
            return jobs;
        }
        let (refused, jobs): (Jobs, Jobs) =
            jobs.into_iter().partition(|job| job.on_full_disk() == OnFullDisk::Refuse);
        if jobs.iter().any(|job| job.on_full_disk() == OnFullDisk::UseReserve) {
            reserve.make_room();
        }
        let failures = refused.iter().map(|_| None).collect();
        refuse(refused, failures, || StoreError::Commit { reason: DISK_FULL.to_owned() });
        jobs
    }

    /// Runs all jobs in one transaction.
    async fn group(&mut self, mut jobs: Jobs) {
        let mut failures: Failures = jobs.iter().map(|_| None).collect();
        let transaction = match self.begin(self.connector.dialect.reconnect_timeout()).await {
            Ok(transaction) => transaction,
            Err(error) => return self.broken(jobs, failures, StoreError::message(&error)),
        };
        let Some(connection) = &mut self.connection else { return };
        let limit = self.connector.dialect.response_timeout();
        if let Some(lease) = self.held.get() {
            match within(limit, leases::check(connection, lease)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return self.lease_check_failed(jobs, failures, &error),
                Err(silent) => return self.broken(jobs, failures, silent.to_string()),
            }
        }
        let events = match within(limit, run_jobs(connection, &mut jobs, &mut failures)).await {
            Ok(Ok(events)) => events,
            Ok(Err(reason)) => return self.broken(jobs, failures, reason),
            Err(silent) => return self.broken(jobs, failures, silent.to_string()),
        };
        let committed = within(limit, run_sql(connection, "COMMIT")).await;
        match (committed.unwrap_or_else(|silent| Err(silent.into())), transaction) {
            (Ok(()), _) => self.stored(jobs, failures, events),
            (Err(error), None) => self.broken(jobs, failures, StoreError::message(&error)),
            (Err(error), Some(transaction)) => {
                self.connection = None;
                let reason = StoreError::message(&error);
                tracing::warn!(reason, "lost the reply to a commit; querying its outcome");
                self.unsettled = Some(Unsettled { transaction, jobs, failures, events, reason });
                self.settle_now().await;
            }
        }
    }

    /// Begins the transaction, on a new connection if needed; settles an unsettled group first.
    async fn begin(&mut self, timeout: Duration) -> Result<Option<String>, sqlx::Error> {
        let until = Instant::now() + timeout;
        let limit = self.connector.dialect.response_timeout();
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
            // An idle connection may have been lost long ago: retry at once with a new one.
            if !idle {
                tokio::time::sleep(RECONNECT_PAUSE).await;
            }
        }
    }

    async fn try_begin(&mut self) -> Result<Option<String>, sqlx::Error> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(self.connector.connect().await?),
        };
        let begun =
            sqlx::raw_sql(self.connector.dialect.begin()).fetch_all(&mut *connection).await?;
        let transaction = self.connector.dialect.transaction_id(&begun)?;
        if let Some(left) = &self.unsettled {
            // This connection holds the write lock, so the unsettled transaction has ended.
            match outcome(connection, &left.transaction).await {
                Ok(outcome) => self.settled(&outcome),
                Err(error) => {
                    if !connection_lost(&error) {
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
                within(self.connector.dialect.response_timeout(), run_sql(connection, "ROLLBACK"))
                    .await,
                Ok(Ok(()))
            )
        {
            self.connection = None;
        }
    }

    fn settled(&mut self, outcome: &str) {
        let Some(left) = self.unsettled.take() else { return };
        match outcome {
            "committed" => self.stored(left.jobs, left.failures, left.events),
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

    /// Publishes the events before the callers get their replies.
    fn stored(&self, jobs: Jobs, failures: Failures, events: NewEvents) {
        self.publish(events);
        for (job, failure) in jobs.into_iter().zip(failures) {
            job.reply(failure);
        }
    }

    /// Drops the connection, which makes the database roll back the transaction. The next group
    /// starts with a clean one.
    fn broken(&mut self, jobs: Jobs, failures: Failures, reason: String) {
        self.connection = None;
        tracing::error!(reason, "rolled back a group of writes");
        refuse(jobs, failures, || StoreError::Commit { reason: reason.clone() });
    }

    fn lease_check_failed(&mut self, jobs: Jobs, failures: Failures, error: &StoreError) {
        if let StoreError::Database(error) = error {
            return self.broken(jobs, failures, StoreError::message(error));
        }
        self.connection = None;
        refuse(jobs, failures, || StoreError::LeaseLost);
    }

    fn publish(&self, events: NewEvents) {
        self.watcher.notify(events.iter().map(|(_, event)| event.as_ref()));
        let topics = self.topics.lock().expect("no holder of this lock can panic");
        for (session, event) in events {
            if let Some(topic) = topics.get(&session) {
                // Fails when all followers are gone.
                let _ = topic.send(event);
            }
        }
    }
}

/// Applies a timeout. A network that drops all packets counts as a lost connection, too.
async fn within<T>(limit: Option<Duration>, work: impl Future<Output = T>) -> Result<T, io::Error> {
    let Some(limit) = limit else { return Ok(work.await) };
    let silent = |_| io::Error::new(io::ErrorKind::TimedOut, "the database does not respond");
    tokio::time::timeout(limit, work).await.map_err(silent)
}

/// Outcome of a transaction: `committed`, `aborted`, or another text when the database does not
/// know it.
async fn outcome(connection: &mut DbConnection, transaction: &str) -> Result<String, sqlx::Error> {
    let row = sqlx::query("SELECT pg_xact_status(CAST(CAST($1 AS TEXT) AS xid8)) AS status")
        .bind(transaction.to_owned())
        .fetch_one(connection)
        .await?;
    Ok(row::optional(&row, "status").ok().flatten().unwrap_or_default())
}

/// True when the connection was lost, false when the database returned an error. Of its error
/// codes, classes 08 and 57 mean that the server is going away.
fn connection_lost(error: &sqlx::Error) -> bool {
    match error {
        sqlx::Error::Database(inner) => {
            inner.code().is_some_and(|code| code.starts_with("08") || code.starts_with("57"))
        }
        _ => true,
    }
}
