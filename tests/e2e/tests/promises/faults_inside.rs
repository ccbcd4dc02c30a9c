//! Faults inside sandboxes: processes are killed, frozen or send garbage, and every prompt still
//! runs once or is reported interrupted. The tests use the scripted agent, mostly without a
//! repository, because such a session boots in milliseconds.

mod bridge;
mod bridge_proxy;
mod clients;
mod frozen;
mod hostile;
mod kills;
mod storm;
mod terminate;

use std::{fs, process::Command};

use harvest_e2e::{Follower, Host, eventually, processes_with};
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, PromptStatus, Session, SessionState},
    event::{SnapshotKind, TurnOutcome},
};
use serde_json::{Value, json};

use crate::turn_ended;

/// A pseudo-random generator with a fixed seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Starts a session without a repository on this script.
async fn begin(host: &Host, script: &Value) -> SessionId {
    let body = json!({ "agent": "scripted", "network": "none", "prompt": format!("Begin.\nscript: {script}") });
    host.post("/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap()
}

/// Sends a signal by number.
pub(crate) fn signal(pid: u32, which: &str) -> bool {
    Command::new("kill").args([which, &pid.to_string()]).status().unwrap().success()
}

/// Pid 1 of the session's sandbox, from the zygote's record.
pub(crate) async fn supervisor(host: &Host, session: &SessionId) -> u32 {
    eventually("the sandbox to be on record", || supervisor_now(host, session)).await
}

/// Pid 1 of the session's sandbox, if it has one now.
async fn supervisor_now(host: &Host, session: &SessionId) -> Option<u32> {
    let sandbox = host.show(session).await.sandbox?;
    let state = host.home().join("sandboxes").join(sandbox.part()).join("state.json");
    let state: Value = serde_json::from_str(&fs::read_to_string(state).ok()?).ok()?;
    u32::try_from(state["pid"].as_u64()?).ok()
}

/// The zygote of this host, not the children it is forking, which still have its name.
fn zygotes(host: &Host) -> Vec<u32> {
    let home = host.home().canonicalize().unwrap();
    let namespace = |pid: &dyn std::fmt::Display| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let named = |pid: &u32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).nth(1) == Some(b"zygote")
    };
    let ours = processes_with(home.to_str().unwrap()).into_iter();
    ours.filter(|pid| named(pid) && namespace(pid) == namespace(&"self")).collect()
}

/// Kills the zygote; returns whether there was one.
fn kill_zygote(host: &Host) -> bool {
    zygotes(host).into_iter().filter(|pid| signal(*pid, "-9")).count() > 0
}

/// A unique argument and a sandbox process that has it on its command line.
async fn lives(word: &str) -> u32 {
    eventually(&format!("a process with {word}"), || async {
        processes_with(word).first().copied()
    })
    .await
}

/// Waits until the session is idle, or paused because it lost its sandbox or slot.
async fn rests(host: &Host, session: &SessionId) -> Session {
    eventually(&format!("{session} to rest"), || async {
        let now = host.show(session).await;
        matches!(now.state, SessionState::Idle | SessionState::Paused).then_some(now)
    })
    .await
}

fn recovered(body: &EventBody) -> bool {
    matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Recovered, .. })
}

async fn prompts(host: &Host, session: &SessionId) -> Vec<Prompt> {
    let listed: Value = host
        .get(&format!("/v1/sessions/{session}/prompts"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    serde_json::from_value(listed["items"].clone()).unwrap()
}

/// Waits for the end of this prompt's turn and returns its outcome.
async fn outcome(follower: &mut Follower<'_>, prompt: &Prompt) -> TurnOutcome {
    let of = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id);
    match follower.until("its turn to end", of).await.body {
        EventBody::TurnEnded { outcome, .. } => outcome,
        other => panic!("{other:?}"),
    }
}

/// Every started prompt has exactly one end event, with the outcome that its status shows.
async fn told_once(host: &Host, session: &SessionId) {
    let events = host.events(session).await;
    for prompt in prompts(host, session).await {
        let of = |body: &&EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id);
        let ends: Vec<&EventBody> =
            events.iter().filter(|body| turn_ended(body)).filter(of).collect();
        let wanted = match prompt.status {
            PromptStatus::Completed => Some(TurnOutcome::Completed),
            PromptStatus::Failed => Some(TurnOutcome::Failed),
            PromptStatus::Stopped => Some(TurnOutcome::Stopped),
            PromptStatus::Interrupted => Some(TurnOutcome::Interrupted),
            PromptStatus::Cancelled => None,
            PromptStatus::Queued | PromptStatus::Dispatched => {
                panic!("{prompt:?} is not over: {events:#?}")
            }
        };
        let told: Vec<TurnOutcome> = ends
            .iter()
            .filter_map(|body| match body {
                EventBody::TurnEnded { outcome, .. } => Some(*outcome),
                _ => None,
            })
            .collect();
        assert_eq!(told, Vec::from_iter(wanted), "{prompt:?}: {events:#?}");
    }
}
