//! The way to the one writer. A caller that goes away changes nothing: the transaction is the writer's, and
//! nobody hears of success before the commit. How requests share a transaction is in `group.rs`.

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
    DbConnection, DbPool, Lease, StoreError, Topics, append::Append, dialect::Source, group::Task,
    watch::Watcher,
};

/// A future that borrows the connection.
pub(crate) type Doing<'c, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'c>>;

/// Events to be made known once they are committed.
pub(crate) type News = Vec<(SessionId, Arc<Event>)>;

/// What a request gives back: its answer, and the events it appended.
pub(crate) struct Done<T> {
    pub(crate) answer: T,
    pub(crate) news: News,
}

impl<T> From<T> for Done<T> {
    fn from(answer: T) -> Self {
        Self { answer, news: Vec::new() }
    }
}

pub(crate) trait Job: Send {
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> Doing<'c, News>;
    /// What is to be appended, when that is all. It can be done together with others.
    fn append(&mut self) -> Option<&mut Append> {
        None
    }
    fn answer(self: Box<Self>, failure: Option<StoreError>);
}

struct Request<T, F> {
    work: Option<F>,
    done: Option<T>,
    reply: Reply<T>,
}

impl<T, F> Job for Request<T, F>
where
    T: Send + 'static,
    F: for<'c> FnOnce(&'c mut DbConnection) -> Doing<'c, Done<T>> + Send + 'static,
{
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> Doing<'c, News> {
        Box::pin(async move {
            let work = self.work.take().expect("a job runs once");
            let Done { answer, news } = work(connection).await?;
            self.done = Some(answer);
            Ok(news)
        })
    }

    fn answer(self: Box<Self>, failure: Option<StoreError>) {
        answer(self.reply, self.done, failure);
    }
}

/// A way to tell the caller what became of it.
pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

pub(crate) fn answer<T>(reply: Reply<T>, done: Option<T>, failure: Option<StoreError>) {
    let result = match (failure, done) {
        (Some(error), _) => Err(error),
        (None, Some(answer)) => Ok(answer),
        (None, None) => Err(StoreError::Closed),
    };
    // The caller may have gone; what it asked for is done all the same.
    let _ = reply.send(result);
}

pub(crate) enum Message {
    Run(Box<dyn Job>),
    /// Also lets the readers go: the last connection to a file tidies it up, and only a writing one can.
    Close(DbPool, oneshot::Sender<()>),
}

/// A way to the writer.
#[derive(Clone)]
pub(crate) struct Writer {
    requests: mpsc::UnboundedSender<Message>,
    held: Held,
    pub(crate) watcher: Watcher,
}

/// The lease this process took, once it did. The writer refuses everything when the store has a newer one,
/// also requests that do not carry the lease themselves.
#[derive(Debug, Clone, Default)]
pub(crate) struct Held(Arc<AtomicU64>);

impl Held {
    pub(crate) fn get(&self) -> Option<Lease> {
        Some(self.0.load(Ordering::Acquire)).filter(|number| *number > 0).map(Lease)
    }
}

impl Writer {
    pub(crate) fn spawn(connection: DbConnection, source: Source, topics: Arc<Topics>) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        let (held, watcher) = (Held::default(), Watcher::default());
        let task = Task::new(connection, source, topics, held.clone()).watched_by(watcher.clone());
        tokio::spawn(task.run(inbox));
        Self { requests, held, watcher }
    }

    /// From now on this process writes under this lease only.
    pub(crate) fn hold(&self, lease: Lease) {
        self.held.0.fetch_max(lease.0, Ordering::AcqRel);
    }

    /// Runs `work` in the next transaction; answers once that is committed.
    pub(crate) async fn run<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> Doing<'c, Done<T>> + Send + 'static,
    {
        self.send(|reply| Request { work: Some(work), done: None, reply }).await
    }

    /// The same for a job that is more than a piece of work.
    pub(crate) async fn send<T, J: Job + 'static>(
        &self,
        job: impl FnOnce(Reply<T>) -> J,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.requests.send(Message::Run(Box::new(job(reply)))).map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    pub(crate) async fn close(&self, readers: DbPool) {
        let (reply, closed) = oneshot::channel();
        if self.requests.send(Message::Close(readers, reply)).is_ok() {
            let _ = closed.await;
        }
    }
}
