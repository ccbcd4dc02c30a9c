//! Idempotency keys: a request that is sent again gets the first one's answer.

use std::time::Duration;

use harvest_proto::Timestamp;

use crate::{Store, StoreError, row};

// The time the HTTP draft's implementers keep keys: long enough for any client's retries.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// What a key says about a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// Nobody used it: do the work, then `idempotency_finish`.
    New,
    /// The work is being done.
    InProgress,
    /// The work was done; this was the answer.
    Done {
        /// The answer.
        answer: String,
    },
    /// The key was used for another request.
    Mismatch,
}

impl Store {
    /// Claims `key` for a request, told apart by `request` (a hash of what it says).
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn idempotency_claim(
        &self,
        key: &str,
        request: &str,
        at: Timestamp,
    ) -> Result<Claim, StoreError> {
        let (key, request) = (key.to_owned(), request.to_owned());
        let oldest = at.as_millis().saturating_sub(i64::try_from(KEPT.as_millis()).unwrap_or(i64::MAX));
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("DELETE FROM idempotency_keys WHERE created_at < $1")
                        .bind(oldest)
                        .execute(&mut *connection)
                        .await?;
                    let new = sqlx::query(
                        "INSERT INTO idempotency_keys (key, request, created_at) VALUES ($1, $2, $3)
                         ON CONFLICT (key) DO NOTHING",
                    )
                    .bind(key.clone())
                    .bind(request.clone())
                    .bind(at.as_millis())
                    .execute(&mut *connection)
                    .await?;
                    if new.rows_affected() == 1 {
                        return Ok(Claim::New.into());
                    }
                    let row = sqlx::query("SELECT request, answer FROM idempotency_keys WHERE key = $1")
                        .bind(key)
                        .fetch_one(&mut *connection)
                        .await?;
                    if row::text(&row, "request")? != request {
                        return Ok(Claim::Mismatch.into());
                    }
                    let answer = row::optional(&row, "answer")?;
                    Ok(answer.map_or(Claim::InProgress, |answer| Claim::Done { answer }).into())
                })
            })
            .await
    }

    /// The work of a claimed key is done.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn idempotency_finish(&self, key: &str, answer: &str) -> Result<(), StoreError> {
        let (key, answer) = (key.to_owned(), answer.to_owned());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("UPDATE idempotency_keys SET answer = $2 WHERE key = $1")
                        .bind(key)
                        .bind(answer)
                        .execute(connection)
                        .await?;
                    Ok(().into())
                })
            })
            .await
    }

    /// The work of a claimed key was not done; it may be claimed again.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn idempotency_release(&self, key: &str) -> Result<(), StoreError> {
        let key = key.to_owned();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("DELETE FROM idempotency_keys WHERE key = $1 AND answer IS NULL")
                        .bind(key)
                        .execute(connection)
                        .await?;
                    Ok(().into())
                })
            })
            .await
    }

    /// After a restart: keys whose work nobody does any more may be claimed again.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn idempotency_release_all(&self) -> Result<(), StoreError> {
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("DELETE FROM idempotency_keys WHERE answer IS NULL")
                        .execute(connection)
                        .await?;
                    Ok(().into())
                })
            })
            .await
    }
}
