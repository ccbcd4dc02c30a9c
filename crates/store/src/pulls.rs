//! Pull requests as Harvest last saw them, one per session and repository.

use harvest_proto::{SessionId, Timestamp, api::PullRequest};

use crate::{
    Store, StoreError,
    commit::Target,
    row::{self, bigint, to_json},
};

impl Store {
    /// Pull requests of all sessions, the last changed first.
    pub async fn pull_list(&self) -> Result<Vec<(SessionId, PullRequest)>, StoreError> {
        let rows = sqlx::query("SELECT session, pull FROM pulls ORDER BY updated_at DESC, session")
            .fetch_all(&self.readers)
            .await?;
        rows.iter().map(|row| Ok((row::parsed(row, "session")?, row::json(row, "pull")?))).collect()
    }
}

pub(crate) async fn upsert(
    target: &mut Target<'_>,
    repository: String,
    pull: &PullRequest,
    at: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query(
        "INSERT INTO pulls (session, repository, number, pull, updated_at)
         VALUES ($1, $2, $3, $4, $5) ON CONFLICT (session, repository) DO UPDATE SET
         number = excluded.number, pull = excluded.pull, updated_at = excluded.updated_at",
    )
    .bind(target.session.to_string())
    .bind(repository)
    .bind(bigint(pull.number))
    .bind(to_json(pull))
    .bind(at.as_millis())
    .execute(&mut *target.connection)
    .await?;
    Ok(())
}
