//! Copies a database in a file while a server uses it, for backups. PostgreSQL has programs of its
//! own for that.

use std::path::Path;

use sqlx::Row;

use crate::{DatabaseUrl, StoreError, dialect::Connector};

/// Copies the database in the file `from` to `into`, which must be empty, and returns its schema
/// version. The copy is the database at one moment; a server may write meanwhile.
///
/// # Errors
/// When the database cannot be read, or the copy cannot be written.
pub async fn copy_database(from: &Path, into: &Path) -> Result<i64, StoreError> {
    let database = DatabaseUrl::file(from);
    let connector = Connector::new(&database)?;
    let unreachable = |source| StoreError::Connect { database: database.clone(), source };
    let mut connection = connector.connect_for_copy().await.map_err(unreachable)?;
    let path = into.to_str().ok_or_else(|| StoreError::File {
        path: into.to_owned(),
        source: std::io::Error::other("its path is not UTF-8"),
    })?;
    sqlx::query("VACUUM INTO $1").bind(path.to_owned()).execute(&mut connection).await?;
    let row = sqlx::query("SELECT MAX(version) AS version FROM schema_version")
        .fetch_one(&mut connection)
        .await?;
    row.try_get::<Option<i64>, _>("version")?.ok_or(StoreError::Corrupt { column: "version" })
}
