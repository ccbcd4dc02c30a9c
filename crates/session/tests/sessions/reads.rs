//! What a prompt reads from the database, by the statements that the driver of the database logs.

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{Mutex, PoisonError},
    thread,
};

use harvest_store::{Claim, SessionFilter};
use sqlx::{AssertSqlSafe, Connection, Row, SqliteConnection};
use tracing::{
    Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

use super::*;

/// Statements with the thread that ran them; every connection has its own.
static LOGGED: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

fn logged() -> std::sync::MutexGuard<'static, Vec<(String, String)>> {
    LOGGED.lock().unwrap_or_else(PoisonError::into_inner)
}

struct StatementLog;

impl Subscriber for StatementLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "sqlx::query"
    }

    fn event(&self, event: &tracing::Event<'_>) {
        let mut statement = Statement::default();
        event.record(&mut statement);
        let Statement { summary, whole } = statement;
        let thread = thread::current().name().unwrap_or_default().to_owned();
        logged().push((thread, if whole.is_empty() { summary } else { whole }));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// The fields of a log line: a long statement is shortened in the first.
#[derive(Default)]
struct Statement {
    summary: String,
    whole: String,
}

impl Visit for Statement {
    fn record_str(&mut self, field: &Field, value: &str) {
        let value = value.split_whitespace().collect::<Vec<_>>().join(" ");
        match field.name() {
            "summary" => self.summary = value,
            "db.statement" => self.whole = value,
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}

/// The statements of the reading connections. Only the writer begins transactions.
fn reads() -> Vec<String> {
    let logged = logged().clone();
    let writers: HashSet<String> = logged
        .iter()
        .filter(|(_, sql)| sql.starts_with("BEGIN"))
        .map(|(thread, _)| thread.clone())
        .collect();
    logged.into_iter().filter(|(thread, _)| !writers.contains(thread)).map(|(_, sql)| sql).collect()
}

#[tokio::test]
async fn prompt_reaches_idle_session_without_reads() {
    tracing::subscriber::set_global_default(StatementLog).unwrap();
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let prompt = Some("hello".parse().unwrap());
    // Without a repository there is no review, which would read in the background.
    let create = CreateSession { prompt, ..CreateSession::default() };
    let id = sessions.create(create, ada()).await.unwrap().id;
    until_state(&sessions, &id, SessionState::Idle).await;
    let after = sessions.get(&id).await.unwrap().seq;
    let (_, mut events) = sessions.follow(&id, after).await.unwrap();
    logged().clear();
    send(&sessions, &id, "hold").await;
    while !started(&events.next().await.unwrap()) {}
    // The follower's own: it catches up with the store once.
    let rest: Vec<String> =
        reads().into_iter().filter(|sql| !sql.contains("FROM events")).collect();
    assert_eq!(rest, [""; 0], "{:#?}", logged());
    assert!(logged().iter().any(|(_, sql)| sql.contains("INSERT INTO prompts")), "nothing logged");
}

#[tokio::test]
async fn prompt_reply_is_the_stored_prompt() {
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    let id = harness.session(&sessions, None).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    // The first is dispatched at once, the others are queued.
    for (text, position) in [("hold", None), ("a\0b", Some(1)), ("c", Some(2))] {
        let create = CreatePrompt::new(text.parse().unwrap());
        let reply = sessions.prompt(&id, create, ada()).await.unwrap();
        assert_eq!((reply.position, reply.turn.is_some()), (position, position.is_none()));
        assert_eq!(sessions.prompts(&id).await.unwrap().last(), Some(&reply));
    }
    assert_eq!(sessions.get(&id).await.unwrap().title, "hold");
    let unknown = sessions.prompt_cancel(&id, &PromptId::random()).await.unwrap_err();
    assert_eq!(unknown.code(), "not_found");
}

// Read by jobs only, or a few rows whatever the number of sessions is.
const MAY_SCAN: [&str; 11] = [
    "repositories",
    "removals",
    "builds",
    "pool_members",
    "sqlite_schema",
    "CONSTANT ROW",
    // The job of retention.
    "HAVING COUNT(*) > 1",
    // These partial indexes contain requests in flight and sessions at work only.
    "idempotency_keys_in_flight",
    "sessions_at_work",
    "prompts_queued",
    "checkouts_unreviewed",
];

/// The steps of SQLite's plan for a statement that read a whole table or index.
async fn scans(connection: &mut SqliteConnection, sql: &str) -> Vec<String> {
    let explain = sqlx::query(AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")));
    let steps = explain.fetch_all(connection).await.unwrap().into_iter();
    let steps = steps.map(|row| row.get::<String, _>("detail"));
    let scans = steps.filter(|step| step.starts_with("SCAN ") && !step.contains("-ROW VALUES"));
    scans
        .filter(|step| !MAY_SCAN.iter().any(|known| step.contains(known) || sql.contains(known)))
        .collect()
}

#[tokio::test]
async fn requests_and_starts_scan_no_table() {
    tracing::subscriber::set_global_default(StatementLog).unwrap();
    let harness = Harness::new().await;
    let sessions = harness.serve().await;
    assert_eq!(sessions.idempotency_claim("k", b"body").await.unwrap(), Claim::New);
    let keyed = sessions.with_idempotency_key(Some("k"));
    let id = harness.session(&keyed, Some("hello")).await.id;
    until_state(&sessions, &id, SessionState::Idle).await;
    send(&sessions, &id, "again").await;
    until(&sessions, &id, |event| matches!(event.body, EventBody::SnapshotTaken { .. })).await;
    let key = SessionKey { owner: ada().email, text: "k".into() };
    let filters = [
        SessionFilter::default(),
        SessionFilter { archived: Some(false), ..SessionFilter::default() },
        SessionFilter { state: Some(SessionState::Paused), ..SessionFilter::default() },
        SessionFilter { id_prefix: Some("ses_a".into()), ..SessionFilter::default() },
        SessionFilter { key: Some(key), ..SessionFilter::default() },
    ];
    for filter in &filters {
        sessions.find(filter, None, 20).await.unwrap();
    }
    sessions.pause(&id).await.unwrap();
    sessions.close().await;
    let sessions = harness.serve().await;
    sessions.delete(&id).await.unwrap();
    let path = harness.folder.path().join("store.db");
    let url = format!("sqlite://{}", path.display());
    let mut connection = SqliteConnection::connect(&url).await.unwrap();
    let all: HashSet<String> = logged().iter().map(|(_, sql)| sql.clone()).collect();
    let begins = |sql: &&String| {
        ["SELECT", "INSERT", "UPDATE", "DELETE"].iter().any(|verb| sql.starts_with(verb))
    };
    let all: Vec<&String> = all.iter().filter(begins).collect();
    assert!(all.len() > 30, "{all:#?}");
    for sql in all {
        assert_eq!(scans(&mut connection, sql).await, [""; 0], "{sql}");
    }
}
