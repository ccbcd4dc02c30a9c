//! The tables, as a list of SQL texts. Each has the number of its file, and the store remembers which of them
//! were run. A text that has been released is never edited; what changes is a new text at the end.

use sqlx::{AssertSqlSafe, Row};

use crate::{DbConnection, StoreError, dialect::Dialect};

const STEPS: &[(i64, &str)] = &[
    (1, include_str!("schema/0001.sql")),
    (2, include_str!("schema/0002.sql")),
    (3, include_str!("schema/0003.sql")),
    (4, include_str!("schema/0004.sql")),
    (5, include_str!("schema/0005.sql")),
    (6, include_str!("schema/0006.sql")),
    (8, include_str!("schema/0008.sql")),
    (9, include_str!("schema/0009.sql")),
    (12, include_str!("schema/0012.sql")),
];

/// Brings the tables up to date, in one transaction: a kill in the middle leaves the old ones, and of two
/// servers that start at once one waits for the other.
pub(crate) async fn run(connection: &mut DbConnection, dialect: Dialect) -> Result<(), StoreError> {
    sqlx::raw_sql(dialect.begin()).execute(&mut *connection).await?;
    sqlx::raw_sql("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        .execute(&mut *connection)
        .await?;
    let rows =
        sqlx::query("SELECT version FROM schema_version").fetch_all(&mut *connection).await?;
    let done = rows.iter().map(|row| row.try_get("version")).collect::<Result<Vec<i64>, _>>()?;
    if let Some(found) = done.iter().find(|found| STEPS.iter().all(|(number, _)| number != *found))
    {
        let known = STEPS.iter().map(|(number, _)| *number).max().unwrap_or(0);
        return Err(StoreError::TooNew { found: *found, known });
    }
    for (number, step) in STEPS.iter().filter(|(number, _)| !done.contains(number)) {
        for statement in step.split(";\n").map(str::trim).filter(|statement| !statement.is_empty())
        {
            let statement = dialect.schema(statement).into_owned();
            sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *connection).await?;
        }
        sqlx::query("INSERT INTO schema_version (version) VALUES ($1)")
            .bind(*number)
            .execute(&mut *connection)
            .await?;
    }
    sqlx::raw_sql("COMMIT").execute(&mut *connection).await?;
    Ok(())
}
