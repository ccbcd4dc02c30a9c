//! What befalls the machine's side of a session: whoever runs there is killed, stands still or talks nonsense,
//! and what people asked for is done once or said to be undone. The agent is the scripted one, for it is not
//! the point; most sessions have no repository, for a boot without one takes milliseconds.

mod between;
mod bridge;
mod clients;
mod frozen;
mod hostile;
mod kills;
mod storm;

use std::{fs, process::Command};

use harvest_e2e::{Follower, Host, eventually, processes_with};
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, PromptStatus, Session, SessionState},
    event::{SnapshotKind, TurnOutcome},
};
use serde_json::{Value, json};

use crate::turn_ended;

/// Numbers that look random and are the same in every run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// A session without a repository, at work on this.
async fn begin(host: &Host, script: &Value) -> SessionId {
    let body = json!({ "agent": "scripted", "network": "none", "prompt": format!("Begin.\nscript: {script}") });
    host.post("/v1/sessions", body).await["id"].as_str().unwrap().parse().unwrap()
}

/// kill, by number.
fn signal(pid: u32, which: &str) -> bool {
    Command::new("kill").args([which, &pid.to_string()]).status().unwrap().success()
}

/// Pid 1 of the session's sandbox, as the zygote wrote it down.
async fn supervisor(host: &Host, session: &SessionId) -> u32 {
    eventually("the sandbox to be on record", || supervisor_now(host, session)).await
}

/// The same, if it has one this moment.
async fn supervisor_now(host: &Host, session: &SessionId) -> Option<u32> {
    let sandbox = host.show(session).await.sandbox?;
    let state = host.home().join("sandboxes").join(sandbox.part()).join("state.json");
    let state: Value = serde_json::from_str(&fs::read_to_string(state).ok()?).ok()?;
    u32::try_from(state["pid"].as_u64()?).ok()
}

/// The zygote of this host, and none of the sandboxes it is about to make, which have its name still.
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

/// kill -9 to the zygote; answers whether there was one.
fn kill_zygote(host: &Host) -> bool {
    zygotes(host).into_iter().filter(|pid| signal(*pid, "-9")).count() > 0
}

/// A word that is on the command line of a process of the sandbox, and the process.
async fn lives(word: &str) -> u32 {
    eventually(&format!("a process with {word}"), || async {
        processes_with(word).first().copied()
    })
    .await
}

/// Waits until the session does nothing: it is idle, or paused with the loss of its machine or its place.
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

/// Waits until this prompt's turn is over, and says how it ended.
async fn outcome(follower: &mut Follower<'_>, prompt: &Prompt) -> TurnOutcome {
    let of = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id);
    match follower.until("its turn to end", of).await.body {
        EventBody::TurnEnded { outcome, .. } => outcome,
        other => panic!("{other:?}"),
    }
}

/// Every prompt that was begun is over and was told so once, with the outcome that its status says.
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
