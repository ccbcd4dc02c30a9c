//! [`Store::session_insert`] and [`Store::session_commit`]: the only ways to create and to change a
//! session. Each runs a list of writes completely or not at all.

use harvest_proto::{SessionId, Timestamp};

use crate::{
    Lease, Store, StoreError,
    append::{self, Append},
    events::NewEvents,
    group_commit::WriteJob,
    job::JobOutput,
    leases,
    sessions::{self, NewSession},
    write::{self, Committed, Write},
};

impl Store {
    /// Creates a session and applies `writes` to it, both or neither.
    pub async fn session_insert(
        &self,
        lease: Lease,
        new: NewSession,
        writes: Vec<Write>,
    ) -> Result<(), StoreError> {
        self.session_insert_all(lease, vec![(new, writes)]).await
    }

    /// Creates several sessions, all or none.
    pub async fn session_insert_all(
        &self,
        lease: Lease,
        all: Vec<(NewSession, Vec<Write>)>,
    ) -> Result<(), StoreError> {
        self.writer
            .run_with_events(move |connection| {
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
        let session = session.clone();
        if append::only_appends(&writes) {
            let job = |reply| WriteJob::Append(Append::new(session, lease, at, writes, reply));
            return self.writer.send(job).await;
        }
        self.writer
            .run_with_events(move |connection| {
                Box::pin(async move {
                    let committed = write::apply(connection, &session, lease, at, writes).await?;
                    let events = committed.new_events(&session);
                    Ok(JobOutput { value: committed, events })
                })
            })
            .await
    }
}
