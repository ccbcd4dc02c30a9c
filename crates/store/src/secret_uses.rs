//! The log of requests to which the gateway added a secret: the newest of each session and of the
//! whole server. A session that makes many requests cannot push those of others out of the log.

use harvest_proto::{SecretScope, SessionId, Timestamp, api::SecretUse};

use crate::{DbConnection, DbRow, Store, StoreError, row};

const MAX_USES_OF_SESSION: i64 = 1000;
const MAX_USES: i64 = 100_000;

/// A use to be logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewSecretUse {
    pub name: String,
    pub scope: SecretScope,
    /// May be one that is not stored, of a build.
    pub session: SessionId,
    pub host: String,
    pub method: String,
    pub path: String,
    pub at: Timestamp,
}

impl Store {
    /// Logs uses, and forgets the oldest beyond the limits.
    pub async fn secret_uses_add(&self, uses: Vec<NewSecretUse>) -> Result<(), StoreError> {
        self.writer
            .run(move |connection| {
                Box::pin(async move {
                    for one in uses {
                        insert(connection, one).await?;
                    }
                    Ok(())
                })
            })
            .await
    }

    /// The logged uses of the secrets with this name, newest first.
    pub async fn secret_uses(&self, name: &str) -> Result<Vec<SecretUse>, StoreError> {
        let query = sqlx::query(
            "SELECT name, scope, session, turn, host, method, path, at FROM secret_uses
             WHERE name = $1 ORDER BY number DESC LIMIT 1000",
        )
        .bind(name.to_owned());
        self.all(query, read).await
    }
}

async fn insert(connection: &mut DbConnection, new: NewSecretUse) -> Result<(), StoreError> {
    let session = new.session.to_string();
    let inserted = sqlx::query(
        "INSERT INTO secret_uses (number, name, scope, session, turn, host, method, path, at)
         SELECT COALESCE((SELECT MAX(number) FROM secret_uses), 0) + 1, $2, $3,
         (SELECT id FROM sessions WHERE id = $1),
         COALESCE((SELECT t.number FROM prompts p
             JOIN turns t ON t.session = p.session AND t.id = p.turn
             WHERE p.session = $1 AND p.status = 'dispatched'), 0), $4, $5, $6, $7
         RETURNING number, session",
    )
    .bind(session.clone())
    .bind(new.name)
    .bind(new.scope.as_str())
    .bind(new.host)
    .bind(new.method)
    .bind(new.path)
    .bind(new.at.as_millis())
    .fetch_one(&mut *connection)
    .await?;
    let number: i64 = row::count(&inserted, "number")?;
    // Builds, which are no stored sessions, share one limit.
    let same = match row::optional(&inserted, "session")? {
        Some(_) => "session = $1",
        None => "(session IS NULL AND $1 <> '')",
    };
    sqlx::query(sqlx::AssertSqlSafe(format!(
        "DELETE FROM secret_uses WHERE {same} AND number <= (SELECT number FROM secret_uses
         WHERE {same} ORDER BY number DESC LIMIT 1 OFFSET {MAX_USES_OF_SESSION})"
    )))
    .bind(session)
    .execute(&mut *connection)
    .await?;
    sqlx::query("DELETE FROM secret_uses WHERE number <= $1")
        .bind(number - MAX_USES)
        .execute(connection)
        .await?;
    Ok(())
}

fn read(row: &DbRow) -> Result<SecretUse, StoreError> {
    Ok(SecretUse {
        name: row::text(row, "name")?,
        scope: row::parsed(row, "scope")?,
        session: row::parsed_optional(row, "session")?,
        turn: row::count(row, "turn")?,
        host: row::text(row, "host")?,
        method: row::text(row, "method")?,
        path: row::text(row, "path")?,
        at: row::time(row, "at")?,
    })
}
