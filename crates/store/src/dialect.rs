//! Differences between SQLite and PostgreSQL. All other SQL is the same for both: TEXT and BIGINT,
//! `$1` parameters, `ON CONFLICT … RETURNING`, partial unique indexes.

use std::{borrow::Cow, path::Path, str::FromStr, time::Duration};

use sqlx::{ConnectOptions, Row, any::AnyConnectOptions, any::AnyPoolOptions};

use crate::{
    DbConnection, DbPool, DbRow, StoreError,
    database::{DatabaseUrl, Location},
};

// Reads are short, so a few connections are enough; each costs a thread or a server process.
const READERS: u32 = 4;

// Longer than a reader ever waits for another; only bounds the wait for a lost server.
const ACQUIRE_TIMEOUT: Duration = Duration::from_secs(10);

// A restart of PostgreSQL takes a few seconds; writes wait for it instead of failing.
const RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);

// Twice the `idle_in_transaction_session_timeout` below.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);

// The first version with `pg_current_xact_id` and `pg_xact_status`.
const OLDEST_POSTGRES: i64 = 130_000;

// Another process (a backup, the CLI) may lock the file for a moment. Only a new file becomes
// able to shrink.
const SQLITE_WRITER: &str = "PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; \
     PRAGMA busy_timeout = 10000";
const SQLITE_READER: &str = "PRAGMA query_only = ON; PRAGMA busy_timeout = 10000";

// The timeout bounds how long a server stopped in mid-transaction can block its successor.
// An acknowledged commit must be on disk, whatever the server's default.
const POSTGRES_WRITER: &str = "SET idle_in_transaction_session_timeout = '30s'; \
     SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'; \
     SELECT set_config('application_name', 'harvest', false) WHERE current_setting('application_name') = ''";
const POSTGRES_READER: &str = "SET default_transaction_read_only = on; \
     SELECT set_config('application_name', 'harvest', false) WHERE current_setting('application_name') = ''";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    Postgres,
}

impl Dialect {
    /// Begins a transaction that excludes all other writers, in this and any other process. On
    /// PostgreSQL the last row is the transaction id.
    pub(crate) fn begin(self) -> &'static str {
        match self {
            // IMMEDIATE takes the write lock at once, so that no later statement fails with BUSY.
            Self::Sqlite => "BEGIN IMMEDIATE",
            // The lock's number identifies Harvest in a shared database. READ COMMITTED: statements
            // after the lock see everything committed before.
            Self::Postgres => {
                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
                 SELECT pg_advisory_xact_lock(7305447129); \
                 SELECT CAST(pg_current_xact_id() AS TEXT) AS transaction_id"
            }
        }
    }

    /// The transaction id, with which the outcome of a COMMIT without a reply can be queried.
    /// `None` on SQLite, where the reply cannot be lost.
    pub(crate) fn transaction_id(self, begun: &[DbRow]) -> Result<Option<String>, sqlx::Error> {
        match (self, begun.last()) {
            (Self::Postgres, Some(row)) => row.try_get("transaction_id").map(Some),
            _ => Ok(None),
        }
    }

    /// How long a group of writes waits for the database to come back.
    pub(crate) fn reconnect_timeout(self) -> Duration {
        match self {
            Self::Sqlite => Duration::ZERO,
            Self::Postgres => RECONNECT_TIMEOUT,
        }
    }

    /// How long the database may take to respond before the connection counts as lost. SQLite has
    /// no limit: a disk may be slow.
    pub(crate) fn response_timeout(self) -> Option<Duration> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some(RESPONSE_TIMEOUT),
        }
    }

    /// A statement of the schema. Text is compared byte by byte on both databases, which also keeps
    /// PostgreSQL's indexes valid when the C library's collation changes.
    pub(crate) fn schema_statement(self, statement: &str) -> Cow<'_, str> {
        match self {
            Self::Sqlite => Cow::Borrowed(statement),
            Self::Postgres => Cow::Owned(statement.replace(" TEXT", " TEXT COLLATE \"C\"")),
        }
    }
}

/// Opens connections.
#[derive(Clone)]
pub(crate) struct Connector {
    pub(crate) dialect: Dialect,
    writer: AnyConnectOptions,
    reader: AnyConnectOptions,
}

impl Connector {
    /// Creates the SQLite file if needed. Does not connect.
    pub(crate) fn new(database: &DatabaseUrl) -> Result<Self, StoreError> {
        sqlx::any::install_default_drivers();
        let (dialect, writer, reader) = match &database.0 {
            Location::File(path) => {
                let path = create_private_file(path)
                    .map_err(|source| StoreError::File { path: path.clone(), source })?;
                let url = percent_encode(&path);
                (
                    Dialect::Sqlite,
                    format!("sqlite://{url}?mode=rw"),
                    format!("sqlite://{url}?mode=ro"),
                )
            }
            Location::Postgres(url) => {
                (Dialect::Postgres, url.expose().clone(), url.expose().clone())
            }
        };
        // Without their values, which may be secret.
        let trace = "trace".parse().expect("`trace` is a level");
        let options = |url: String| {
            AnyConnectOptions::from_str(&url).map(|options| {
                options.log_statements(trace).log_slow_statements(trace, Duration::MAX)
            })
        };
        Ok(Self { dialect, writer: options(writer)?, reader: options(reader)? })
    }

    /// Opens a connection for writing.
    pub(crate) async fn connect(&self) -> Result<DbConnection, sqlx::Error> {
        let mut connection = self.writer.connect().await?;
        let settings = match self.dialect {
            Dialect::Sqlite => SQLITE_WRITER,
            Dialect::Postgres => POSTGRES_WRITER,
        };
        sqlx::raw_sql(settings).execute(&mut connection).await?;
        Ok(connection)
    }

    /// Opens a connection that copies the whole database elsewhere: `query_only` refuses that.
    pub(crate) async fn connect_for_copy(&self) -> Result<DbConnection, sqlx::Error> {
        let mut connection = self.reader.connect().await?;
        sqlx::raw_sql("PRAGMA busy_timeout = 10000").execute(&mut connection).await?;
        Ok(connection)
    }

    /// Refuses a PostgreSQL server that is too old.
    pub(crate) async fn check_version(
        &self,
        connection: &mut DbConnection,
    ) -> Result<(), StoreError> {
        if self.dialect == Dialect::Sqlite {
            return Ok(());
        }
        let row =
            sqlx::query("SELECT CAST(current_setting('server_version_num') AS BIGINT) AS version")
                .fetch_one(connection)
                .await?;
        let found: i64 = row.try_get("version")?;
        if found < OLDEST_POSTGRES {
            return Err(StoreError::PostgresTooOld {
                found: found / 10_000,
                needed: OLDEST_POSTGRES / 10_000,
            });
        }
        Ok(())
    }

    /// Opens a pool of read-only connections.
    pub(crate) async fn readers(&self) -> Result<DbPool, sqlx::Error> {
        let (settings, remote) = match self.dialect {
            Dialect::Sqlite => (SQLITE_READER, false),
            Dialect::Postgres => (POSTGRES_READER, true),
        };
        AnyPoolOptions::new()
            .max_connections(READERS)
            .acquire_timeout(ACQUIRE_TIMEOUT)
            // Only a connection to a server can be lost between two reads.
            .test_before_acquire(remote)
            .after_connect(move |connection, _| {
                Box::pin(async move { sqlx::raw_sql(settings).execute(connection).await.map(drop) })
            })
            .connect_with(self.reader.clone())
            .await
    }
}

/// Creates the file before SQLite does, so that only its owner can read it: it holds users'
/// prompts. SQLite gives its other files the same permissions. Returns the full path.
fn create_private_file(path: &Path) -> std::io::Result<std::path::PathBuf> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    std::fs::canonicalize(path)
}

/// Percent-encodes a path for a URL.
fn percent_encode(path: &Path) -> String {
    let mut url = String::new();
    for byte in path.as_os_str().as_encoded_bytes() {
        match byte {
            b'/' | b'-' | b'_' | b'.' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' => {
                url.push(char::from(*byte))
            }
            other => url.push_str(&format!("%{other:02X}")),
        }
    }
    url
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_path_can_be_encoded() {
        assert_eq!(percent_encode(Path::new("/a b/100%?#é.db")), "/a%20b/100%25%3F%23%C3%A9.db");
    }

    #[test]
    fn postgres_text_uses_byte_collation() {
        let column = "ALTER TABLE t ADD COLUMN c TEXT NOT NULL";
        assert_eq!(Dialect::Sqlite.schema_statement(column), column);
        assert_eq!(
            Dialect::Postgres.schema_statement(column),
            "ALTER TABLE t ADD COLUMN c TEXT COLLATE \"C\" NOT NULL"
        );
    }
}
