//! Why the store did not do it.

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file cannot be made or opened.
    #[error("cannot open the store {}", path.display())]
    File {
        /// Where it should be.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The database cannot be reached.
    #[error("cannot reach the database {database}")]
    Connect {
        /// Which; it shows itself without its password.
        database: crate::DatabaseUrl,
        /// What the driver said.
        source: sqlx::Error,
    },
    /// The database server is of an old version.
    #[error("the database is PostgreSQL {found}; {needed} or newer is needed")]
    TooOld {
        /// Its version.
        found: i64,
        /// The oldest that will do.
        needed: i64,
    },
    /// The database said no.
    #[error("the database refused")]
    Database(#[from] sqlx::Error),
    /// Another server has taken over; whoever sees this stops at once.
    #[error("another server holds the lease")]
    LeaseLost,
    /// There is no such row.
    #[error("there is no {what}")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// The row is there already, or another one stands in its way.
    #[error("{what} is there already")]
    Exists {
        /// What stands in the way.
        what: String,
    },
    /// An outbox number came that does not follow the last one.
    #[error("event {number} of epoch {epoch} came after {stored}")]
    OutboxGap {
        /// The sandbox's epoch.
        epoch: u64,
        /// The number that came.
        number: u64,
        /// The highest number stored.
        stored: u64,
    },
    /// A row holds what we never wrote.
    #[error("column `{column}` holds something unreadable")]
    Corrupt {
        /// Which column.
        column: &'static str,
    },
    /// The file was written by a newer version of the program.
    #[error("the store has version {found}, this program knows {known}")]
    TooNew {
        /// The file's version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// The transaction could not be committed; nothing of it is stored.
    #[error("cannot commit: {reason}")]
    Commit {
        /// What the database said. Shared by everyone in the group, so it is words.
        reason: String,
    },
    /// The connection was lost while the transaction was being committed, and the store was closed before
    /// the database could be asked. It may be stored or not.
    #[error("whether it is stored is unknown: {reason}")]
    Unknown {
        /// What broke.
        reason: String,
    },
    /// The store has been closed.
    #[error("the store is closed")]
    Closed,
}

impl StoreError {
    /// In the database's own words, without ours around them.
    pub(crate) fn words(error: &sqlx::Error) -> String {
        match error {
            sqlx::Error::Database(inner) => inner.message().to_owned(),
            other => other.to_string(),
        }
    }

    /// Whether a disk has no room left, be it ours or the database server's.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let told = match self {
            Self::Commit { reason } => reason.clone(),
            Self::Database(error) | Self::Connect { source: error, .. } => Self::words(error),
            Self::File { source, .. } => source.to_string(),
            _ => return false,
        };
        // SQLite's words, and the system's, which PostgreSQL passes on.
        told.contains("disk is full") || told.contains("No space left on device")
    }

    /// A row that is not there.
    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into() }
    }

    /// Names what stood in the way when the database refused a duplicate.
    pub(crate) fn or_exists(error: sqlx::Error, what: impl Into<String>) -> Self {
        match &error {
            sqlx::Error::Database(inner) if inner.is_unique_violation() => {
                Self::Exists { what: what.into() }
            }
            _ => Self::Database(error),
        }
    }
}
