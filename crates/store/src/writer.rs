//! The one writer. It takes everything that waits, runs each request in a savepoint of its own and
//! commits them together, so that a hundred sessions cost one sync to disk and one bad request spoils
//! nobody else's. Nobody hears of success before the commit. A caller that goes away changes nothing:
//! the transaction is the writer's.

use std::{future::Future, pin::Pin, sync::Arc};

use harvest_proto::{Event, SessionId};
use sqlx::{ConnectOptions, Connection, sqlite::SqliteConnectOptions};
use tokio::sync::{mpsc, oneshot};

use crate::{DbConnection, StoreError, Topics};

// Enough to share a sync among many, small enough that the first of them does not wait long.
const GROUP: usize = 256;

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

trait Job: Send {
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> Doing<'c, News>;
    fn answer(self: Box<Self>, failure: Option<StoreError>);
}

struct Request<T, F> {
    work: Option<F>,
    done: Option<T>,
    reply: oneshot::Sender<Result<T, StoreError>>,
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
        let result = match (failure, self.done) {
            (Some(error), _) => Err(error),
            (None, Some(answer)) => Ok(answer),
            (None, None) => Err(StoreError::Closed),
        };
        // The caller may have gone; what it asked for is done all the same.
        let _ = self.reply.send(result);
    }
}

enum Message {
    Run(Box<dyn Job>),
    Close(oneshot::Sender<()>),
}

/// A way to the writer.
#[derive(Clone)]
pub(crate) struct Writer {
    requests: mpsc::UnboundedSender<Message>,
}

impl Writer {
    pub(crate) fn spawn(
        connection: DbConnection,
        options: SqliteConnectOptions,
        topics: Arc<Topics>,
    ) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        tokio::spawn(Task { connection: Some(connection), options, topics, inbox }.run());
        Self { requests }
    }

    /// Runs `work` in the next transaction; answers once that is committed.
    pub(crate) async fn run<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> Doing<'c, Done<T>> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job = Box::new(Request { work: Some(work), done: None, reply });
        self.requests.send(Message::Run(job)).map_err(|_| StoreError::Closed)?;
        answer.await.map_err(|_| StoreError::Closed)?
    }

    pub(crate) async fn close(&self) {
        let (reply, closed) = oneshot::channel();
        if self.requests.send(Message::Close(reply)).is_ok() {
            let _ = closed.await;
        }
    }
}

struct Task {
    connection: Option<DbConnection>,
    options: SqliteConnectOptions,
    topics: Arc<Topics>,
    inbox: mpsc::UnboundedReceiver<Message>,
}

impl Task {
    async fn run(mut self) {
        let mut waiting = Vec::new();
        while self.inbox.recv_many(&mut waiting, GROUP).await > 0 {
            let mut jobs = Vec::new();
            let mut closing = None;
            for message in waiting.drain(..) {
                match message {
                    Message::Run(job) => jobs.push(job),
                    Message::Close(reply) => closing = Some(reply),
                }
            }
            if !jobs.is_empty() {
                self.group(jobs).await;
            }
            if let Some(reply) = closing {
                self.inbox.close();
                if let Some(connection) = self.connection.take() {
                    let _ = connection.close().await;
                }
                let _ = reply.send(());
                return;
            }
        }
    }

    /// One transaction for all of them.
    async fn group(&mut self, mut jobs: Vec<Box<dyn Job>>) {
        let mut failures: Vec<Option<StoreError>> = jobs.iter().map(|_| None).collect();
        match self.attempt(&mut jobs, &mut failures).await {
            Ok(news) => {
                self.publish(news);
                for (job, failure) in jobs.into_iter().zip(failures) {
                    job.answer(failure);
                }
            }
            Err(error) => {
                // Whatever state the connection is in, the next group begins with a clean one: dropping
                // it makes SQLite roll the transaction back.
                self.connection = None;
                let reason = error.to_string();
                tracing::error!(reason, "a group of writes was rolled back");
                for (job, failure) in jobs.into_iter().zip(failures) {
                    job.answer(failure.or_else(|| Some(StoreError::Commit { reason: reason.clone() })));
                }
            }
        }
    }

    async fn attempt(
        &mut self,
        jobs: &mut [Box<dyn Job>],
        failures: &mut [Option<StoreError>],
    ) -> Result<News, sqlx::Error> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            none => none.insert(self.options.connect().await?),
        };
        let mut news = Vec::new();
        // IMMEDIATE takes the write lock at once, so that no statement later fails half-way with BUSY.
        sqlx::query("BEGIN IMMEDIATE").execute(&mut *connection).await?;
        for (job, failure) in jobs.iter_mut().zip(failures) {
            sqlx::query("SAVEPOINT request").execute(&mut *connection).await?;
            match job.run(connection).await {
                Ok(mut events) => news.append(&mut events),
                Err(error) => {
                    *failure = Some(error);
                    sqlx::query("ROLLBACK TO SAVEPOINT request").execute(&mut *connection).await?;
                }
            }
            sqlx::query("RELEASE SAVEPOINT request").execute(&mut *connection).await?;
        }
        sqlx::query("COMMIT").execute(&mut *connection).await?;
        Ok(news)
    }

    fn publish(&self, news: News) {
        let topics = self.topics.lock().expect("no holder of this lock can panic");
        for (session, event) in news {
            if let Some(topic) = topics.get(&session) {
                // Nobody follows: everybody has gone since the topic was made.
                let _ = topic.send(event);
            }
        }
    }
}
