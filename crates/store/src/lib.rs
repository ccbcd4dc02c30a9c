//! Remembers sessions, prompts, turns, events, snapshots, repositories and leases.
//!
//! One [`Store`] on a file (SQLite) or a server (PostgreSQL). Everything is written by one writer that commits
//! whatever waits in one transaction; readers have connections of their own. There is one SQL text for both
//! databases; `dialect.rs` has the few things that differ.
//!
//! It keeps three rules by itself: a session's events have neither gap nor repeat, at most one prompt
//! per session is dispatched, and whoever lost the server lease writes nothing more. What a session
//! does next is not decided here.
#![forbid(unsafe_code)]

mod append;
mod batch;
mod blobs;
mod builds;
mod checkouts;
mod commit;
mod counts;
mod database;
mod dialect;
mod error;
mod events;
mod group;
mod idempotency;
mod leases;
mod meta;
mod migrate;
mod prompts;
mod pulls;
mod removals;
mod repositories;
mod row;
mod secrets;
mod sessions;
mod snapshots;
mod tokens;
mod turns;
mod watch;
mod writer;

use std::{collections::HashMap, path::Path, sync::Arc};

use harvest_proto::{Event, SessionId};
use tokio::sync::{Mutex, broadcast};

pub use checkouts::{CheckoutRecord, NewCheckout};
pub use commit::{Committed, NewPrompt, Write};
pub use database::{DatabaseUrl, DatabaseUrlError};
pub use error::StoreError;
pub use idempotency::Claim;
pub use leases::Lease;
pub use removals::Removal;
pub use sessions::{NewSession, SessionFilter, SessionRecord};
pub use turns::TurnTree;

use dialect::Source;
use writer::Writer;

// What a follower may fall behind before it reads from the disk instead.
const FOLLOW_BUFFER: usize = 1024;

/// Whichever database it is.
type DbConnection = sqlx::AnyConnection;
type DbQuery<'q> = sqlx::query::Query<'q, sqlx::Any, sqlx::any::AnyArguments>;
type DbRow = sqlx::any::AnyRow;
type DbPool = sqlx::AnyPool;

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
        Self::connect(&DatabaseUrl::file(path)).await
    }

    /// Opens the store at this address, making it or bringing its tables up to date first.
    ///
    /// # Errors
    /// When the database cannot be reached, or was written by a newer version of the program.
    pub async fn connect(database: &DatabaseUrl) -> Result<Self, StoreError> {
        let unreachable = |source| StoreError::Connect { database: database.clone(), source };
        let source = Source::new(database)?;
        let mut connection = source.connect().await.map_err(unreachable)?;
        source.check(&mut connection).await?;
        migrate::run(&mut connection, source.dialect).await?;
        let readers = source.readers().await.map_err(unreachable)?;
        let topics = Arc::new(Topics::default());
        let writer = Writer::spawn(connection, source, Arc::clone(&topics));
        Ok(Self { writer, readers, topics, closing: Arc::default() })
    }

    /// Waits until everything asked for so far is written, then lets the file go.
    pub async fn close(&self) {
        let _one_at_a_time = self.closing.lock().await;
        self.writer.close(self.readers.clone()).await;
    }

    /// Follows a session's events from now on. A follower that falls behind is told so and reads
    /// what it missed with [`Store::event_list`].
    #[must_use]
    pub fn event_follow(&self, session: &SessionId) -> broadcast::Receiver<Arc<Event>> {
        let mut topics = self.topics.lock().expect("no holder of this lock can panic");
        topics.retain(|_, topic| topic.receiver_count() > 0);
        topics
            .entry(session.clone())
            .or_insert_with(|| broadcast::Sender::new(FOLLOW_BUFFER))
            .subscribe()
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Store")
    }
}
