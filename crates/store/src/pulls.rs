//! Pull requests as we recorded them, one per session and repository.

use harvest_proto::{SessionId, Timestamp, api::Pull};

use crate::{
    Lease, Store, StoreError, leases,
    row::{self, bigint, to_json},
};

impl Store {
    /// Records a session's pull request in a repository as it stands.
    ///
    /// # Errors
    /// [`StoreError::LeaseLost`] when another server has taken over.
    pub async fn pull_upsert(
        &self,
        lease: Lease,
        session: &SessionId,
        repository: &str,
        pull: &Pull,
        at: Timestamp,
    ) -> Result<(), StoreError> {
        let (session, repository) = (session.to_string(), repository.to_owned());
        let (number, pull) = (bigint(pull.number), to_json(pull));
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    leases::check(connection, lease).await?;
                    sqlx::query(
                        "INSERT INTO pulls (session, repository, number, pull, updated_at)
                         VALUES ($1, $2, $3, $4, $5) ON CONFLICT (session, repository) DO UPDATE SET
                         number = excluded.number, pull = excluded.pull, updated_at = excluded.updated_at",
                    )
                    .bind(session)
                    .bind(repository)
                    .bind(number)
                    .bind(pull)
                    .bind(at.as_millis())
                    .execute(connection)
                    .await?;
                    Ok(().into())
                })
            })
            .await
    }

    /// Every session's pull requests, the last changed first.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub async fn pull_list(&self) -> Result<Vec<(SessionId, Pull)>, StoreError> {
        let rows = sqlx::query("SELECT session, pull FROM pulls ORDER BY updated_at DESC, session")
            .fetch_all(&self.readers)
            .await?;
        rows.iter().map(|row| Ok((row::parsed(row, "session")?, row::json(row, "pull")?))).collect()
    }
}
