//! Deletion of sessions, and the objects outside the database to remove with them.

use harvest_proto::{SandboxId, SessionId, SnapshotId, Timestamp, api::SessionState};

use crate::{
    DbConnection, Lease, Store, StoreError, artifacts, budgets, idempotency, leases,
    removals::{self, Removal},
    reserve::OnFullDisk,
    row::{self, to_enum_name},
    verifications,
};

impl Store {
    /// Deletes a session with everything in it, and adds removals for its sandbox, for the
    /// snapshots and the contents of artifacts that no other session uses, and for `also`, which
    /// only the session's driver knows. Returns these removals.
    pub async fn session_delete(
        &self,
        session: &SessionId,
        lease: Lease,
        also: Vec<Removal>,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        self.delete_where(session, lease, None, also, at).await
    }

    /// Deletes a session if it is archived, has been inactive since `quiet`, and has no pinned
    /// snapshot. Otherwise does nothing.
    pub async fn session_delete_archived(
        &self,
        session: &SessionId,
        lease: Lease,
        quiet: Timestamp,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        self.delete_where(session, lease, Some(quiet), Vec::new(), at).await
    }

    async fn delete_where(
        &self,
        session: &SessionId,
        lease: Lease,
        quiet: Option<Timestamp>,
        also: Vec<Removal>,
        at: Timestamp,
    ) -> Result<Vec<Removal>, StoreError> {
        let session = session.clone();
        let id = session.clone();
        let removals = self
            .writer
            .run_on(OnFullDisk::UseReserve, move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    if let Some(quiet) = quiet
                        && !is_expired(connection, &session, quiet).await?
                    {
                        return Ok(None);
                    }
                    let mut removals = removals_of(connection, &session).await?;
                    removals.extend(artifacts::removals_of(connection, &session).await?);
                    removals.extend(verifications::removals_of(connection, &session).await?);
                    removals.extend(
                        also.into_iter().filter(|one| !removals.contains(one)).collect::<Vec<_>>(),
                    );
                    for removal in &removals {
                        removals::insert(connection, removal, at).await?;
                    }
                    idempotency::forget_session(connection, &session).await?;
                    let root = budgets::root_of(connection, &session).await?;
                    sqlx::query("DELETE FROM sessions WHERE id = $1")
                        .bind(session.to_string())
                        .execute(&mut *connection)
                        .await?;
                    budgets::forget_session(connection, &session, root).await?;
                    Ok(Some(removals))
                })
            })
            .await?;
        let Some(removals) = removals else { return Ok(Vec::new()) };
        self.topics.lock().expect("no holder of this lock can panic").remove(&id);
        Ok(removals)
    }
}

async fn is_expired(
    connection: &mut DbConnection,
    session: &SessionId,
    quiet: Timestamp,
) -> Result<bool, StoreError> {
    let expired = sqlx::query(
        "SELECT 1 FROM sessions s WHERE s.id = $1 AND s.state = $2 AND s.last_activity <= $3 AND NOT EXISTS
         (SELECT 1 FROM snapshots p WHERE p.session = s.id AND p.pinned <> 0)",
    )
    .bind(session.to_string())
    .bind(to_enum_name(&SessionState::Archived))
    .bind(quiet.as_millis())
    .fetch_optional(&mut *connection)
    .await?;
    Ok(expired.is_some())
}

/// The session's sandbox, and the snapshots that no other session uses.
async fn removals_of(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<Vec<Removal>, StoreError> {
    let sandbox = sqlx::query("SELECT sandbox FROM sessions WHERE id = $1")
        .bind(session.to_string())
        .fetch_optional(&mut *connection)
        .await?;
    let sandbox: Vec<Option<SandboxId>> =
        row::readable(sandbox.as_slice(), |row| row::parsed_optional(row, "sandbox"))?;
    let rows = sqlx::query(
        "SELECT p.id FROM snapshots p WHERE p.session = $1 AND NOT EXISTS
         (SELECT 1 FROM snapshots o WHERE o.id = p.id AND o.session <> p.session)
         ORDER BY p.created_at, p.id",
    )
    .bind(session.to_string())
    .fetch_all(connection)
    .await?;
    let snapshots: Vec<SnapshotId> = row::readable(&rows, |row| row::parsed(row, "id"))?;
    let sandbox = sandbox.into_iter().flatten().map(Removal::Sandbox);
    Ok(sandbox.chain(snapshots.into_iter().map(Removal::Snapshot)).collect())
}
