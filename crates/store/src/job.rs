//! Requests to the writer task. A request runs even if its caller goes away, and no caller gets a
//! success before the commit. `group_commit.rs` runs the requests.

use std::{future::Future, pin::Pin};

use tokio::sync::oneshot;

use crate::{DbConnection, StoreError, append::Append, events::NewEvents, reserve::OnFullDisk};

/// A future that borrows the connection.
pub(crate) type JobFuture<'c, T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send + 'c>>;

/// Result of a request: the value for the caller, and the appended events.
pub(crate) struct JobOutput<T> {
    pub(crate) value: T,
    pub(crate) events: NewEvents,
}

/// A request of any result type.
pub(crate) trait Job: Send {
    fn run<'c>(&'c mut self, connection: &'c mut DbConnection) -> JobFuture<'c, NewEvents>;
    fn reply(self: Box<Self>, failure: Option<StoreError>);
    /// The append that this request is; several of them can run in a batch.
    fn append(&mut self) -> Option<&mut Append> {
        None
    }
    fn on_full_disk(&self) -> OnFullDisk;
}

pub(crate) struct Request<T, F> {
    pub(crate) work: Option<F>,
    pub(crate) on_full_disk: OnFullDisk,
    pub(crate) done: Option<T>,
    pub(crate) reply: Reply<T>,
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

    fn on_full_disk(&self) -> OnFullDisk {
        self.on_full_disk
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
