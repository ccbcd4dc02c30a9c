//! Remembers sessions, prompts, turns, events, snapshots, repositories and leases.
//!
//! One [`Store`] on SQLite. Everything is written by one writer that commits whatever waits in one
//! transaction; readers have connections of their own. The SQL keeps to what Postgres would also take: TEXT and
//! BIGINT columns, `$1` parameters, `ON CONFLICT … RETURNING`, partial unique indexes.
//!
//! It keeps three rules by itself: a session's events have neither gap nor repeat, at most one prompt
//! per session is dispatched, and whoever lost the server lease writes nothing more. What a session
//! does next is not decided here.
#![forbid(unsafe_code)]

mod builds;
mod checkouts;
mod commit;
mod error;
mod events;
mod idempotency;
mod leases;
mod meta;
mod migrate;
mod prompts;
mod pulls;
mod repositories;
mod row;
mod secrets;
mod sessions;
mod snapshots;
mod tokens;
mod turns;
mod writer;

use std::{collections::HashMap, path::Path, str::FromStr, sync::Arc, time::Duration};

use harvest_proto::{Event, SessionId};
use sqlx::{
    ConnectOptions,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::{Mutex, broadcast};

pub use checkouts::{CheckoutRecord, NewCheckout};
pub use commit::{Committed, NewPrompt, Write};
pub use error::StoreError;
pub use idempotency::Claim;
pub use leases::Lease;
pub use sessions::{NewSession, SessionFilter, SessionRecord};
pub use tokens::TokenRecord;

use writer::Writer;

// Reads are short; two cores never need more of them at once, and each costs a thread.
const READERS: u32 = 4;

// Another process (a backup, the CLI looking) may hold the file for a moment.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);

// What a follower may fall behind before it reads from the disk instead.
const FOLLOW_BUFFER: usize = 1024;

/// The one place that says which database it is.
type DbConnection = sqlx::SqliteConnection;
type DbRow = sqlx::sqlite::SqliteRow;
type DbPool = sqlx::SqlitePool;

type Topics = std::sync::Mutex<HashMap<SessionId, broadcast::Sender<Arc<Event>>>>;

/// The store of one installation. Cheap to clone.
#[derive(Clone)]
pub struct Store {
    writer: Writer,
    readers: DbPool,
    topics: Arc<Topics>,
    closing: Arc<Mutex<()>>,
}

impl Store {
    /// Opens the store at `path`, making it or bringing its tables up to date first.
    ///
    /// # Errors
    /// When the file cannot be opened, or was written by a newer version of the program.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        let options = SqliteConnectOptions::from_str("sqlite://")?
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .foreign_keys(true)
            .busy_timeout(BUSY_TIMEOUT)
            .disable_statement_logging();
        private(path).map_err(|source| StoreError::File { path: path.to_owned(), source })?;
        let mut connection = options.connect().await?;
        migrate::run(&mut connection).await?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS)
            .connect_with(options.clone().create_if_missing(false).read_only(true))
            .await?;
        let topics = Arc::new(Topics::default());
        let writer = Writer::spawn(connection, options, Arc::clone(&topics));
        Ok(Self { writer, readers, topics, closing: Arc::default() })
    }

    /// Waits until everything asked for so far is written, then lets the file go.
    pub async fn close(&self) {
        let _one_at_a_time = self.closing.lock().await;
        self.writer.close().await;
        self.readers.close().await;
    }

    /// Follows a session's events from now on. A follower that falls behind is told so and reads
    /// what it missed with [`Store::event_list`].
    #[must_use]
    pub fn event_follow(&self, session: &SessionId) -> broadcast::Receiver<Arc<Event>> {
        let mut topics = self.topics.lock().expect("no holder of this lock can panic");
        topics.retain(|_, topic| topic.receiver_count() > 0);
        topics.entry(session.clone()).or_insert_with(|| broadcast::Sender::new(FOLLOW_BUFFER)).subscribe()
    }
}

/// Makes the file before SQLite does: what people prompt is nobody else's to read. SQLite gives its
/// other files the same permissions.
fn private(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().create(true).append(true).mode(0o600).open(path).map(drop)
}

impl std::fmt::Debug for Store {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Store")
    }
}
