//! Errors of the store.

use std::borrow::Cow;

use harvest_proto::hint::{DISK_FULL, Hint};

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot open the database file {}", path.display())]
    File { path: std::path::PathBuf, source: std::io::Error },
    #[error("cannot connect to the database {database}")]
    Connect { database: crate::DatabaseUrl, source: sqlx::Error },
    #[error("the database server is PostgreSQL {found}; Harvest needs {needed} or newer")]
    PostgresTooOld { found: i64, needed: i64 },
    #[error("a database query failed")]
    Database(#[from] sqlx::Error),
    /// Another server has taken over; this one must stop at once.
    #[error("another server has taken over this database")]
    LeaseLost,
    #[error("{what} not found")]
    NotFound { what: String },
    #[error("{what} already exists")]
    Exists { what: String },
    /// A value is longer than the store accepts, or a table would become larger.
    #[error("{what}")]
    TooLarge { what: String },
    #[error("{}", still_used(what, *sessions))]
    InUse { what: String, sessions: u64 },
    /// An outbox number is not the successor of the last stored one.
    #[error("event {number} of epoch {epoch} does not follow event {stored}")]
    OutboxGap { epoch: u64, number: u64, stored: u64 },
    #[error("the database is damaged: invalid value in column `{column}`")]
    Corrupt { column: &'static str },
    #[error("the database has schema version {found}; this version of Harvest needs {expected}")]
    OtherVersion { found: i64, expected: i64 },
    /// The transaction was rolled back.
    #[error("cannot write to the database: {reason}")]
    Commit {
        /// The database's message, as text because all requests of the group share it.
        reason: String,
    },
    /// The connection was lost during COMMIT, and the store was closed before the outcome could be
    /// queried. The data may or may not be stored.
    #[error("the connection was lost during a commit, its outcome is unknown: {reason}")]
    Unknown { reason: String },
    #[error("the database is closed")]
    Closed,
}

impl StoreError {
    /// The database's own message, without the driver's prefix.
    pub(crate) fn message(error: &sqlx::Error) -> String {
        match error {
            sqlx::Error::Database(inner) => inner.message().to_owned(),
            other => other.to_string(),
        }
    }

    /// True when a disk is full, on this machine or on the database server.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        let message = match self {
            Self::Commit { reason } => reason.clone(),
            Self::Database(error) | Self::Connect { source: error, .. } => Self::message(error),
            Self::File { source, .. } => source.to_string(),
            _ => return false,
        };
        // SQLite's message, and the operating system's, which PostgreSQL passes on.
        message.contains("disk is full") || message.contains("No space left on device")
    }

    /// True when every connection was in use for longer than a request waits.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Self::Database(sqlx::Error::PoolTimedOut))
    }

    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into() }
    }

    /// Maps a unique violation to [`StoreError::Exists`].
    pub(crate) fn or_exists(error: impl Into<Self>, what: impl Into<String>) -> Self {
        match error.into() {
            Self::Database(sqlx::Error::Database(inner)) if inner.is_unique_violation() => {
                Self::Exists { what: what.into() }
            }
            other => other,
        }
    }
}

impl Hint for StoreError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        let hint = match self {
            Self::OtherVersion { found, expected } if found > expected => {
                "a newer Harvest made this database: use that one, or move this home away and load a backup of before with `harvest backup load FILE`"
            }
            Self::OtherVersion { .. } => {
                "use the version of Harvest that created this database, or another home or database"
            }
            Self::PostgresTooOld { .. } => "upgrade the PostgreSQL server",
            _ if self.is_disk_full() => DISK_FULL,
            _ => return None,
        };
        Some(hint.into())
    }
}

fn still_used(what: &str, sessions: u64) -> String {
    match sessions {
        1 => format!("1 session still uses {what}"),
        _ => format!("{sessions} sessions still use {what}"),
    }
}
