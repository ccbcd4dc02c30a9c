//! Idempotency keys: a repeated request gets the first one's response. The ids a request creates
//! are stored in the same transaction as the objects, so that a server that dies before it responds
//! leaves no doubt.

use std::time::Duration;

use harvest_proto::{SessionId, Timestamp};

use crate::{DbConnection, Store, StoreError, reserve::OnFullDisk, row, target::Target};

// As long as other implementations of the HTTP draft keep keys: enough for any client's retries.
const KEY_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

// A request that created something counts as done, even if its response was not stored.
const RELEASE: &str =
    "DELETE FROM idempotency_keys WHERE key = $1 AND response IS NULL AND created_ids IS NULL";
const RELEASE_ALL: &str =
    "DELETE FROM idempotency_keys WHERE response IS NULL AND created_ids IS NULL";

/// State of a claimed key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// The key is new: run the request, then call `idempotency_finish`.
    New,
    /// The request is in flight.
    InFlight,
    /// The request is done.
    Done { response: String },
    /// The request created these objects, but its response was not stored. Objects outside the
    /// database may only be planned, see [`Store::idempotency_plan`].
    CreatedIds { ids: Vec<String> },
    /// The key belongs to another request.
    Mismatch,
}

impl Store {
    /// Claims `key` for a request; `request_hash` is of its content.
    pub async fn idempotency_claim(
        &self,
        key: &str,
        request_hash: &str,
        at: Timestamp,
    ) -> Result<Claim, StoreError> {
        let (key, request_hash) = (key.to_owned(), request_hash.to_owned());
        let oldest = at.before(KEY_LIFETIME).as_millis();
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("DELETE FROM idempotency_keys WHERE created_at < $1")
                        .bind(oldest)
                        .execute(&mut *connection)
                        .await?;
                    let new = sqlx::query(
                        "INSERT INTO idempotency_keys (key, request_hash, created_at) VALUES ($1, $2, $3)
                         ON CONFLICT (key) DO NOTHING",
                    )
                    .bind(key.clone())
                    .bind(request_hash.clone())
                    .bind(at.as_millis())
                    .execute(&mut *connection)
                    .await?;
                    if new.rows_affected() == 1 {
                        return Ok(Claim::New);
                    }
                    let row = sqlx::query(
                        "SELECT request_hash, response, created_ids FROM idempotency_keys WHERE key = $1",
                    )
                    .bind(key)
                    .fetch_one(&mut *connection)
                    .await?;
                    if row::text(&row, "request_hash")? != request_hash {
                        return Ok(Claim::Mismatch);
                    }
                    Ok(state(row::optional(&row, "response")?, row::optional(&row, "created_ids")?))
                })
            })
            .await
    }

    /// Stores the response of a claimed key.
    pub async fn idempotency_finish(&self, key: &str, response: &str) -> Result<(), StoreError> {
        let query = sqlx::query("UPDATE idempotency_keys SET response = $2 WHERE key = $1")
            .bind(key.to_owned())
            .bind(response.to_owned());
        self.writer.execute(None, query).await.map(drop)
    }

    /// Records the ids of the objects that the request is about to create outside the database;
    /// replaces earlier ones. After a crash the repeated request creates the same objects. An empty
    /// list means that nothing was created.
    pub async fn idempotency_plan(&self, key: &str, ids: &[String]) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE idempotency_keys SET created_ids = $2 WHERE key = $1 AND response IS NULL",
        )
        .bind(key.to_owned())
        .bind((!ids.is_empty()).then(|| ids.join(" ")));
        self.writer.execute(None, query).await.map(drop)
    }

    /// Releases a claimed key whose request was not run. Does nothing when the request created
    /// something.
    pub async fn idempotency_release(&self, key: &str) -> Result<(), StoreError> {
        self.writer.execute(None, sqlx::query(RELEASE).bind(key.to_owned())).await.map(drop)
    }

    /// Releases the keys of all requests in flight, after a restart.
    pub async fn idempotency_release_all(&self) -> Result<(), StoreError> {
        let query = sqlx::query(RELEASE_ALL);
        self.writer.execute_on(OnFullDisk::UseReserve, None, query).await.map(drop)
    }
}

fn state(response: Option<String>, created: Option<String>) -> Claim {
    match (response, created) {
        (Some(response), _) => Claim::Done { response },
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
    let query = sqlx::query(
        "UPDATE idempotency_keys SET created_ids = CASE WHEN created_ids IS NULL THEN $2 ELSE created_ids || ' ' || $2 END
         WHERE key = $1",
    )
    .bind(key)
    .bind(id);
    target.execute(query).await.map(drop)
}

/// Forgets under which keys a session and its prompts were created. A key is deleted with the last
/// object it created: its response describes what no longer exists.
pub(crate) async fn forget_session(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<(), StoreError> {
    // Ids contain `_`, which matches any character: no other id of the same length is like it.
    let remove = "UPDATE idempotency_keys SET created_ids =
         TRIM(REPLACE(' ' || created_ids || ' ', ' ' || $1 || ' ', ' '))
         WHERE ' ' || created_ids || ' ' LIKE '% ' || $1 || ' %'";
    let delete = "DELETE FROM idempotency_keys WHERE created_ids = ''
         OR created_ids IN (SELECT id FROM prompts WHERE session = $1)";
    for sql in [remove, delete] {
        sqlx::query(sql).bind(session.to_string()).execute(&mut *connection).await?;
    }
    Ok(())
}
