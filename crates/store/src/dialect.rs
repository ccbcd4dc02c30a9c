//! What SQLite and PostgreSQL do not have in common. Everything else in this crate is one SQL text for both:
//! TEXT and BIGINT, `$1` parameters, `ON CONFLICT … RETURNING`, partial unique indexes.

use std::{borrow::Cow, path::Path, str::FromStr, time::Duration};

use sqlx::{ConnectOptions, Row, any::AnyConnectOptions, any::AnyPoolOptions};

use crate::{
    DbConnection, DbPool, DbRow, StoreError,
    database::{DatabaseUrl, Place},
};

// Reads are short; two cores never need more of them at once, and each costs a thread or a process.
const READERS: u32 = 4;

// Longer than a reader ever waits for another one; it only bounds what a lost server costs.
const READER_PATIENCE: Duration = Duration::from_secs(10);

// A restart of PostgreSQL takes a few seconds; who writes meanwhile waits instead of failing.
const RECONNECT_PATIENCE: Duration = Duration::from_secs(5);

// Twice what a predecessor that stopped in the middle may hold the lock.
const SILENCE: Duration = Duration::from_secs(60);

// The first with `pg_current_xact_id` and `pg_xact_status`.
const OLDEST_POSTGRES: i64 = 130_000;

// Another process (a backup, the CLI looking) may hold the file for a moment.
const SQLITE_WRITER: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; \
     PRAGMA busy_timeout = 10000";
const SQLITE_READER: &str = "PRAGMA query_only = ON; PRAGMA busy_timeout = 10000";

// A server that stopped in the middle of a transaction holds up its successor for so long, not for ever. A
// commit that is answered is on disk, whatever the server's default is.
const POSTGRES_WRITER: &str = "SET idle_in_transaction_session_timeout = '30s'; \
     SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'; \
     SELECT set_config('application_name', 'harvest', false) WHERE current_setting('application_name') = ''";
const POSTGRES_READER: &str = "SET default_transaction_read_only = on; \
     SELECT set_config('application_name', 'harvest', false) WHERE current_setting('application_name') = ''";

/// Which database it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Sqlite,
    Postgres,
}

impl Dialect {
    /// Begins a transaction that is the only one to write until it ends, in this and any other process. On
    /// PostgreSQL the last row names the transaction.
    pub(crate) fn begin(self) -> &'static str {
        match self {
            // IMMEDIATE takes the write lock at once, so that no statement later fails half-way with BUSY.
            Self::Sqlite => "BEGIN IMMEDIATE",
            // The number stands for this program among those that may share the database. Every statement
            // after it sees what was committed before.
            Self::Postgres => {
                "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE; \
                 SELECT pg_advisory_xact_lock(7305447129); \
                 SELECT CAST(pg_current_xact_id() AS TEXT) AS transaction_id"
            }
        }
    }

    /// The transaction's name, by which its outcome can be asked for when the answer to COMMIT was lost. On
    /// SQLite the answer comes from this process and cannot be.
    pub(crate) fn transaction_id(self, begun: &[DbRow]) -> Result<Option<String>, sqlx::Error> {
        match (self, begun.last()) {
            (Self::Postgres, Some(row)) => row.try_get("transaction_id").map(Some),
            _ => Ok(None),
        }
    }

    /// How long a group of writes waits for the database to come back.
    pub(crate) fn patience(self) -> Duration {
        match self {
            Self::Sqlite => Duration::ZERO,
            Self::Postgres => RECONNECT_PATIENCE,
        }
    }

    /// How long the database may keep silent before it counts as gone. A disk may be slow; a network that is
    /// has failed.
    pub(crate) fn limit(self) -> Option<Duration> {
        match self {
            Self::Sqlite => None,
            Self::Postgres => Some(SILENCE),
        }
    }

    /// A statement of the schema. Text is compared byte by byte on both, which is also what keeps indexes
    /// whole when a C library with other rules is installed.
    pub(crate) fn schema(self, statement: &str) -> Cow<'_, str> {
        match self {
            Self::Sqlite => Cow::Borrowed(statement),
            Self::Postgres => Cow::Owned(statement.replace(" TEXT", " TEXT COLLATE \"C\"")),
        }
    }
}

/// Where connections come from.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) dialect: Dialect,
    writer: AnyConnectOptions,
    reader: AnyConnectOptions,
}

impl Source {
    /// Makes the file, when it is one and is not there. Connects nowhere.
    pub(crate) fn new(database: &DatabaseUrl) -> Result<Self, StoreError> {
        sqlx::any::install_default_drivers();
        let (dialect, writer, reader) = match &database.0 {
            Place::File(path) => {
                let path = private(path)
                    .map_err(|source| StoreError::File { path: path.clone(), source })?;
                let url = escaped(&path);
                (
                    Dialect::Sqlite,
                    format!("sqlite://{url}?mode=rw"),
                    format!("sqlite://{url}?mode=ro"),
                )
            }
            Place::Postgres(url) => (Dialect::Postgres, url.expose().clone(), url.expose().clone()),
        };
        let options = |url: String| {
            AnyConnectOptions::from_str(&url).map(ConnectOptions::disable_statement_logging)
        };
        Ok(Self { dialect, writer: options(writer)?, reader: options(reader)? })
    }

    /// A connection to write on.
    pub(crate) async fn connect(&self) -> Result<DbConnection, sqlx::Error> {
        let mut connection = self.writer.connect().await?;
        let settings = match self.dialect {
            Dialect::Sqlite => SQLITE_WRITER,
            Dialect::Postgres => POSTGRES_WRITER,
        };
        sqlx::raw_sql(settings).execute(&mut connection).await?;
        Ok(connection)
    }

    /// Refuses a server that is too old.
    pub(crate) async fn check(&self, connection: &mut DbConnection) -> Result<(), StoreError> {
        if self.dialect == Dialect::Sqlite {
            return Ok(());
        }
        let row =
            sqlx::query("SELECT CAST(current_setting('server_version_num') AS BIGINT) AS version")
                .fetch_one(connection)
                .await?;
        let found: i64 = row.try_get("version")?;
        if found < OLDEST_POSTGRES {
            return Err(StoreError::TooOld {
                found: found / 10_000,
                needed: OLDEST_POSTGRES / 10_000,
            });
        }
        Ok(())
    }

    /// Connections that only read.
    pub(crate) async fn readers(&self) -> Result<DbPool, sqlx::Error> {
        let (settings, remote) = match self.dialect {
            Dialect::Sqlite => (SQLITE_READER, false),
            Dialect::Postgres => (POSTGRES_READER, true),
        };
        AnyPoolOptions::new()
            .max_connections(READERS)
            .acquire_timeout(READER_PATIENCE)
            // Only a server can have gone since the last read.
            .test_before_acquire(remote)
            .after_connect(move |connection, _| {
                Box::pin(async move { sqlx::raw_sql(settings).execute(connection).await.map(drop) })
            })
            .connect_with(self.reader.clone())
            .await
    }
}

/// Makes the file before SQLite does: what people prompt is nobody else's to read. SQLite gives its other
/// files the same permissions. Answers its full path.
fn private(path: &Path) -> std::io::Result<std::path::PathBuf> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(path)?;
    std::fs::canonicalize(path)
}

/// A path as part of a URL, from which exactly this path is read again.
fn escaped(path: &Path) -> String {
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
    fn any_path_survives_the_url() {
        assert_eq!(escaped(Path::new("/a b/100%?#é.db")), "/a%20b/100%25%3F%23%C3%A9.db");
    }

    #[test]
    fn text_is_compared_by_bytes_on_postgres() {
        let column = "ALTER TABLE t ADD COLUMN c TEXT NOT NULL";
        assert_eq!(Dialect::Sqlite.schema(column), column);
        assert_eq!(
            Dialect::Postgres.schema(column),
            "ALTER TABLE t ADD COLUMN c TEXT COLLATE \"C\" NOT NULL"
        );
    }
}
