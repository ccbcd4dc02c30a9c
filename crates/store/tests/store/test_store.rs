//! A store for one test, on either database, and helpers for writes.

use std::path::PathBuf;

use harvest_e2e::{Database, Postgres};
use harvest_proto::{
    AgentName, Event, EventBody, NetworkPolicy, PromptId, SessionId, Timestamp,
    api::{PromptStatus, PullRequestMode, Role, Token},
    bridge::{Author, OutboxEvent},
};
use harvest_store::{
    DatabaseUrl, Lease, NewCheckout, NewPrompt, NewSession, Store, StoreError, Write,
};
use sqlx::Row;

pub(crate) const NOW: Timestamp = Timestamp::from_millis(1_000);

/// Makes two tests of each `async fn(TestStore)`: one on SQLite, one on PostgreSQL.
macro_rules! on_both {
    ($($rule:ident),* $(,)?) => {
        mod sqlite {
            $(#[tokio::test]
            async fn $rule() {
                super::$rule(crate::test_store::TestStore::sqlite().await).await;
            })*
        }
        mod postgres {
            $(#[tokio::test]
            async fn $rule() {
                super::$rule(crate::test_store::TestStore::postgres().await).await;
            })*
        }
    };
}
pub(crate) use on_both;

pub(crate) enum TestDatabase {
    File(tempfile::TempDir),
    Server(Database),
}

pub(crate) struct TestStore {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) database: TestDatabase,
}

impl TestDatabase {
    pub(crate) fn sqlite() -> Self {
        Self::File(tempfile::tempdir().unwrap())
    }

    pub(crate) fn postgres() -> Self {
        Self::Server(Postgres::shared().database())
    }

    pub(crate) fn file(&self) -> PathBuf {
        match self {
            Self::File(folder) => folder.path().join("store.db"),
            Self::Server(_) => panic!("not a file"),
        }
    }

    /// The URL as in a configuration.
    pub(crate) fn text(&self) -> String {
        match self {
            Self::File(_) => format!("sqlite:{}", self.file().display()),
            Self::Server(database) => database.url(),
        }
    }

    pub(crate) fn url(&self) -> DatabaseUrl {
        self.text().parse().unwrap()
    }

    pub(crate) async fn store(&self) -> Store {
        Store::connect(&self.url()).await.unwrap()
    }

    /// A connection besides the store's own.
    pub(crate) async fn raw(&self) -> sqlx::AnyConnection {
        use sqlx::Connection;
        sqlx::any::install_default_drivers();
        sqlx::AnyConnection::connect(&format!("{}{}", self.text(), self.create())).await.unwrap()
    }

    fn create(&self) -> &'static str {
        match self {
            Self::File(_) => "?mode=rwc",
            Self::Server(_) => "",
        }
    }

    /// Blocks all writers, like another server, until `connection` rolls back.
    pub(crate) async fn hold_writers(&self, connection: &mut sqlx::AnyConnection) {
        let sql = match self {
            Self::File(_) => "BEGIN IMMEDIATE",
            Self::Server(_) => "BEGIN; SELECT pg_advisory_xact_lock(7305447129)",
        };
        sqlx::raw_sql(sql).execute(connection).await.unwrap();
    }

    /// Number of rows.
    pub(crate) async fn count(&self, table: &str) -> i64 {
        let sql = sqlx::AssertSqlSafe(format!("SELECT COUNT(*) AS rows FROM {table}"));
        sqlx::query(sql).fetch_one(&mut self.raw().await).await.unwrap().get("rows")
    }

    /// Query plan of the database.
    pub(crate) async fn plan(&self, sql: &str, session: &SessionId) -> String {
        let mut connection = self.raw().await;
        sqlx::raw_sql("ANALYZE").execute(&mut connection).await.unwrap();
        let explain = match self {
            Self::File(_) => "EXPLAIN QUERY PLAN",
            Self::Server(_) => "EXPLAIN",
        };
        let query = sqlx::query(sqlx::AssertSqlSafe(format!("{explain} {sql}")));
        let rows = query
            .bind(session.to_string())
            .bind(1000_i64)
            .fetch_all(&mut connection)
            .await
            .unwrap();
        rows.iter().map(|row| row.get::<String, _>(row.columns().len() - 1) + "\n").collect()
    }

    /// Runs SQL directly, bypassing the store.
    pub(crate) async fn sql(&self, sql: &str) {
        let sql = sqlx::AssertSqlSafe(sql.to_owned());
        sqlx::raw_sql(sql).execute(&mut self.raw().await).await.unwrap();
    }
}

impl TestStore {
    pub(crate) async fn sqlite() -> Self {
        Self::at(TestDatabase::sqlite()).await
    }

    pub(crate) async fn postgres() -> Self {
        Self::at(TestDatabase::postgres()).await
    }

    pub(crate) async fn at(database: TestDatabase) -> Self {
        let store = database.store().await;
        let lease = store.server_lease(NOW).await.unwrap();
        Self { store, lease, database }
    }

    pub(crate) async fn session(&self) -> SessionId {
        let new = new_session();
        let id = new.id.clone();
        self.store.session_insert_all(self.lease, vec![(new, Vec::new())]).await.unwrap();
        id
    }

    pub(crate) async fn commit(
        &self,
        session: &SessionId,
        writes: Vec<Write>,
    ) -> Result<u64, StoreError> {
        self.store.session_commit(session, self.lease, NOW, writes).await.map(|done| done.seq)
    }

    pub(crate) async fn seqs(&self, session: &SessionId) -> Vec<u64> {
        all_events(&self.store, session).await.iter().map(|event| event.seq).collect()
    }
}

/// All events of a session, page by page.
pub(crate) async fn all_events(store: &Store, session: &SessionId) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    loop {
        let last = events.last().map_or(0, |event| event.seq);
        let page = store.event_list(session, last, 100_000).await.unwrap();
        if page.is_empty() {
            return events;
        }
        events.extend(page);
    }
}

pub(crate) fn author() -> Author {
    Author { name: "Ada".into(), email: "ada@example.org".into() }
}

fn checkout(repository: &str) -> NewCheckout {
    NewCheckout { repository: repository.parse().unwrap(), base: None, base_commit: None }
}

pub(crate) fn new_session() -> NewSession {
    NewSession {
        id: SessionId::random(),
        title: "t".into(),
        checkouts: vec![checkout("o/r"), checkout("o/s")],
        branch: "b".parse().unwrap(),
        agent: AgentName::Claude,
        model: None,
        effort: None,
        network: NetworkPolicy::Trusted,
        author: author(),
        provider: "local".into(),
        conversation: "c".into(),
        forked_from: None,
        forked_turn: None,
        key: None,
        env: std::collections::BTreeMap::new(),
        no_questions: false,
        pr_mode: Some(PullRequestMode::Draft),
        at: NOW,
    }
}

pub(crate) fn warning(text: &str) -> Write {
    Write::Event {
        at: NOW,
        turn: None,
        body: Box::new(EventBody::Warning { message: text.into() }),
    }
}

pub(crate) fn prompt(id: &PromptId) -> Write {
    Write::PromptInsert(Box::new(NewPrompt {
        id: id.clone(),
        text: "do".parse().unwrap(),
        author: author(),
        agent: None,
        model: None,
        effort: None,
        attachments: Vec::new(),
        at: NOW,
    }))
}

pub(crate) fn outbox(number: u64) -> Write {
    let body = EventBody::TextDelta { text: number.to_string() };
    Write::Outbox { epoch: 1, event: Box::new(OutboxEvent { number, at: NOW, turn: None, body }) }
}

pub(crate) fn dispatch(id: &PromptId) -> Write {
    Write::PromptStatus {
        prompt: id.clone(),
        from: PromptStatus::Queued,
        to: PromptStatus::Dispatched,
    }
}

pub(crate) fn token(name: &str) -> Token {
    Token {
        name: name.into(),
        user: author(),
        role: Role::Member,
        created_at: NOW,
        last_used: None,
    }
}
