//! The real OpenCode, from the image `agents`, with the scripted model and without network.

use harvest_e2e::Host;
use harvest_proto::{
    EventBody,
    event::{SnapshotKind, ToolKind},
};
use serde_json::{Value, json};

use crate::{
    SAMPLE,
    agents::{last, remembered},
    completed,
};

async fn host() -> Host {
    Host::start_with(&[("HARVEST_IMAGE", "agents")]).await
}

#[tokio::test]
async fn opencode_remembers_across_pause_fork_and_takeover() {
    let host = host().await;
    host.repository("calc", SAMPLE).await;
    let script =
        json!([{ "bash": "for i in 1 2 3; do echo $i; sleep 0.3; done" }, { "text": "ok" }]);
    let session = host.session_of("opencode", "calc", "Count.", &script).await.id;
    let mut follower = host.follow(session.clone());
    follower
        .until("its version", |body| matches!(body, EventBody::AgentReady { version: Some(_), .. }))
        .await;
    let tool =
        follower.until("the tool", |body| matches!(body, EventBody::ToolStarted { .. })).await;
    assert!(
        matches!(&tool.body, EventBody::ToolStarted { kind: ToolKind::Execute, input, .. } if input["command"].is_string()),
        "{tool:?}"
    );
    follower.until("live output", |body| matches!(body, EventBody::ToolOutput { .. })).await;
    let saved = |body: &EventBody| {
        matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Turn, .. })
    };
    follower.until("the snapshot of turn 1", saved).await;

    assert_eq!(host.harvest(["pause", &session.to_string()]).code, 0);
    let (before, history) = (last(&follower), json!([{ "history": true }]));
    host.prompt(&session, "Remember?", &history).await;
    follower.after(before, "turn 2", completed).await;
    assert_eq!(remembered(&follower, before), 1);

    let fork = host.harvest(["fork", &format!("{session}@1"), "--json"]);
    let fork: Value = serde_json::from_str(&fork.stdout).unwrap_or_else(|_| panic!("{fork:?}"));
    let fork = fork["id"].as_str().unwrap().parse().unwrap();
    host.prompt(&fork, "And you?", &history).await;
    let mut forked = host.follow(fork);
    forked.until("the fork's turn", completed).await;
    assert_eq!(remembered(&forked, 0), 1);

    // Claude Code continues, and is told what was said.
    let before = last(&follower);
    let prompt = "Go on.\nscript: [{\"text\":\"taken over\"}]";
    let sent = host.harvest(["send", &session.to_string(), "-a", "claude", prompt]);
    assert_eq!(sent.code, 0, "{sent:?}");
    let notice = |body: &EventBody| matches!(body, EventBody::Warning { message } if message.contains("messages were put in front"));
    follower.after(before, "the notice", notice).await;
    follower.after(before, "the turn of the other agent", completed).await;
    assert!(follower.text().contains("taken over"));
    let refused =
        |event: &harvest_proto::Event| matches!(event.body, EventBody::EgressRefused { .. });
    assert!(!follower.seen.iter().any(refused), "{:?}", follower.seen);
}
