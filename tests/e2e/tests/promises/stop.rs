//! Promise 5: all processes of a stopped turn are dead, and the session continues.

use harvest_e2e::Host;
use harvest_proto::{EventBody, event::TurnOutcome};
use serde_json::json;

use crate::{SAMPLE, completed, turn_ended};

#[tokio::test]
async fn stop_kills_all_turn_processes_before_next_prompt() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    // One child in the foreground and one that left its session and parent.
    let command = "setsid -f sh -c 'while :; do date +%s%N > /tmp/alive; sleep 0.1; done' >/dev/null 2>&1; \
                   for i in $(seq 600); do sleep 1; done";
    let session = host.session("calc", "Run for ever.", &json!([{ "bash": command }])).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("the tool to start", |body| matches!(body, EventBody::ToolStarted { .. })).await;
    harvest_e2e::eventually("the runaway to write", || async {
        host.exec(&session, "root", "cat /tmp/alive 2>/dev/null").await.1.trim().parse::<u64>().ok()
    })
    .await;

    host.post(&format!("/v1/sessions/{session}/stop"), json!({})).await;
    let end = follower.until("the turn to end", turn_ended).await;
    assert!(
        matches!(end.body, EventBody::TurnEnded { outcome: TurnOutcome::Stopped, .. }),
        "{:?}",
        end.body
    );
    let (_, left) = host
        .exec(
            &session,
            "root",
            "grep -l /tmp/alive /proc/[0-9]*/cmdline 2>/dev/null | grep -v /$$/ | grep -v self || true",
        )
        .await;
    let (_, first) = host.exec(&session, "root", "cat /tmp/alive; sleep 0.5; cat /tmp/alive").await;
    let stamps: Vec<&str> = first.lines().collect();
    assert_eq!(stamps[0], stamps[1], "something still writes; processes left: {left}");

    host.prompt(&session, "Go on.", &json!([{ "text": "still here" }])).await;
    follower.until("the next turn", completed).await;
}
