//! The session rows: a real server in its own process, the scripted agent in real sandboxes, and a
//! client on loopback. Each measurement ends when the client receives the event.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use harvest_e2e::{Host, eventually, most_memory, private_memory};
use harvest_proto::{
    EventBody, SessionId,
    api::{Session, SessionState},
    event::{BootPhase, PhaseStatus},
};
use serde_json::json;

use crate::{options::Options, report::Report, runner::Samples};

/// A new session with a prompt, on a repository whose image is built, until the turn starts.
pub(crate) const TURN_STARTS: &str = "session: POST → turn starts, repository";
/// The same without a repository: the time of the sandbox alone.
const TURN_STARTS_NO_REPOSITORY: &str = "session: POST → turn starts, no repository";
/// A new session without a prompt or repository, until its agent is ready.
pub(crate) const AGENT_READY: &str = "session: POST → agent ready";
/// From reading the clock in a command inside until the client receives the output.
pub(crate) const OUTPUT_LATENCY: &str = "session: agent output → client event";

/// Targets for p50, in milliseconds.
pub(crate) const LIMITS: [(&str, f64); 3] =
    [(TURN_STARTS, 150.0), (AGENT_READY, 50.0), (OUTPUT_LATENCY, 10.0)];

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("session: ")
}

const SESSIONS: usize = 50;
const PROMPTS: usize = 20;
// Created before the idle sessions are counted: the first sessions also pay for shared state.
const WARMUP_SESSIONS: usize = 10;
const OUTPUTS: usize = 40;

const FILES: &[(&str, &str)] = &[("README.md", "A sample.\n"), (".harvest/check.sh", "true\n")];

/// Measures the rows and adds them to the report.
pub(crate) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "100")]).await;
        report.add(starts(&host, options).await?);
        report.add(vec![Samples { row: OUTPUT_LATENCY, taken: output_latency(&host).await? }]);
        let (sessions, prompts) = if options.quick { (4, 3) } else { (SESSIONS, PROMPTS) };
        let peak = peak_memory(&host, sessions, prompts).await?;
        let what = format!("peak server memory, {prompts} prompts on each of {sessions} sessions");
        report.add_memory(what, peak, 150 * 1024);
        drop(host);
        let per_session = memory_per_idle_session(sessions).await?;
        report.add_memory("server memory per idle session".to_owned(), per_session, 50);
        Ok(())
    })
}

async fn starts(host: &Host, options: &Options) -> Result<Vec<Samples>> {
    host.repository("sample", FILES).await;
    let rows = [TURN_STARTS, TURN_STARTS_NO_REPOSITORY, AGENT_READY];
    let mut all = rows.map(|row| Samples { row, taken: Vec::new() });
    for round in 0..options.rounds + 2 {
        for (at, row) in rows.into_iter().enumerate() {
            tokio::time::sleep(options.gap).await;
            let took = start(host, row).await?;
            if round >= 2 {
                all[at].taken.push(took);
            }
        }
    }
    Ok(all.into())
}

async fn start(host: &Host, row: &'static str) -> Result<Duration> {
    let script = json!([{ "text": "done" }]);
    let began = Instant::now();
    let session = match row {
        TURN_STARTS => host.scripted("sample", "Begin.", &script).await,
        TURN_STARTS_NO_REPOSITORY => host.bare("Begin.", &script).await,
        _ => create_session(host).await?,
    };
    let wanted = |body: &EventBody| match body {
        EventBody::TurnStarted { .. } => true,
        EventBody::BootPhase { phase: BootPhase::Ready, status: PhaseStatus::Done, .. } => {
            row == AGENT_READY
        }
        _ => false,
    };
    host.follow(session.id.clone()).until(row, wanted).await;
    let took = began.elapsed();
    host.wait_for(&session.id, SessionState::Idle).await;
    remove(host, &session.id).await?;
    Ok(took)
}

async fn create_session(host: &Host) -> Result<Session> {
    let body = json!({ "agent": "scripted", "network": "none" });
    Ok(serde_json::from_value(host.post("/v1/sessions", body).await)?)
}

async fn remove(host: &Host, session: &SessionId) -> Result<()> {
    let asked = host.request("DELETE".parse()?, &format!("/v1/sessions/{session}"));
    asked.send().await?.error_for_status()?;
    Ok(())
}

async fn output_latency(host: &Host) -> Result<Vec<Duration>> {
    let steps: Vec<_> = (0..OUTPUTS).map(|_| json!({ "bash": "date +%s%N" })).collect();
    let session = host.bare("What time is it?", &json!(steps)).await;
    let received: RefCell<BTreeMap<String, Duration>> = RefCell::default();
    let ended = |body: &EventBody| {
        if let EventBody::ToolEnded { call, .. } = body {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            received.borrow_mut().entry(call.clone()).or_insert(now);
        }
        matches!(body, EventBody::TurnEnded { .. })
    };
    let mut follower = host.follow(session.id.clone());
    follower.until("the last answer", ended).await;
    let mut took = Vec::new();
    for event in &follower.seen {
        let EventBody::ToolEnded { call, output, .. } = &event.body else { continue };
        let said = Duration::from_nanos(
            output.trim().parse().with_context(|| format!("no time: {output}"))?,
        );
        took.push(received.borrow()[call].saturating_sub(said));
    }
    ensure!(took.len() == OUTPUTS, "{} of {OUTPUTS} answers received", took.len());
    remove(host, &session.id).await?;
    Ok(took)
}

/// Queues all prompts of all sessions at once and checks that each ran once. Returns the server's
/// peak memory in KiB.
async fn peak_memory(host: &Host, sessions: usize, prompts: usize) -> Result<u64> {
    let script = |number: usize| json!([{ "bash": format!("echo {number} >> /tmp/ran") }, { "text": "done" }]);
    let mut all = Vec::new();
    for _ in 0..sessions {
        all.push(host.bare("Note it.", &script(0)).await.id);
    }
    for number in 1..prompts {
        for session in &all {
            host.prompt(session, "Note it.", &script(number)).await;
        }
    }
    let expected: String = (0..prompts).map(|number| format!("{number}\n")).collect();
    for session in &all {
        let turns = u32::try_from(prompts)?;
        eventually("all prompts to have run", || async {
            let now = host.show(session).await;
            (now.turns == turns && now.state == SessionState::Idle).then_some(())
        })
        .await;
        let (_, ran) = host.exec(session, "harvest", "cat /tmp/ran").await;
        ensure!(ran == expected, "session {session} ran {ran:?}");
    }
    let most = most_memory(host.server()).context("cannot read the server's peak memory")?;
    for session in &all {
        remove(host, session).await?;
    }
    Ok(most / 1024)
}

/// The server's private memory per idle session, in KiB.
async fn memory_per_idle_session(sessions: usize) -> Result<u64> {
    let host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "100")]).await;
    let mut before = 0;
    for count in [WARMUP_SESSIONS, sessions] {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(create_session(&host).await?.id);
        }
        for session in &all {
            host.wait_for(session, SessionState::Idle).await;
        }
        if before == 0 {
            before = server_memory(&host)?;
        }
    }
    Ok(server_memory(&host)?.saturating_sub(before) / sessions as u64 / 1024)
}

fn server_memory(host: &Host) -> Result<u64> {
    private_memory(host.server()).context("cannot read the server's private memory")
}
