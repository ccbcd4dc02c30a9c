//! What a prompt reads from the database, by the statements that the driver of the database logs.

use std::{
    collections::HashSet,
    fmt::Debug,
    sync::{Mutex, PoisonError},
    thread,
};

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
        let create =
            CreatePrompt { text: text.parse().unwrap(), now: false, author: None, agent: None };
        let reply = sessions.prompt(&id, create, ada()).await.unwrap();
        assert_eq!((reply.position, reply.turn.is_some()), (position, position.is_none()));
        assert_eq!(sessions.prompts(&id).await.unwrap().last(), Some(&reply));
    }
    assert_eq!(sessions.get(&id).await.unwrap().title, "hold");
    let unknown = sessions.prompt_cancel(&id, &PromptId::random()).await.unwrap_err();
    assert_eq!(unknown.code(), "not_found");
}
