//! Returns the space of deleted rows to the disk: SQLite keeps free pages in its file until they
//! are vacuumed. Runs in small steps while the writer has nothing else to do. PostgreSQL does this
//! by itself.

use std::time::Duration;

use sqlx::Row;

use crate::{DbConnection, dialect::Dialect};

// Free pages that stay in the file, 4 MiB, for the next writes.
const SPARE_PAGES: i64 = 1024;

// Pages per step: a waiting request is delayed by milliseconds.
const STEP: &str = "PRAGMA incremental_vacuum(512)";

// After the last write, and between two steps.
const IDLE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Vacuum {
    Never,
    /// Nothing was written since the last step found nothing to do.
    Done,
    Due(Duration),
}

impl Vacuum {
    pub(super) fn new(dialect: Dialect) -> Self {
        match dialect {
            Dialect::Sqlite => Self::Due(IDLE),
            Dialect::Postgres => Self::Never,
        }
    }

    /// How long the writer waits for requests before the next step.
    pub(super) fn pause(self) -> Option<Duration> {
        match self {
            Self::Never | Self::Done => None,
            Self::Due(pause) => Some(pause),
        }
    }

    /// A transaction was committed.
    pub(super) fn written(&mut self) {
        if *self != Self::Never {
            *self = Self::Due(IDLE);
        }
    }

    pub(super) async fn step(&mut self, connection: &mut Option<DbConnection>) {
        *self = Self::Done;
        let Some(connection) = connection else { return };
        match vacuum(connection).await {
            Ok(true) => *self = Self::Due(PAUSE),
            Ok(false) => {}
            // A full or locked disk; the next write starts another attempt.
            Err(error) => tracing::debug!(%error, "cannot shrink the database"),
        }
    }
}

/// Vacuums some pages; `false` when there are none left.
async fn vacuum(connection: &mut DbConnection) -> Result<bool, sqlx::Error> {
    let row = sqlx::query("PRAGMA freelist_count").fetch_one(&mut *connection).await?;
    if row.try_get::<i64, _>(0)? <= SPARE_PAGES {
        return Ok(false);
    }
    sqlx::raw_sql(STEP).execute(&mut *connection).await?;
    let row = sqlx::query("PRAGMA freelist_count").fetch_one(&mut *connection).await?;
    if row.try_get::<i64, _>(0)? <= SPARE_PAGES {
        // The file shrinks at a checkpoint.
        sqlx::raw_sql("PRAGMA wal_checkpoint(PASSIVE)").execute(connection).await?;
        return Ok(false);
    }
    Ok(true)
}
