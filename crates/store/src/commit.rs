//! [`Store::session_insert_all`] and [`Store::session_commit`]: the only ways to create and to
//! change a session. Each runs a list of writes completely or not at all. [`Writer`] passes them,
//! and all other writes, to the writer task of `group_commit`.

use std::sync::Arc;

use harvest_proto::{SessionId, Timestamp};
use tokio::sync::{mpsc, oneshot};

use crate::{
    DbConnection, DbPool, DbQuery, Lease, Store, StoreError, Topics,
    append::{self, Append},
    dialect::Connector,
    events::{NewEvents, Watcher},
    group_commit::{Message, WriterTask},
    job::{Job, JobFuture, JobOutput, Reply, Request},
    leases::{self, HeldLease},
    reserve::{OnFullDisk, Reserve},
    sessions::{self, NewSession},
    write::{self, Committed, Write},
};

impl Store {
    /// Creates sessions and applies writes to each, all or none.
    pub async fn session_insert_all(
        &self,
        lease: Lease,
        all: Vec<(NewSession, Vec<Write>)>,
    ) -> Result<(), StoreError> {
        self.writer
            .run_with_events(OnFullDisk::Refuse, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    let mut events = NewEvents::new();
                    for (new, writes) in all {
                        let (session, at) = (new.id.clone(), new.at);
                        sessions::insert(connection, new).await?;
                        let committed =
                            write::apply(connection, &session, lease, at, writes).await?;
                        // A new session has no followers, but the watcher counts its events.
                        events.extend(committed.new_events(&session));
                    }
                    Ok(JobOutput { value: (), events })
                })
            })
            .await
    }

    /// Runs all of `writes` or none. [`StoreError::NotFound`] when the session has been deleted.
    pub async fn session_commit(
        &self,
        session: &SessionId,
        lease: Lease,
        at: Timestamp,
        writes: Vec<Write>,
    ) -> Result<Committed, StoreError> {
        self.commit(session, lease, at, writes, OnFullDisk::Try).await
    }

    /// Like [`Store::session_commit`], for writes that end work: they may use the disk space that
    /// is reserved for it.
    pub async fn session_commit_end(
        &self,
        session: &SessionId,
        lease: Lease,
        at: Timestamp,
        writes: Vec<Write>,
    ) -> Result<Committed, StoreError> {
        self.commit(session, lease, at, writes, OnFullDisk::UseReserve).await
    }

    async fn commit(
        &self,
        session: &SessionId,
        lease: Lease,
        at: Timestamp,
        writes: Vec<Write>,
        on_full_disk: OnFullDisk,
    ) -> Result<Committed, StoreError> {
        let session = session.clone();
        if append::only_appends(&writes) {
            let append = |reply| Append { session, lease, at, writes, done: None, reply };
            return self.writer.send(append).await;
        }
        let grows = writes.iter().any(Write::grows);
        let on_full_disk = if grows { OnFullDisk::Refuse } else { on_full_disk };
        self.writer
            .run_with_events(on_full_disk, move |connection| {
                Box::pin(async move {
                    let committed = write::apply(connection, &session, lease, at, writes).await?;
                    let events = committed.new_events(&session);
                    Ok(JobOutput { value: committed, events })
                })
            })
            .await
    }
}

/// Handle of the writer task.
#[derive(Clone)]
pub(crate) struct Writer {
    requests: mpsc::UnboundedSender<Message>,
    held: HeldLease,
    pub(crate) watcher: Watcher,
    #[cfg(feature = "testing")]
    steps: Option<crate::WriteSteps>,
}

impl Writer {
    pub(crate) fn spawn(
        connection: DbConnection,
        connector: Connector,
        reserve: Option<Reserve>,
        topics: Arc<Topics>,
    ) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        let (held, watcher) = (HeldLease::default(), Watcher::default());
        let task =
            WriterTask::new(connection, connector, reserve, topics, held.clone(), watcher.clone());
        tokio::spawn(task.run(inbox));
        Self {
            requests,
            held,
            watcher,
            #[cfg(feature = "testing")]
            steps: None,
        }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn set_steps(&mut self, steps: crate::WriteSteps) {
        self.steps = Some(steps);
    }

    #[cfg(feature = "testing")]
    async fn step(&self) {
        if let Some(steps) = &self.steps {
            steps().await;
        }
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
        self.run_on(OnFullDisk::Try, work).await
    }

    /// Like [`Writer::run`], with another rule for a full disk.
    pub(crate) async fn run_on<T, F>(
        &self,
        on_full_disk: OnFullDisk,
        work: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> JobFuture<'c, T> + Send + 'static,
    {
        self.run_with_events(on_full_disk, move |connection| {
            Box::pin(async move {
                let value = work(connection).await?;
                Ok(JobOutput { value, events: Vec::new() })
            })
        })
        .await
    }

    /// Runs one statement in the next transaction, under a lease if given; returns the number of
    /// changed rows.
    pub(crate) async fn execute(
        &self,
        lease: Option<Lease>,
        query: DbQuery<'static>,
    ) -> Result<u64, StoreError> {
        self.execute_on(OnFullDisk::Try, lease, query).await
    }

    /// Like [`Writer::execute`], with another rule for a full disk.
    pub(crate) async fn execute_on(
        &self,
        on_full_disk: OnFullDisk,
        lease: Option<Lease>,
        query: DbQuery<'static>,
    ) -> Result<u64, StoreError> {
        self.run_on(on_full_disk, move |connection| {
            Box::pin(async move {
                if let Some(lease) = lease {
                    leases::check(connection, lease).await?;
                }
                Ok(query.execute(connection).await?.rows_affected())
            })
        })
        .await
    }

    /// Like [`Writer::run_on`], for work that appends events: they are published after the commit.
    pub(crate) async fn run_with_events<T, F>(
        &self,
        on_full_disk: OnFullDisk,
        work: F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> FnOnce(&'c mut DbConnection) -> JobFuture<'c, JobOutput<T>> + Send + 'static,
    {
        self.send(|reply| Request { work: Some(work), on_full_disk, done: None, reply }).await
    }

    /// Runs a job in the next transaction; returns after its commit.
    async fn send<T, J: Job + 'static>(
        &self,
        job: impl FnOnce(Reply<T>) -> J,
    ) -> Result<T, StoreError> {
        #[cfg(feature = "testing")]
        self.step().await;
        let (reply, result) = oneshot::channel();
        self.requests.send(Message::Run(Box::new(job(reply)))).map_err(|_| StoreError::Closed)?;
        let result = result.await.map_err(|_| StoreError::Closed)?;
        #[cfg(feature = "testing")]
        self.step().await;
        result
    }

    pub(crate) async fn close(&self, readers: DbPool) {
        let (reply, closed) = oneshot::channel();
        if self.requests.send(Message::Close(readers, reply)).is_ok() {
            let _ = closed.await;
        }
    }
}
