//! The growth rows: the same operations in a home with ten kept sessions and in one with ten
//! thousand. The kept sessions are copies of a real one, written to the store and to the folder of
//! snapshots while no server runs.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use harvest_e2e::Host;
use harvest_proto::{
    EventBody, SessionId, SnapshotId, Timestamp,
    event::{BootPhase, PhaseStatus, SnapshotKind},
};
use harvest_store::{DriverState, NewSession, SessionRecord, Store, Write};
use serde_json::json;

use crate::{options::Options, report::Report, runner::Samples};

const FEW: usize = 10;
const MANY: usize = 10_000;

const ROUNDS: usize = 10;

// Sessions per transaction.
const GROUP: usize = 500;

/// Each operation with few and with many kept sessions.
const ROWS: [[&str; 2]; 5] = [
    ["growth: start after kill, 10 sessions", "growth: start after kill, 10,000 sessions"],
    ["growth: list a page, 10 sessions", "growth: list a page, 10,000 sessions"],
    ["growth: POST → agent ready, 10 sessions", "growth: POST → agent ready, 10,000 sessions"],
    ["growth: prompt → turn saved, 10 sessions", "growth: prompt → turn saved, 10,000 sessions"],
    ["growth: delete, 10 sessions", "growth: delete, 10,000 sessions"],
];

/// Targets for p50 with many sessions, as a multiple of that with few.
pub(crate) const TARGETS: [(&str, &[&str], f64); 5] = [
    (ROWS[0][1], &[ROWS[0][0]], 1.2),
    (ROWS[1][1], &[ROWS[1][0]], 1.2),
    (ROWS[2][1], &[ROWS[2][0]], 1.2),
    (ROWS[3][1], &[ROWS[3][0]], 1.2),
    (ROWS[4][1], &[ROWS[4][0]], 1.2),
];

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("growth: ")
}

/// Measures the rows and adds them to the report.
pub(crate) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut host = Host::start().await;
        let template = keep_one(&host).await?;
        let many = if options.quick { 10 * FEW } else { MANY };
        let mut kept = 1;
        for (column, sessions) in [FEW, many].into_iter().enumerate() {
            host.kill();
            copy(&host, &template, sessions - kept).await?;
            kept = sessions;
            for row in measure(&mut host, column).await? {
                report.add(vec![row]);
            }
        }
        Ok(())
    })
}

/// A paused session with one turn, as it is stored.
async fn keep_one(host: &Host) -> Result<SessionRecord> {
    let session = host.bare("Begin.", &json!([{ "bash": "echo one > ~/file" }])).await.id;
    let saved = |body: &EventBody| {
        matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Turn, .. })
    };
    host.follow(session.clone()).until("the turn to be saved", saved).await;
    host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    host.wait_for(&session, harvest_proto::api::SessionState::Paused).await;
    let store = Store::open(&host.home().join("harvest.db")).await?;
    let record = store.session_get(&session).await?;
    store.close().await;
    Ok(record)
}

async fn copy(host: &Host, template: &SessionRecord, count: usize) -> Result<()> {
    let store = Store::open(&host.home().join("harvest.db")).await?;
    let lease = store.server_lease(Timestamp::from_millis(1)).await?;
    let snapshot = template.session.snapshot_id.clone().context("the session has no snapshot")?;
    let folder = host.home().join("snapshots");
    let record = fs::read_to_string(folder.join(format!("{}.json", snapshot.part())))?;
    let copies: Vec<usize> = (0..count).collect();
    for group in copies.chunks(GROUP) {
        let mut sessions = Vec::new();
        for _ in group {
            let new = SnapshotId::random();
            let text = record.replace(&snapshot.to_string(), &new.to_string());
            fs::write(folder.join(format!("{}.json", new.part())), text)?;
            sessions.push(copy_of(template, &snapshot, new));
        }
        store.session_insert_all(lease, sessions).await?;
    }
    store.close().await;
    Ok(())
}

fn copy_of(
    template: &SessionRecord,
    old: &SnapshotId,
    new: SnapshotId,
) -> (NewSession, Vec<Write>) {
    let session = &template.session;
    let at = session.created_at;
    let copy = NewSession {
        id: SessionId::random(),
        title: session.title.clone(),
        checkouts: Vec::new(),
        branch: session.branch.clone(),
        agent: session.agent,
        model: session.model.clone(),
        network: session.network,
        provider: session.provider.clone(),
        author: session.author.clone(),
        conversation: template.conversation.clone(),
        forked_from: None,
        forked_turn: None,
        key: None,
        env: template.env.clone(),
        no_questions: false,
        at,
    };
    let state = DriverState {
        json: template.driver_state.replace(&old.to_string(), &new.to_string()),
        state: session.state,
        reason: session.reason,
        sandbox: None,
        epoch: session.epoch,
        snapshot: Some(new.clone()),
        resting: true,
    };
    let taken = Write::SnapshotInsert { snapshot: new, kind: SnapshotKind::Pause, turn: None, at };
    let said = EventBody::TextDelta { text: "x".repeat(1000) };
    let said = Write::Event { at, turn: None, body: Box::new(said) };
    (copy, vec![taken, said, Write::DriverState(state)])
}

async fn measure(host: &mut Host, column: usize) -> Result<Vec<Samples>> {
    let mut rows = ROWS.map(|row| Samples { row: row[column], taken: Vec::new() });
    // Not counted: the first start also reads what the copy wrote.
    host.up().await;
    for _ in 0..ROUNDS {
        host.kill();
        rows[0].taken.push(timed(host.up()).await.1);
        let list = host.get("/v1/sessions?limit=50").send();
        rows[1].taken.push(timed(list).await.1);
        let body = json!({ "agent": "scripted", "network": "none" });
        let began = Instant::now();
        let created = host.post("/v1/sessions", body).await;
        let session: SessionId = serde_json::from_value(created["id"].clone())?;
        let mut follower = host.follow(session.clone());
        let ready = |body: &EventBody| {
            let (phase, status) = (BootPhase::Ready, PhaseStatus::Done);
            matches!(body, EventBody::BootPhase { phase: p, status: s, .. } if (*p, *s) == (phase, status))
        };
        follower.until("the agent to be ready", ready).await;
        rows[2].taken.push(began.elapsed());
        let began = Instant::now();
        host.prompt(&session, "Note it.", &json!([{ "bash": "date >> ~/file" }])).await;
        let saved = |body: &EventBody| matches!(body, EventBody::SnapshotTaken { .. });
        follower.until("the turn to be saved", saved).await;
        rows[3].taken.push(began.elapsed());
        let delete = host.request("DELETE".parse()?, &format!("/v1/sessions/{session}")).send();
        let (deleted, took) = timed(delete).await;
        deleted?.error_for_status()?;
        rows[4].taken.push(took);
    }
    Ok(rows.into())
}

async fn timed<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    (work.await, began.elapsed())
}
