//! The growth rows: the same operations in a home with ten kept sessions and in one with ten
//! thousand, interleaved. The kept sessions are copies of a real one, written to the store and to
//! the folders of snapshots and layers while no server runs.

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use harvest_e2e::{Host, private_memory};
use harvest_proto::{
    EventBody, SessionId, SnapshotId, Timestamp,
    event::{BootPhase, PhaseStatus, SnapshotKind},
};
use harvest_store::{DriverState, NewSession, SessionRecord, Store, Write};
use serde_json::json;

use crate::{options::Options, report::Report, runner::Samples};

const FEW: usize = 10;
const MANY: usize = 10_000;

const ROUNDS: usize = 15;

// Sessions per transaction.
const GROUP: usize = 500;

// As long after a start, the server's jobs begin to compare snapshots and to free space.
const JOBS_BEGIN: Duration = Duration::from_secs(2);

// Memory of the server per thousand kept sessions: resting sessions are not loaded.
const KEPT_SESSIONS_KIB: u64 = 1024;

/// Each operation with few and with many kept sessions. The operations after the start are
/// measured twice: at once, and while the jobs run.
const ROWS: [[&str; 2]; 11] = [
    ["growth: start after kill, 10 sessions", "growth: start after kill, 10,000 sessions"],
    ["growth: list a page, 10 sessions", "growth: list a page, 10,000 sessions"],
    ["growth: POST → agent ready, 10 sessions", "growth: POST → agent ready, 10,000 sessions"],
    ["growth: prompt → turn saved, 10 sessions", "growth: prompt → turn saved, 10,000 sessions"],
    ["growth: delete, 10 sessions", "growth: delete, 10,000 sessions"],
    ["growth: list during jobs, 10 sessions", "growth: list during jobs, 10,000 sessions"],
    [
        "growth: POST → agent ready during jobs, 10 sessions",
        "growth: POST → agent ready during jobs, 10,000 sessions",
    ],
    [
        "growth: prompt → turn saved during jobs, 10 sessions",
        "growth: prompt → turn saved during jobs, 10,000 sessions",
    ],
    ["growth: delete during jobs, 10 sessions", "growth: delete during jobs, 10,000 sessions"],
    ["growth: df, 10 sessions", "growth: df, 10,000 sessions"],
    ["growth: gc --dry-run, 10 sessions", "growth: gc --dry-run, 10,000 sessions"],
];

/// Targets for p50 with many sessions, as a multiple of that with few. `df` and `gc` read a record
/// of every snapshot.
pub(crate) const TARGETS: [(&str, &[&str], f64); 9] = [
    (ROWS[0][1], &[ROWS[0][0]], 1.2),
    (ROWS[1][1], &[ROWS[1][0]], 1.2),
    (ROWS[2][1], &[ROWS[2][0]], 1.2),
    (ROWS[3][1], &[ROWS[3][0]], 1.2),
    (ROWS[4][1], &[ROWS[4][0]], 1.2),
    (ROWS[5][1], &[ROWS[5][0]], 1.2),
    (ROWS[6][1], &[ROWS[6][0]], 1.2),
    (ROWS[7][1], &[ROWS[7][0]], 1.2),
    (ROWS[8][1], &[ROWS[8][0]], 1.2),
];

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("growth: ")
}

/// Measures the rows and adds them to the report.
pub(crate) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let (many, rounds) = if options.quick { (10 * FEW, 3) } else { (MANY, ROUNDS) };
        let mut homes = Vec::new();
        for sessions in [FEW, many] {
            let mut host = Host::start().await;
            let template = keep_one(&host).await?;
            host.kill();
            copy(&host, &template, sessions - 1).await?;
            homes.push(host);
        }
        let mut rows = ROWS.map(|row| row.map(|row| Samples { row, taken: Vec::new() }));
        let mut memory = [0, 0];
        for round in 0..=rounds {
            for (column, host) in homes.iter_mut().enumerate() {
                let (took, bytes) = measure(host).await?;
                // Not counted: the first start also reads what the copy wrote.
                if round > 0 {
                    let times = rows.iter_mut().zip(took);
                    times.for_each(|(row, took)| row[column].taken.push(took));
                    memory[column] = bytes;
                }
            }
        }
        rows.into_iter().for_each(|row| report.add(row.into()));
        let grown = memory[1].saturating_sub(memory[0]) / (many - FEW) as u64 * 1000 / 1024;
        let what = format!("server memory per 1,000 kept sessions, of {many}");
        report.add_memory(what, grown, KEPT_SESSIONS_KIB);
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
    let parsed: serde_json::Value = serde_json::from_str(&record)?;
    let stack = parsed["layers"].as_array().context("the record has no layers")?;
    let layer = stack.last().and_then(|layer| layer.as_str()).context("no layer")?;
    let layers = host.home().join("layers");
    ensure!(layers.join(layer).exists(), "{layer} is not a layer of the home");
    let copies: Vec<usize> = (0..count).collect();
    for group in copies.chunks(GROUP) {
        let mut sessions = Vec::new();
        for _ in group {
            let new = SnapshotId::random();
            let text = record.replace(&snapshot.to_string(), &new.to_string());
            fs::write(
                folder.join(format!("{}.json", new.part())),
                text.replace(layer, new.part()),
            )?;
            fs::create_dir(layers.join(new.part()))?;
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
        agent: session.agent.clone(),
        model: session.model.clone(),
        effort: session.effort,
        network: session.network,
        provider: session.provider.clone(),
        author: session.author.clone(),
        conversation: template.conversation.clone(),
        forked_from: None,
        forked_turn: None,
        key: None,
        env: template.env.clone(),
        pr_mode: session.pr_mode,
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

/// Starts the server, measures every row, and kills the server. Returns the server's memory, too.
async fn measure(host: &mut Host) -> Result<(Vec<Duration>, u64)> {
    let began = Instant::now();
    host.launch();
    while host.url().is_none() || host.get("/readyz").send().await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut took = vec![began.elapsed()];
    took.extend(operations(host).await?);
    tokio::time::sleep_until((began + JOBS_BEGIN).into()).await;
    took.extend(operations(host).await?);
    let memory = private_memory(host.server()).context("cannot read the server's memory")?;
    for arguments in [&["df"][..], &["gc", "--dry-run"]] {
        let (ran, elapsed) = timed(async { host.harvest(arguments) }).await;
        ensure!(ran.code == 0, "harvest {arguments:?}: {}", ran.stderr);
        took.push(elapsed);
    }
    host.kill();
    Ok((took, memory))
}

/// A list, a new session, its turn, and its deletion.
async fn operations(host: &Host) -> Result<[Duration; 4]> {
    let (list, listed) = timed(host.get("/v1/sessions?archived=false&limit=10").send()).await;
    list?.error_for_status()?;
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
    let started = began.elapsed();
    let began = Instant::now();
    host.prompt(&session, "Note it.", &json!([{ "bash": "date >> ~/file" }])).await;
    let saved = |body: &EventBody| matches!(body, EventBody::SnapshotTaken { .. });
    follower.until("the turn to be saved", saved).await;
    let turn = began.elapsed();
    let delete = host.request("DELETE".parse()?, &format!("/v1/sessions/{session}")).send();
    let (deleted, removal) = timed(delete).await;
    deleted?.error_for_status()?;
    Ok([listed, started, turn, removal])
}

async fn timed<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    (work.await, began.elapsed())
}
