//! The rows of sessions: a real server in a process of its own, the scripted agent in real sandboxes, and a client
//! on loopback. What is measured ends where a client hears of it.

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

use crate::{contest::Samples, options::Options, report::Report};

/// A prompt is asked for with a session of its own, on a repository that was built; the turn begins.
pub(crate) const BEGINS: &str = "session: POST → turn begins, repository";
/// The same without a repository: what the machine alone takes.
const BEGINS_BARE: &str = "session: POST → turn begins, no repository";
/// No prompt, no repository: until the agent could take one.
pub(crate) const READY: &str = "session: POST → agent ready";
/// From a command's own look at the clock, inside, until a client has read it.
pub(crate) const HEARD: &str = "session: agent says → client hears";

/// What p50 may be at most, in milliseconds.
pub(crate) const LIMITS: [(&str, f64); 3] = [(BEGINS, 150.0), (READY, 50.0), (HEARD, 10.0)];

/// Whether a row is one of these.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("session: ")
}

const SESSIONS: usize = 50;
const PROMPTS: usize = 20;
// Before the idle ones are counted: what the first few cost is everybody's.
const FIRST: usize = 10;
const SAID: usize = 40;

const FILES: &[(&str, &str)] = &[("README.md", "A sample.\n"), (".harvest/check.sh", "true\n")];

/// Measures the rows and adds them to the report.
pub(crate) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "100")]).await;
        report.add(starts(&host, options).await?);
        report.add(vec![Samples { row: HEARD, taken: heard(&host).await? }]);
        let (sessions, prompts) = if options.quick { (4, 3) } else { (SESSIONS, PROMPTS) };
        let busy = crowd(&host, sessions, prompts).await?;
        let what = format!(
            "the server's memory at most, {prompts} prompts on each of {sessions} sessions"
        );
        report.weigh(what, busy, 150 * 1024);
        drop(host);
        let idle = idle(sessions).await?;
        report.weigh("the server's memory for each session that lies idle".to_owned(), idle, 50);
        Ok(())
    })
}

async fn starts(host: &Host, options: &Options) -> Result<Vec<Samples>> {
    host.repository("sample", FILES).await;
    let rows = [BEGINS, BEGINS_BARE, READY];
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
        BEGINS => host.scripted("sample", "Begin.", &script).await,
        BEGINS_BARE => host.bare("Begin.", &script).await,
        _ => waiting(host).await?,
    };
    let wanted = |body: &EventBody| match body {
        EventBody::TurnStarted { .. } => true,
        EventBody::BootPhase { phase: BootPhase::Ready, status: PhaseStatus::Done, .. } => {
            row == READY
        }
        _ => false,
    };
    host.follow(session.id.clone()).until(row, wanted).await;
    let took = began.elapsed();
    host.wait_for(&session.id, SessionState::Idle).await;
    remove(host, &session.id).await?;
    Ok(took)
}

async fn waiting(host: &Host) -> Result<Session> {
    let body = json!({ "agent": "scripted", "network": "none" });
    Ok(serde_json::from_value(host.post("/v1/sessions", body).await)?)
}

async fn remove(host: &Host, session: &SessionId) -> Result<()> {
    let asked = host.request("DELETE".parse()?, &format!("/v1/sessions/{session}"));
    asked.send().await?.error_for_status()?;
    Ok(())
}

async fn heard(host: &Host) -> Result<Vec<Duration>> {
    let steps: Vec<_> = (0..SAID).map(|_| json!({ "bash": "date +%s%N" })).collect();
    let session = host.bare("What time is it?", &json!(steps)).await;
    let came: RefCell<BTreeMap<String, Duration>> = RefCell::default();
    let ended = |body: &EventBody| {
        if let EventBody::ToolEnded { call, .. } = body {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            came.borrow_mut().entry(call.clone()).or_insert(now);
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
        took.push(came.borrow()[call].saturating_sub(said));
    }
    ensure!(took.len() == SAID, "{} of {SAID} answers came", took.len());
    remove(host, &session.id).await?;
    Ok(took)
}

/// Everybody is given everything at once; each prompt must have run once. Answers KiB.
async fn crowd(host: &Host, sessions: usize, prompts: usize) -> Result<u64> {
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
    let most = most_memory(host.server()).context("the server has no memory")?;
    for session in &all {
        remove(host, session).await?;
    }
    Ok(most / 1024)
}

/// KiB for each.
async fn idle(sessions: usize) -> Result<u64> {
    let host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "100")]).await;
    let mut before = 0;
    for count in [FIRST, sessions] {
        let mut all = Vec::new();
        for _ in 0..count {
            all.push(waiting(&host).await?.id);
        }
        for session in &all {
            host.wait_for(session, SessionState::Idle).await;
        }
        if before == 0 {
            before = kept(&host)?;
        }
    }
    Ok(kept(&host)?.saturating_sub(before) / sessions as u64 / 1024)
}

fn kept(host: &Host) -> Result<u64> {
    private_memory(host.server()).context("the server keeps nothing for itself")
}
