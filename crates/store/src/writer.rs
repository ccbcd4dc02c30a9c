//! Handle of the writer task.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::{
    DbConnection, DbPool, Lease, StoreError, Topics,
    dialect::Connector,
    group_commit::{Message, WriteJob, WriterTask},
    job::{JobFuture, JobOutput, Reply, Request},
    leases::HeldLease,
    watch::Watcher,
};

#[derive(Clone)]
pub(crate) struct Writer {
    requests: mpsc::UnboundedSender<Message>,
    held: HeldLease,
    pub(crate) watcher: Watcher,
}

impl Writer {
    pub(crate) fn spawn(
        connection: DbConnection,
        connector: Connector,
        topics: Arc<Topics>,
    ) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        let (held, watcher) = (HeldLease::default(), Watcher::default());
        let task = WriterTask::new(connection, connector, topics, held.clone(), watcher.clone());
        tokio::spawn(task.run(inbox));
        Self { requests, held, watcher }
    }

    /// From now on this process writes only under this lease.
    pub(crate) fn hold(&self, lease: Lease) {
        self.held.set(lease);
    }

    /// Runs `work` in the next transaction; returns after its commit.
    pub(crate) async fn run<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> JobFuture<'c, T> + Send + 'static,
    {
        self.run_with_events(move |connection| {
            Box::pin(async move {
                let value = work(connection).await?;
                Ok(JobOutput { value, events: Vec::new() })
            })
        })
        .await
    }

    /// Like [`Writer::run`], for work that appends events: they are published after the commit.
    pub(crate) async fn run_with_events<T, F>(&self, work: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> JobFuture<'c, JobOutput<T>> + Send + 'static,
    {
        self.send(|reply| WriteJob::Other(Box::new(Request::new(work, reply)))).await
    }

    /// Runs a job in the next transaction; returns after its commit.
    pub(crate) async fn send<T>(
        &self,
        job: impl FnOnce(Reply<T>) -> WriteJob,
    ) -> Result<T, StoreError> {
        let (reply, result) = oneshot::channel();
        self.requests.send(Message::Run(job(reply))).map_err(|_| StoreError::Closed)?;
        result.await.map_err(|_| StoreError::Closed)?
    }

    pub(crate) async fn close(&self, readers: DbPool) {
        let (reply, closed) = oneshot::channel();
        if self.requests.send(Message::Close(readers, reply)).is_ok() {
            let _ = closed.await;
        }
    }
}
