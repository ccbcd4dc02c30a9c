//! Requests to the writer task. A request runs even if its caller goes away, and no caller gets a
//! success before the commit. `group_commit.rs` runs the requests.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use harvest_proto::{Event, SessionId};
use tokio::sync::{mpsc, oneshot};

use crate::{
    DbConnection, DbPool, Lease, StoreError, Topics, append::Append, dialect::Connector,
    group_commit::WriterTask, watch::Watcher,
};

/// A future that borrows the connection.
pub(crate) type JobFuture<'c, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'c>>;

/// Events to publish after the commit.
pub(crate) type NewEvents = Vec<(SessionId, Arc<Event>)>;

/// Result of a request: the value for the caller, and the appended events.
pub(crate) struct JobOutput<T> {
    pub(crate) value: T,
    pub(crate) events: NewEvents,
}

impl<T> From<T> for JobOutput<T> {
    fn from(value: T) -> Self {
        Self { value, events: Vec::new() }
    }
}

pub(crate) trait Job: Send {
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> JobFuture<'c, NewEvents>;
    /// The append, if the job is nothing else; it can then run in a batch.
    fn append(&mut self) -> Option<&mut Append> {
        None
    }
    fn reply(self: Box<Self>, failure: Option<StoreError>);
}

struct Request<T, F> {
    work: Option<F>,
    done: Option<T>,
    reply: Reply<T>,
}

impl<T, F> Job for Request<T, F>
where
    T: Send + 'static,
    F: for<'c> FnOnce(&'c mut DbConnection) -> JobFuture<'c, JobOutput<T>> + Send + 'static,
{
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> JobFuture<'c, NewEvents> {
        Box::pin(async move {
            let work = self.work.take().expect("a job runs once");
            let JobOutput { value, events } = work(connection).await?;
            self.done = Some(value);
            Ok(events)
        })
    }

    fn reply(self: Box<Self>, failure: Option<StoreError>) {
        reply(self.reply, self.done, failure);
    }
}

pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

pub(crate) fn reply<T>(reply: Reply<T>, done: Option<T>, failure: Option<StoreError>) {
    let result = match (failure, done) {
        (Some(error), _) => Err(error),
        (None, Some(value)) => Ok(value),
        (None, None) => Err(StoreError::Closed),
    };
    // The caller may be gone.
    let _ = reply.send(result);
}

pub(crate) enum Message {
    Run(Box<dyn Job>),
    /// Also closes the readers: the last connection to a SQLite file checkpoints it, and only a
    /// writing connection can.
    Close(DbPool, oneshot::Sender<()>),
}

/// Handle of the writer task.
#[derive(Clone)]
pub(crate) struct Writer {
    requests: mpsc::UnboundedSender<Message>,
    held: HeldLease,
    pub(crate) watcher: Watcher,
}

/// The lease of this process, once it has one. The writer refuses every request when the database
/// has a newer lease, also requests that carry none.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeldLease(Arc<AtomicU64>);

impl HeldLease {
    pub(crate) fn get(&self) -> Option<Lease> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| *number > 0).map(Lease)
    }
}

impl Writer {
    pub(crate) fn spawn(
        connection: DbConnection,
        connector: Connector,
        topics: Arc<Topics>,
    ) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        let (held, watcher) = (HeldLease::default(), Watcher::default());
        let task = WriterTask::new(connection, connector, topics, held.clone())
            .with_watcher(watcher.clone());
        tokio::spawn(task.run(inbox));
        Self { requests, held, watcher }
    }

    /// From now on this process writes only under this lease.
    pub(crate) fn hold(&self, lease: Lease) {
        self.held.0.fetch_max(lease.0, Ordering::AcqRel);
    }

    /// Runs `work` in the next transaction; returns after its commit.
    pub(crate) async fn run<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> JobFuture<'c, JobOutput<T>> + Send + 'static,
    {
        self.send(|reply| Request { work: Some(work), done: None, reply }).await
    }

    /// Runs a job in the next transaction; returns after its commit.
    pub(crate) async fn send<T, J: Job + 'static>(
        &self,
        job: impl FnOnce(Reply<T>) -> J,
    ) -> Result<T, StoreError> {
        let (reply, result) = oneshot::channel();
        self.requests.send(Message::Run(Box::new(job(reply)))).map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }

    pub(crate) async fn close(&self, readers: DbPool) {
        let (reply, closed) = oneshot::channel();
        if self.requests.send(Message::Close(readers, reply)).is_ok() {
            let _ = closed.await;
        }
    }
}
