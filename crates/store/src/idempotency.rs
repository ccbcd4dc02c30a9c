//! Idempotency keys: a repeated request gets the first one's response. The ids a request creates
//! are stored in the same transaction as the objects, so that a server that dies before it responds
//! leaves no doubt.

use std::time::Duration;

use harvest_proto::{SessionId, Timestamp};

use crate::{DbConnection, DbQuery, Store, StoreError, reserve::OnFullDisk, row, target::Target};

// As long as other implementations of the HTTP draft keep keys: enough for any client's retries.
const KEY_LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);

// A request that created something counts as done, even if its response was not stored.
const RELEASE: &str =
    "DELETE FROM idempotency_keys WHERE key = $1 AND response IS NULL AND NOT EXISTS
     (SELECT 1 FROM idempotency_ids i WHERE i.key = idempotency_keys.key)";
const RELEASE_ALL: &str = "DELETE FROM idempotency_keys WHERE response IS NULL AND NOT EXISTS
     (SELECT 1 FROM idempotency_ids i WHERE i.key = idempotency_keys.key)";

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
                    state(connection, &key, &request_hash).await
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
        let (key, ids) = (key.to_owned(), ids.to_owned());
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    sqlx::query("DELETE FROM idempotency_ids WHERE key = $1")
                        .bind(key.clone())
                        .execute(&mut *connection)
                        .await?;
                    for id in ids {
                        add_id(&key, &id).execute(&mut *connection).await?;
                    }
                    Ok(())
                })
            })
            .await
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

/// The state of a key that was claimed before.
async fn state(
    connection: &mut DbConnection,
    key: &str,
    request_hash: &str,
) -> Result<Claim, StoreError> {
    let row = sqlx::query("SELECT request_hash, response FROM idempotency_keys WHERE key = $1")
        .bind(key.to_owned())
        .fetch_one(&mut *connection)
        .await?;
    if row::text(&row, "request_hash")? != request_hash {
        return Ok(Claim::Mismatch);
    }
    if let Some(response) = row::optional(&row, "response")? {
        return Ok(Claim::Done { response });
    }
    let rows = sqlx::query("SELECT id FROM idempotency_ids WHERE key = $1 ORDER BY position")
        .bind(key.to_owned())
        .fetch_all(connection)
        .await?;
    let ids: Vec<String> = row::readable(&rows, |row| row::text(row, "id"))?;
    Ok(if ids.is_empty() { Claim::InFlight } else { Claim::CreatedIds { ids } })
}

/// Adds an id to those of a key; does nothing when the key has expired.
fn add_id(key: &str, id: &str) -> DbQuery<'static> {
    sqlx::query(
        "INSERT INTO idempotency_ids (key, position, id)
         SELECT k.key, (SELECT COALESCE(MAX(i.position), 0) + 1 FROM idempotency_ids i WHERE i.key = k.key), $2
         FROM idempotency_keys k WHERE k.key = $1",
    )
    .bind(key.to_owned())
    .bind(id.to_owned())
}

/// Adds an id to those the request of a key has created.
pub(crate) async fn add_created_id(
    target: &mut Target<'_>,
    key: String,
    id: String,
) -> Result<(), StoreError> {
    target.execute(add_id(&key, &id)).await.map(drop)
}

/// Forgets under which keys a session and its prompts were created. A key is deleted with the last
/// object it created: its response describes what no longer exists.
pub(crate) async fn forget_session(
    connection: &mut DbConnection,
    session: &SessionId,
) -> Result<(), StoreError> {
    let own = "SELECT id FROM sessions WHERE id = $1
         UNION ALL SELECT id FROM prompts WHERE session = $1";
    let delete = format!(
        "DELETE FROM idempotency_keys WHERE key IN
         (SELECT i.key FROM idempotency_ids i WHERE i.id IN ({own})) AND NOT EXISTS
         (SELECT 1 FROM idempotency_ids o WHERE o.key = idempotency_keys.key AND o.id NOT IN ({own}))"
    );
    let remove = format!("DELETE FROM idempotency_ids WHERE id IN ({own})");
    for sql in [delete, remove] {
        let query = sqlx::query(sqlx::AssertSqlSafe(sql)).bind(session.to_string());
        query.execute(&mut *connection).await?;
    }
    Ok(())
}
