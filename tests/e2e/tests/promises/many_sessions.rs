//! Many sessions: with many queued prompts on few slots, and idle.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use harvest_e2e::{Host, eventually, most_memory, private_memory};
use harvest_proto::{
    EventBody, SessionId,
    api::{Prompt, PromptStatus, SessionState},
};
use serde_json::{Value, json};

use crate::completed;

const SESSIONS: usize = 50;
const PROMPTS: usize = 20;

async fn prompts(host: &Host, session: &SessionId) -> Option<Vec<Prompt>> {
    let page = host.get(&format!("/v1/sessions/{session}/prompts")).send().await.ok()?;
    serde_json::from_value(page.json::<Value>().await.ok()?["items"].clone()).ok()
}

/// Creates a session and queues the rest of its prompts.
async fn ask(host: &Host, number: usize) -> SessionId {
    let script = |mark: usize| json!([{ "bash": format!("echo {number}.{mark} >> ~/ran") }]);
    let session = host.bare(&format!("{number}.0"), &script(0)).await.id;
    for mark in 1..PROMPTS {
        host.prompt(&session, &format!("{number}.{mark}"), &script(mark)).await;
    }
    session
}

#[tokio::test]
async fn fifty_busy_sessions_lose_and_repeat_no_prompt() {
    let host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "8")]).await;
    let sessions = join_all((0..SESSIONS).map(|number| ask(&host, number))).await;
    assert_eq!(sessions.iter().collect::<BTreeSet<_>>().len(), SESSIONS);
    for (number, session) in sessions.iter().enumerate() {
        let all = eventually("every prompt to be over", || async {
            let over = |one: &Prompt| {
                !matches!(one.status, PromptStatus::Queued | PromptStatus::Dispatched)
            };
            prompts(&host, session).await.filter(|all| all.iter().all(over))
        })
        .await;
        let marks: Vec<String> = (0..PROMPTS).map(|mark| format!("{number}.{mark}")).collect();
        let asked: Vec<&str> = all.iter().filter_map(|one| one.text.lines().next()).collect();
        assert_eq!(asked, marks);
        // Reads all events and asserts gapless sequence numbers.
        let events = host.events(session).await;
        let ends = events.iter().filter_map(|body| match body {
            EventBody::TurnEnded { prompt, .. } if completed(body) => Some(prompt),
            _ => None,
        });
        assert!(
            ends.eq(all.iter().map(|one| &one.id)),
            "each turn ended well, once and in its order"
        );
    }
    let memory = most_memory(host.server()).unwrap();
    println!("at most {} MB of memory", memory >> 20);
    assert!(memory < 150 << 20, "the server took {memory} bytes");
    // The files match the prompts, wherever the session's disk is now.
    for (number, session) in sessions.iter().enumerate().step_by(7) {
        let (_, ran) = host.exec(session, "harvest", "cat ~/ran").await;
        let marks = (0..PROMPTS).map(|mark| format!("{number}.{mark}\n"));
        assert_eq!(ran, marks.collect::<String>());
    }
}

/// Idle sessions with a running sandbox.
async fn lie_idle(host: &Host, count: usize) {
    let mut all = Vec::new();
    // One after another, so that connections are not part of the measurement.
    for _ in 0..count {
        let made =
            host.post("/v1/sessions", json!({ "agent": "scripted", "network": "none" })).await;
        all.push(serde_json::from_value::<SessionId>(made["id"].clone()).unwrap());
    }
    for session in &all {
        host.wait_for(session, SessionState::Idle).await;
    }
}

#[tokio::test]
async fn idle_session_costs_little_server_memory() {
    const MORE: usize = 24;
    let host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "40")]).await;
    // The first few pay for memory that all share.
    lie_idle(&host, 8).await;
    let before = private_memory(host.server()).unwrap();
    lie_idle(&host, MORE).await;
    let each = private_memory(host.server()).unwrap().saturating_sub(before) / MORE as u64;
    println!("{} KiB each", each >> 10);
    // A release build needs at most 50 KiB, which the bench checks.
    assert!(each < 80 << 10, "each takes {each} bytes");
}
