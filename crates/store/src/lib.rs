//! The database: sessions, prompts, turns, events, snapshots, repositories, memory, tokens and
//! leases, in a file (SQLite) or on a server (PostgreSQL). One writer task commits all waiting
//! requests in one transaction; readers have their own connections. Both databases get the same
//! SQL; `dialect.rs` has the few differences.
//!
//! The store enforces three rules: a session's events are numbered without gaps or repeats, at most
//! one prompt of a session is dispatched, and a server that lost its lease writes nothing more. It
//! does not decide what a session does next.
#![forbid(unsafe_code)]

mod append;
mod artifacts;
mod batch;
mod blobs;
mod budgets;
mod builds;
mod calls;
mod checkouts;
mod children;
mod commit;
mod compute;
mod copy;
mod database;
mod dialect;
mod error;
mod events;
mod group_commit;
mod idempotency;
mod job;
mod leases;
mod memory;
mod meta;
mod network;
mod network_log;
mod pool;
mod prompts;
mod pull_requests;
mod pushed_commits;
mod removals;
mod repositories;
mod reserve;
mod row;
mod schedule;
mod schema;
mod secret_uses;
mod secrets;
mod sessions;
mod snapshots;
mod target;
mod tokens;
mod turns;
mod user_limits;
mod verifications;
mod webhooks;
mod write;

use std::{collections::HashMap, path::Path, sync::Arc};

use harvest_proto::{Event, SessionId};
use tokio::sync::{Mutex, broadcast};

pub use budgets::{BudgetOwner, OverBudget};
pub use calls::NewCall;
pub use checkouts::{CheckoutRecord, NewCheckout};
pub use children::{ChildCounts, Lineage};
pub use compute::{ComputeOwner, ComputeReading};
pub use copy::copy_database;
pub use database::{DatabaseUrl, DatabaseUrlError};
pub use error::StoreError;
pub use idempotency::Claim;
pub use leases::Lease;
pub use memory::{MAX_MEMORY_CALL_ITEMS, MemoryObservations};
pub use network::RuleOwner;
pub use pool::{AgentChoice, PoolMember};
pub use prompts::{NewAttachment, NewPrompt};
pub use pull_requests::StoredPullRequest;
pub use removals::Removal;
pub use schema::VERSION as SCHEMA_VERSION;
pub use secret_uses::NewSecretUse;
pub use secrets::{SealedSecret, SecretBinding};
pub use sessions::{
    DriverState, NewSession, SessionCursor, SessionFilter, SessionKey, SessionPage, SessionRecord,
    SessionSummary,
};
pub use turns::TurnTree;
pub use user_limits::GivenLimits;
pub use webhooks::WebhookDelivery;
pub use write::{Committed, Write};

use commit::Writer;
use dialect::Connector;
use reserve::Reserve;

// Events a follower may fall behind before it has to read from the database instead. They stay in
// memory, up to 64 KB each, while a follower of the session does not read.
const FOLLOW_BUFFER: usize = 128;

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

/// Awaited before each write and after it.
#[cfg(feature = "testing")]
pub type WriteSteps =
    Arc<dyn Fn() -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

impl Store {
    /// The store with steps before and after each write of this clone: a test that never lets one
    /// of them end has killed the server there.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn with_write_steps(mut self, steps: WriteSteps) -> Self {
        self.writer.set_steps(steps);
        self
    }

    /// Opens the store in a file; creates the file and its tables if needed.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        Self::connect(&DatabaseUrl::file(path)).await
    }

    /// Opens the store at a database URL; creates its tables if needed.
    pub async fn connect(database: &DatabaseUrl) -> Result<Self, StoreError> {
        let unreachable = |source| StoreError::Connect { database: database.clone(), source };
        let connector = Connector::new(database)?;
        // Before the first connection, which already writes.
        let reserve = database.file_path().map(Reserve::open);
        let mut connection = connector.connect().await.map_err(unreachable)?;
        connector.check_version(&mut connection).await?;
        schema::create(&mut connection, connector.dialect).await?;
        let readers = connector.readers().await.map_err(unreachable)?;
        let topics = Arc::new(Topics::default());
        let writer = Writer::spawn(connection, connector, reserve, Arc::clone(&topics));
        Ok(Self { writer, readers, topics, closing: Arc::default() })
    }

    /// Reads every row of a query, except damaged ones.
    async fn all<T, C: FromIterator<T>>(
        &self,
        query: DbQuery<'_>,
        read: impl Fn(&DbRow) -> Result<T, StoreError>,
    ) -> Result<C, StoreError> {
        row::readable(&query.fetch_all(&self.readers).await?, read)
    }

    /// Reads the row of a query, if there is one.
    async fn optional<T>(
        &self,
        query: DbQuery<'_>,
        read: impl FnOnce(&DbRow) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        query.fetch_optional(&self.readers).await?.as_ref().map(read).transpose()
    }

    /// Waits for all pending writes, then closes all connections.
    pub async fn close(&self) {
        let _one_at_a_time = self.closing.lock().await;
        self.writer.close(self.readers.clone()).await;
    }

    /// Follows a session's events from now on. A follower that falls behind gets an error and reads
    /// the missed events with [`Store::event_list`].
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
