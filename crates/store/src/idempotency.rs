//! Idempotency keys: a request that is sent again gets the first one's answer. What it made is written down
//! with the thing itself, so that a server which dies before it has answered leaves no doubt.

use std::time::Duration;

use harvest_proto::Timestamp;

use crate::{Store, StoreError, commit::Target, row};

// The time the HTTP draft's implementers keep keys: long enough for any client's retries.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

// Work that made something is done, whether or not anybody heard of it.
const RELEASE: &str =
    "DELETE FROM idempotency_keys WHERE key = $1 AND answer IS NULL AND made IS NULL";
const RELEASE_ALL: &str = "DELETE FROM idempotency_keys WHERE answer IS NULL AND made IS NULL";

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
    /// The work was done, and nobody wrote down what was answered. These ids are what it made; or, where it makes
    /// what no transaction can, what it was about to make ([`Store::idempotency_mean`]).
    Made {
        /// What it made, in their order.
        ids: Vec<String>,
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
        let oldest =
            at.as_millis().saturating_sub(i64::try_from(KEPT.as_millis()).unwrap_or(i64::MAX));
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
                    let row = sqlx::query(
                        "SELECT request, answer, made FROM idempotency_keys WHERE key = $1",
                    )
                    .bind(key)
                    .fetch_one(&mut *connection)
                    .await?;
                    if row::text(&row, "request")? != request {
                        return Ok(Claim::Mismatch.into());
                    }
                    Ok(used(row::optional(&row, "answer")?, row::optional(&row, "made")?).into())
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

    /// What the work of a claimed key is about to make outside the store, in place of what it meant before: whoever
    /// dies in the middle is asked for the same again. Without ids, that nothing came of it.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn idempotency_mean(&self, key: &str, ids: &[String]) -> Result<(), StoreError> {
        let (key, meant) = (key.to_owned(), (!ids.is_empty()).then(|| ids.join(" ")));
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "UPDATE idempotency_keys SET made = $2 WHERE key = $1 AND answer IS NULL",
                    )
                    .bind(key)
                    .bind(meant)
                    .execute(connection)
                    .await?;
                    Ok(().into())
                })
            })
            .await
    }

    /// The work of a claimed key was not done; it may be claimed again. Changes nothing when it made something.
    ///
    /// # Errors
    /// When the database cannot be written.
    pub async fn idempotency_release(&self, key: &str) -> Result<(), StoreError> {
        let key = key.to_owned();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(RELEASE).bind(key).execute(connection).await?;
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
                    sqlx::query(RELEASE_ALL).execute(connection).await?;
                    Ok(().into())
                })
            })
            .await
    }
}

fn used(answer: Option<String>, made: Option<String>) -> Claim {
    match (answer, made) {
        (Some(answer), _) => Claim::Done { answer },
        (None, Some(made)) => {
            Claim::Made { ids: made.split_whitespace().map(str::to_owned).collect() }
        }
        (None, None) => Claim::InProgress,
    }
}

/// Writes down what the request of a key made, together with it.
pub(crate) async fn made(
    target: &mut Target<'_>,
    key: String,
    id: String,
) -> Result<(), StoreError> {
    sqlx::query(
        "UPDATE idempotency_keys SET made = CASE WHEN made IS NULL THEN $2 ELSE made || ' ' || $2 END
         WHERE key = $1",
    )
    .bind(key)
    .bind(id)
    .execute(&mut *target.connection)
    .await?;
    Ok(())
}
