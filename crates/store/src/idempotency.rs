//! Idempotency keys: a repeated request gets the first one's response. The ids a request creates
//! are stored in the same transaction as the objects, so that a server that dies before it responds
//! leaves no doubt.

use std::time::Duration;

use harvest_proto::Timestamp;

use crate::{Store, StoreError, commit::Target, row};

// As long as other implementations of the HTTP draft keep keys: enough for any client's retries.
const KEY_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

// A request that created something counts as done, even if its response was not stored.
const RELEASE: &str =
    "DELETE FROM idempotency_keys WHERE key = $1 AND answer IS NULL AND made IS NULL";
const RELEASE_ALL: &str = "DELETE FROM idempotency_keys WHERE answer IS NULL AND made IS NULL";

/// State of a claimed key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// The key is new: run the request, then call `idempotency_finish`.
    New,
    /// The request is in flight.
    InFlight,
    /// The request is done.
    Done { answer: String },
    /// The request created these objects, but its response was not stored. Objects outside the
    /// database may only be planned, see [`Store::idempotency_plan`].
    CreatedIds { ids: Vec<String> },
    /// The key belongs to another request.
    Mismatch,
}

impl Store {
    /// Claims `key` for a request; `request` is a hash of its content.
    pub async fn idempotency_claim(
        &self,
        key: &str,
        request: &str,
        at: Timestamp,
    ) -> Result<Claim, StoreError> {
        let (key, request) = (key.to_owned(), request.to_owned());
        let oldest = at
            .as_millis()
            .saturating_sub(i64::try_from(KEY_LIFETIME.as_millis()).unwrap_or(i64::MAX));
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
                    Ok(state(row::optional(&row, "answer")?, row::optional(&row, "made")?).into())
                })
            })
            .await
    }

    /// Stores the response of a claimed key.
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

    /// Records the ids of the objects that the request is about to create outside the database;
    /// replaces earlier ones. After a crash the repeated request creates the same objects. An empty
    /// list means that nothing was created.
    pub async fn idempotency_plan(&self, key: &str, ids: &[String]) -> Result<(), StoreError> {
        let (key, planned) = (key.to_owned(), (!ids.is_empty()).then(|| ids.join(" ")));
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query(
                        "UPDATE idempotency_keys SET made = $2 WHERE key = $1 AND answer IS NULL",
                    )
                    .bind(key)
                    .bind(planned)
                    .execute(connection)
                    .await?;
                    Ok(().into())
                })
            })
            .await
    }

    /// Releases a claimed key whose request was not run. Does nothing when the request created
    /// something.
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

    /// Releases the keys of all requests in flight, after a restart.
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

fn state(answer: Option<String>, created: Option<String>) -> Claim {
    match (answer, created) {
        (Some(answer), _) => Claim::Done { answer },
        (None, Some(ids)) => {
            Claim::CreatedIds { ids: ids.split_whitespace().map(str::to_owned).collect() }
        }
        (None, None) => Claim::InFlight,
    }
}

/// Adds an id to those the request of a key has created.
pub(crate) async fn add_created_id(
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
