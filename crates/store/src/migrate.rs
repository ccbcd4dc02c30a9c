//! The tables, as a numbered list of SQL texts. A text that has been released is never edited; what
//! changes is a new text at the end.

use sqlx::{AssertSqlSafe, Row};

use crate::{DbConnection, StoreError};

const STEPS: &[&str] = &[include_str!("schema/0001.sql"), include_str!("schema/0004.sql")];

/// Brings the tables up to date, in one transaction: a kill in the middle leaves the old ones.
pub(crate) async fn run(connection: &mut DbConnection) -> Result<(), StoreError> {
    sqlx::query("BEGIN IMMEDIATE").execute(&mut *connection).await?;
    sqlx::query("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        .execute(&mut *connection)
        .await?;
    let row = sqlx::query("SELECT COALESCE(MAX(version), 0) AS version FROM schema_version")
        .fetch_one(&mut *connection)
        .await?;
    let found: i64 = row.try_get("version")?;
    let known = i64::try_from(STEPS.len()).unwrap_or(i64::MAX);
    if found > known {
        return Err(StoreError::TooNew { found, known });
    }
    let done = usize::try_from(found).map_err(|_| StoreError::Corrupt { column: "version" })?;
    for (index, step) in STEPS.iter().enumerate().skip(done) {
        for statement in step.split(";\n").map(str::trim).filter(|statement| !statement.is_empty()) {
            sqlx::query(AssertSqlSafe(statement)).execute(&mut *connection).await?;
        }
        sqlx::query("INSERT INTO schema_version (version) VALUES ($1)")
            .bind(i64::try_from(index + 1).unwrap_or(i64::MAX))
            .execute(&mut *connection)
            .await?;
    }
    sqlx::query("COMMIT").execute(&mut *connection).await?;
    Ok(())
}
