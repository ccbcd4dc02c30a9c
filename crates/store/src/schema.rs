//! Creates the tables, and refuses a database with another schema version.

use sqlx::{AssertSqlSafe, Row};

use crate::{DbConnection, StoreError, dialect::Dialect};

/// The version of the tables; a database with another one is refused.
pub const VERSION: i64 = 18;
const SCHEMA: &str = include_str!("schema.sql");

/// Creates the tables of a new database in one transaction: a kill in the middle leaves none, and
/// of two servers that start at the same time one waits for the other.
pub(crate) async fn create(
    connection: &mut DbConnection,
    dialect: Dialect,
) -> Result<(), StoreError> {
    sqlx::raw_sql(dialect.begin()).execute(&mut *connection).await?;
    sqlx::raw_sql("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)")
        .execute(&mut *connection)
        .await?;
    let row = sqlx::query("SELECT MAX(version) AS version FROM schema_version")
        .fetch_one(&mut *connection)
        .await?;
    match row.try_get::<Option<i64>, _>("version")? {
        Some(VERSION) => {}
        Some(found) => return Err(StoreError::OtherVersion { found, expected: VERSION }),
        None => {
            for statement in SCHEMA.split(";\n").map(str::trim).filter(|sql| !sql.is_empty()) {
                let statement = dialect.schema_statement(statement).into_owned();
                sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut *connection).await?;
            }
            sqlx::query("INSERT INTO schema_version (version) VALUES ($1)")
                .bind(VERSION)
                .execute(&mut *connection)
                .await?;
        }
    }
    sqlx::raw_sql("COMMIT").execute(&mut *connection).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 64-bit FNV-1a hash of a text.
    fn hash(text: &str) -> u64 {
        text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    #[test]
    fn changed_schema_has_a_new_version() {
        assert_eq!(
            (VERSION, hash(SCHEMA)),
            (18, 0x1105_44d2_cf74_a20d),
            "raise VERSION, and put the new pair here"
        );
    }
}
