//! The rows of agents: the real programs from the image `agents`, in sessions and alone on the
//! host. A stand-in for the model services answers at once, so that only the rest is measured.

mod alone;
mod model;

use std::{
    cell::Cell,
    fs,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use harvest_e2e::{Follower, Host, eventually};
use harvest_proto::{
    EventBody, SessionId,
    api::{Session, SessionState},
    event::{BootPhase, PhaseStatus},
};
use serde_json::{Value, json};

use self::{
    alone::Alone,
    model::{CALL, MODEL, Model},
};
use crate::{options::Options, report::Report, runner::Samples};

/// An agent and its rows.
struct Agent {
    name: &'static str,
    /// A new session without a prompt, until the agent has started.
    ready: &'static str,
    /// From sending a prompt until the client has the event of the first tool.
    tool: &'static str,
    /// The same for the agent's own program on the host, with its own protocol.
    alone: &'static str,
    /// From the first byte of an answer of the model until the client has its text.
    text: &'static str,
}

const AGENTS: [Agent; 3] = [
    Agent {
        name: "claude",
        ready: "agent: POST → ready, claude",
        tool: "agent: prompt → first tool, claude",
        alone: "agent: prompt → first tool, claude on the host",
        text: "agent: model's first byte → client event, claude",
    },
    Agent {
        name: "opencode",
        ready: "agent: POST → ready, opencode",
        tool: "agent: prompt → first tool, opencode",
        alone: "agent: prompt → first tool, opencode on the host",
        text: "agent: model's first byte → client event, opencode",
    },
    Agent {
        name: "codex",
        ready: "agent: POST → ready, codex",
        tool: "agent: prompt → first tool, codex",
        alone: "agent: prompt → first tool, codex on the host",
        text: "agent: model's first byte → client event, codex",
    },
];

/// The same start of Claude Code as above, on a repository: with its build only, and with a sandbox
/// that waits in the warm pool.
const FROM_BUILD: &str = "agent: POST → ready, claude from a build";
const FROM_POOL: &str = "agent: POST → ready, claude from the warm pool";

const FILES: &[(&str, &str)] = &[("README.md", "A sample.\n"), (".harvest/check.sh", "true\n")];

const STREAMS_ROW: &str = "agent: 50 model streams of 4 s at once";
const STREAMS: usize = 50;
const CHUNKS: usize = 100;
const CHUNK_DELAY: Duration = Duration::from_millis(40);
// The prompts of all sessions are sent within this time.
const STREAMS_BEGIN: Duration = Duration::from_secs(5);

/// Targets for p50, in milliseconds.
pub(crate) const LIMITS: [(&str, f64); 8] = [
    (FROM_BUILD, 1000.0),
    (FROM_POOL, 50.0),
    (AGENTS[0].ready, 700.0),
    (AGENTS[1].ready, 4000.0),
    (AGENTS[2].ready, 400.0),
    (AGENTS[0].text, 15.0),
    (AGENTS[1].text, 15.0),
    (AGENTS[2].text, 15.0),
];

/// Targets for p50 in a session, as a multiple of that on the host.
pub(crate) const TARGETS: [(&str, &[&str], f64); 3] = [
    (AGENTS[0].tool, &[AGENTS[0].alone], 1.3),
    (AGENTS[1].tool, &[AGENTS[1].alone], 1.3),
    (AGENTS[2].tool, &[AGENTS[2].alone], 1.3),
];

/// Whether a row belongs to this group.
pub(crate) fn is_row(name: &str) -> bool {
    name.starts_with("agent: ")
}

/// Measures the rows and adds them to the report. The folder must not exist.
pub(crate) fn run(folder: &Path, options: &Options, report: &mut Report) -> Result<()> {
    // OpenCode needs seconds to start.
    let rounds = options.rounds.div_ceil(5);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let model = Model::start().await?;
        let openai = format!("{}/v1", model.url);
        let host = Host::start_with(&[
            ("HARVEST_IMAGE", "agents"),
            ("HARVEST_LIMITS_SANDBOXES", "100"),
            ("ANTHROPIC_API_KEY", "sk-bench"),
            ("OPENAI_API_KEY", "sk-bench"),
            ("HARVEST_UPSTREAMS_ANTHROPIC_URL", &model.url),
            ("HARVEST_UPSTREAMS_OPENAI_URL", &openai),
        ])
        .await;
        report.add(starts(&host, options.gap, rounds).await?);
        host.repository("sample", FILES).await;
        let prepared = |row| PreparedStart { row, repository: "sample", model: MODEL };
        let prepared = [(prepared(FROM_BUILD), false), (prepared(FROM_POOL), true)];
        report.add(prepared_starts(&host, &prepared, (options.gap, rounds)).await?);
        for agent in &AGENTS {
            report.add(turns(&host, &model, agent, folder, (options.gap, rounds)).await?);
        }
        let streams = if options.quick { 5 } else { STREAMS };
        report.add(vec![Samples {
            row: STREAMS_ROW,
            taken: vec![all_at_once(&host, streams).await?],
        }]);
        Ok(())
    })
}

async fn create(host: &Host, agent: &str, model: &str) -> Result<SessionId> {
    let body = json!({ "agent": agent, "model": model, "network": "none" });
    let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await)?;
    Ok(session.id)
}

async fn remove(host: &Host, session: &SessionId) -> Result<()> {
    let asked = host.request("DELETE".parse()?, &format!("/v1/sessions/{session}"));
    asked.send().await?.error_for_status()?;
    Ok(())
}

async fn starts(host: &Host, gap: Duration, rounds: usize) -> Result<Vec<Samples>> {
    let mut all = AGENTS.map(|agent| Samples { row: agent.ready, taken: Vec::new() });
    // The first start of each reads its program from the disk.
    for round in 0..=rounds {
        for (agent, samples) in AGENTS.iter().zip(&mut all) {
            tokio::time::sleep(gap).await;
            let began = Instant::now();
            let session = create(host, agent.name, MODEL).await?;
            host.follow(session.clone()).until(agent.ready, is_ready).await;
            if round > 0 {
                samples.taken.push(began.elapsed());
            }
            host.wait_for(&session, SessionState::Idle).await;
            remove(host, &session).await?;
        }
    }
    Ok(all.into())
}

/// A start of Claude Code on a repository that is built.
pub(crate) struct PreparedStart {
    pub(crate) row: &'static str,
    pub(crate) repository: &'static str,
    pub(crate) model: &'static str,
}

/// Measures these starts in turn; each from the warm pool, or else from the build.
pub(crate) async fn prepared_starts(
    host: &Host,
    starts: &[(PreparedStart, bool)],
    (gap, rounds): (Duration, usize),
) -> Result<Vec<Samples>> {
    let empty = |(start, _): &(PreparedStart, bool)| Samples { row: start.row, taken: Vec::new() };
    let mut all: Vec<Samples> = starts.iter().map(empty).collect();
    for round in 0..=rounds {
        for ((start, from_pool), samples) in starts.iter().zip(&mut all) {
            let PreparedStart { row, repository, model } = *start;
            let body = json!({ "repository": repository, "agent": "claude", "model": model });
            if *from_pool {
                host.post("/v1/warm", body.clone()).await;
                eventually("the waiting sandbox", || async {
                    let pool = host.get("/v1/warm").send().await.ok()?;
                    let pool: Value = pool.json().await.ok()?;
                    (pool["items"][0]["status"] == "ready").then_some(())
                })
                .await;
            }
            tokio::time::sleep(gap).await;
            let began = Instant::now();
            let session: Session = serde_json::from_value(host.post("/v1/sessions", body).await)?;
            host.follow(session.id.clone()).until(row, is_ready).await;
            if round > 0 {
                samples.taken.push(began.elapsed());
            }
            host.wait_for(&session.id, SessionState::Idle).await;
            remove(host, &session.id).await?;
        }
    }
    Ok(all)
}

fn is_ready(body: &EventBody) -> bool {
    matches!(body, EventBody::BootPhase { phase: BootPhase::Ready, status: PhaseStatus::Done, .. })
}

/// Turns of one session, and of the same program on the host, in turn.
async fn turns(
    host: &Host,
    model: &Model,
    agent: &Agent,
    folder: &Path,
    (gap, rounds): (Duration, usize),
) -> Result<Vec<Samples>> {
    let session = create(host, agent.name, MODEL).await?;
    host.wait_for(&session, SessionState::Idle).await;
    fetch(host, &session, agent.name, folder)?;
    let mut alone = tokio::task::block_in_place(|| Alone::start(agent.name, folder, &model.url))?;
    let mut follower = host.follow(session.clone());
    let mut all =
        [agent.tool, agent.alone, agent.text].map(|row| Samples { row, taken: Vec::new() });
    let is_tool = |body: &EventBody| matches!(body, EventBody::ToolStarted { .. });
    let is_text = |body: &EventBody| matches!(body, EventBody::TextDelta { .. });
    for round in 0..rounds + 2 {
        tokio::time::sleep(gap).await;
        let (sent, tool) = turn(&mut follower, host, &session, CALL, is_tool).await?;
        tokio::time::sleep(gap).await;
        let on_host = tokio::task::block_in_place(|| alone.first_tool(CALL))?;
        tokio::time::sleep(gap).await;
        let (_, text) = turn(&mut follower, host, &session, "Say it.", is_text).await?;
        let said = model.first_byte().context("the model was not asked")?;
        if round >= 2 {
            let taken = [tool - sent, on_host, text.saturating_duration_since(said)];
            for (samples, took) in all.iter_mut().zip(taken) {
                samples.taken.push(took);
            }
        }
    }
    drop(alone);
    fs::remove_dir_all(folder).context("cannot remove the programs of the agents")?;
    remove(host, &session).await?;
    Ok(all.into())
}

/// Runs a turn to its end. Returns when its prompt was sent and when the first wanted event came.
async fn turn(
    follower: &mut Follower<'_>,
    host: &Host,
    session: &SessionId,
    text: &str,
    wanted: impl Fn(&EventBody) -> bool,
) -> Result<(Instant, Instant)> {
    let before = host.wait_for(session, SessionState::Idle).await.seq;
    let came = Cell::new(None);
    let ended = |body: &EventBody| {
        if came.get().is_none() && wanted(body) {
            came.set(Some(Instant::now()));
        }
        matches!(body, EventBody::TurnEnded { .. })
    };
    let path = format!("/v1/sessions/{session}/prompts");
    let sent = Instant::now();
    tokio::join!(
        host.post(&path, json!({ "text": text })),
        follower.after(before, "the end of the turn", ended)
    );
    let events = follower.seen.iter().filter(|event| event.seq > before);
    let came = came.get();
    let came = came.with_context(|| format!("missing in {:?}", events.collect::<Vec<_>>()))?;
    Ok((sent, came))
}

/// Copies the agent's program, and what it would install at its first start, out of the image.
fn fetch(host: &Host, session: &SessionId, agent: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("home/.config"))?;
    fs::create_dir(folder.join("work"))?;
    let mut paths = vec![(format!("/usr/local/bin/{agent}"), folder.join("agent"))];
    if agent == "opencode" {
        let config = "/home/harvest/.config/opencode".to_owned();
        paths.push((config, folder.join("home/.config/opencode")));
    }
    for (inside, outside) in paths {
        let outside = outside.display().to_string();
        let copied = host.harvest(["cp", "-r", &format!("{session}:{inside}"), &outside]);
        ensure!(copied.code == 0, "cannot copy {inside}: {}", copied.stderr);
    }
    Ok(())
}

/// As many sessions read a stream of the scripted model at the same time; each must get all of it.
/// Returns the time until the last stream has ended.
async fn all_at_once(host: &Host, count: usize) -> Result<Duration> {
    let text: String = (1..=CHUNKS).map(|number| format!("{number} ")).collect();
    let delay = u64::try_from(CHUNK_DELAY.as_millis())?;
    let script = json!([{ "text": text, "chunks": CHUNKS, "delay_ms": delay }]);
    let message = json!({ "role": "user", "content": format!("script: {script}") });
    // Requests without tools are taken for titles.
    let request = json!({
        "model": "scripted", "stream": true, "max_tokens": 1000, "messages": [message],
        "tools": [{ "name": "none", "input_schema": {} }],
    });
    let mut sessions = Vec::new();
    for _ in 0..count {
        sessions.push(create(host, "scripted", "scripted").await?);
    }
    for session in &sessions {
        host.wait_for(session, SessionState::Idle).await;
    }
    let begin = SystemTime::now().duration_since(UNIX_EPOCH)? + STREAMS_BEGIN;
    let command = format!(
        "until [ $(date +%s%3N) -ge {} ]; do sleep 0.02; done; \
         curl -sN -H 'content-type: application/json' -d '{request}' \
         http://model.harvest.internal/scripted/v1/messages \
         | sed -n 's/^data: //p' | jq -rj '.delta.text // empty'",
        begin.as_millis()
    );
    for session in &sessions {
        host.prompt(session, "Read it.", &json!([{ "bash": command }])).await;
    }
    let prompted = SystemTime::now().duration_since(UNIX_EPOCH)?;
    ensure!(prompted < begin, "the streams did not begin at the same time");
    let mut last = Duration::ZERO;
    for session in &sessions {
        let ended = |body: &EventBody| matches!(body, EventBody::ToolEnded { .. });
        let event = host.follow(session.clone()).until("the stream", ended).await;
        let EventBody::ToolEnded { output, .. } = &event.body else { continue };
        ensure!(output.trim_end() == text.trim_end(), "a stream is incomplete: {output}");
        let at = Duration::from_millis(u64::try_from(event.at.as_millis())?);
        last = last.max(at.saturating_sub(begin));
        remove(host, session).await?;
    }
    Ok(last)
}

/// A text in an object, or an empty one.
fn text<'a>(of: &'a Value, name: &str) -> &'a str {
    of[name].as_str().unwrap_or_default()
}
