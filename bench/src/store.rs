//! The store rows: fifty concurrent writers, and opening a long session, on SQLite and on a private
//! PostgreSQL where the Debian package is installed. Both sync to the disk before they answer.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use harvest_e2e::Postgres;
use harvest_proto::{
    AgentName, EventBody, NetworkPolicy, SessionId, Timestamp,
    bridge::{Author, OutboxEvent},
};
use harvest_store::{DatabaseUrl, Lease, NewCheckout, NewSession, Store, Write};

use crate::{options::Options, report::Report, runner::Samples, workspace::Workspace};

const NOW: Timestamp = Timestamp::from_millis(1_000);
const WRITERS: u64 = 50;
/// Each event is committed before the writer sends the next.
const EVENTS_PER_WRITER: u64 = 100;
const LONG_SESSION_EVENTS: u64 = 10_000;
const SHOWN: u32 = 50;

/// 5,000 events, so a target of 5,000 events per second is 1,000 ms.
pub(crate) const WRITE_SQLITE: &str = "store: 50 writers, 100 events each, SQLite";
pub(crate) const OPEN_SQLITE: &str = "store: open a session of 10,000 events, SQLite";
const WRITE_POSTGRES: &str = "store: 50 writers, 100 events each, PostgreSQL";
const OPEN_POSTGRES: &str = "store: open a session of 10,000 events, PostgreSQL";

/// Targets for p50, in milliseconds.
pub(crate) const LIMITS: [(&str, f64); 2] = [(WRITE_SQLITE, 1000.0), (OPEN_SQLITE, 100.0)];

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("store: ")
}

/// Measures both databases and adds their rows.
pub(crate) fn run(workspace: &Workspace, options: &Options, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let file = DatabaseUrl::file(&workspace.at("store.db"));
    report.add(runtime.block_on(rows(&file, [WRITE_SQLITE, OPEN_SQLITE], options))?);
    if !Postgres::installed() {
        report.skipped.push((
            WRITE_POSTGRES.to_owned(),
            "the package `postgresql` is not installed".to_owned(),
        ));
        return Ok(());
    }
    // Not in the workspace, which only root can enter.
    let folder = std::env::temp_dir().join(format!("harvest-bench-pg-{}", std::process::id()));
    report.add(runtime.block_on(on_postgres(&folder, options))?);
    Ok(())
}

async fn on_postgres(folder: &Path, options: &Options) -> Result<Vec<Samples>> {
    let database = Postgres::start(folder, std::process::id(), &[]).database();
    let url = database.url().parse().context("cannot parse the URL of the test database")?;
    rows(&url, [WRITE_POSTGRES, OPEN_POSTGRES], options).await
}

async fn rows(
    url: &DatabaseUrl,
    names: [&'static str; 2],
    options: &Options,
) -> Result<Vec<Samples>> {
    let store = Store::connect(url).await?;
    let lease = store.server_lease(NOW).await?;
    let rounds = options.rounds.min(10);
    let mut write = Samples { row: names[0], taken: Vec::new() };
    // The first round grows the file and is not counted.
    for round in 0..=rounds {
        let taken = fifty_writers(&store, lease).await?;
        if round > 0 {
            write.taken.push(taken);
        }
    }
    let long = session(&store, lease).await?;
    for first in (0..LONG_SESSION_EVENTS).step_by(100) {
        let writes = (first + 1..=first + 100).map(event).collect();
        store.session_commit(&long, lease, NOW, writes).await?;
    }
    let mut open = Samples { row: names[1], taken: Vec::new() };
    for _ in 0..options.rounds {
        tokio::time::sleep(options.gap).await;
        let began = Instant::now();
        let record = store.session_get(&long).await?;
        let newest = store.event_list(&long, LONG_SESSION_EVENTS - u64::from(SHOWN), SHOWN).await?;
        open.taken.push(began.elapsed());
        anyhow::ensure!(
            record.session.seq == LONG_SESSION_EVENTS && newest.len() == 50,
            "the session is incomplete"
        );
    }
    store.close().await;
    Ok(vec![write, open])
}

/// The time until the last writer has finished.
async fn fifty_writers(store: &Store, lease: Lease) -> Result<Duration> {
    let mut sessions = Vec::new();
    for _ in 0..WRITERS {
        sessions.push(session(store, lease).await?);
    }
    let began = Instant::now();
    let writers = sessions.into_iter().map(|session| {
        let store = store.clone();
        tokio::spawn(async move {
            for number in 1..=EVENTS_PER_WRITER {
                store.session_commit(&session, lease, NOW, vec![event(number)]).await?;
            }
            anyhow::Ok(())
        })
    });
    for writer in writers.collect::<Vec<_>>() {
        writer.await??;
    }
    Ok(began.elapsed())
}

async fn session(store: &Store, lease: Lease) -> Result<SessionId> {
    let word = || "word".to_owned();
    let new = NewSession {
        id: SessionId::random(),
        title: word(),
        checkouts: vec![NewCheckout {
            repository: "local/word".parse()?,
            base: None,
            base_commit: None,
        }],
        branch: "word".parse()?,
        agent: AgentName::Claude,
        model: None,
        effort: None,
        provider: "local".into(),
        network: NetworkPolicy::None,
        author: Author { name: word(), email: word() },
        conversation: word(),
        forked_from: None,
        forked_turn: None,
        key: None,
        env: Default::default(),
        pr_mode: None,
        no_questions: false,
        at: NOW,
    };
    let id = new.id.clone();
    store.session_insert_all(lease, vec![(new, Vec::new())]).await?;
    Ok(id)
}

/// An event as a sandbox sends it: a hundred characters of agent text.
fn event(number: u64) -> Write {
    let body = EventBody::TextDelta { text: "x".repeat(100) };
    Write::Outbox { epoch: 1, event: Box::new(OutboxEvent { number, at: NOW, turn: None, body }) }
}
