//! Promise 4: work is never lost, not even with the sandbox.

use harvest_e2e::{Host, eventually};
use harvest_proto::{
    EventBody,
    api::PromptStatus,
    event::{SnapshotKind, TurnOutcome},
};
use serde_json::json;

use crate::{SAMPLE, completed, turn_ended};

#[tokio::test]
async fn killed_sandbox_is_recovered_and_turn_interrupted_once() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([{ "bash": "echo precious > /workspace/calc/work" }, { "hang": 600 }]);
    let session = host.session("calc", "Work.", &script).await.id;
    let mut follower = host.follow(session.clone());
    follower
        .until("the file to be written", |body| matches!(body, EventBody::ToolEnded { .. }))
        .await;

    let sandbox = host.show(&session).await.sandbox.expect("the session has a sandbox");
    kill_supervisor(&host, sandbox.part()).await;

    let end = follower.until("the turn to end", turn_ended).await;
    assert!(
        matches!(end.body, EventBody::TurnEnded { outcome: TurnOutcome::Interrupted, .. }),
        "{:?}",
        end.body
    );
    follower
        .until("a recovered snapshot", |body| {
            matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Recovered, .. })
        })
        .await;

    host.prompt(
        &session,
        "Go on.",
        &json!([{ "bash": "cat /workspace/calc/work" }, { "text": "it is there" }]),
    )
    .await;
    follower.until("the next turn", completed).await;
    let (_, work) = host.exec(&session, "harvest", "cat /workspace/calc/work").await;
    assert_eq!(work, "precious\n");
    let prompts: serde_json::Value = host
        .get(&format!("/v1/sessions/{session}/prompts"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let status: PromptStatus =
        serde_json::from_value(prompts["items"][0]["status"].clone()).unwrap();
    assert_eq!(status, PromptStatus::Interrupted);
    assert_eq!(follower.seen.iter().filter(|event| turn_ended(&event.body)).count(), 2);
}

/// Kills pid 1 of a sandbox, found in the zygote's record.
async fn kill_supervisor(host: &Host, part: &str) {
    let state = host.home().join("sandboxes").join(part).join("state.json");
    let pid = eventually("the sandbox to be on record", || async {
        let state: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(&state).ok()?).ok()?;
        state.get("running").unwrap_or(&state)["pid"].as_u64()
    })
    .await;
    let killed =
        std::process::Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    assert!(killed.success());
}
