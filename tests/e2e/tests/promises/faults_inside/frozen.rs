//! A sandbox that somebody has frozen by hand: whatever is asked of its session is done.

use std::fs;

use harvest_e2e::{Host, eventually, processes_with};
use harvest_proto::{SessionId, api::SessionState, event::TurnOutcome};
use serde_json::json;

use super::{begin, lives, outcome, told_once};
use crate::rests::{freezer, stands_still};

const SERVICE: &str = "98741.5";

/// An idle session with a service in it, which stands still by somebody else's hand.
async fn freeze(host: &Host, session: &SessionId) {
    host.wait_for(session, SessionState::Idle).await;
    let pid = lives(SERVICE).await;
    let (file, word) = freezer(pid);
    fs::write(file, word).unwrap();
    eventually("it to stand still", || async { stands_still(pid).then_some(()) }).await;
}

#[tokio::test]
async fn an_idle_sandbox_frozen_by_hand_can_be_stopped_paused_and_deleted_and_keeps_its_files() {
    let host = Host::start_with(&[("HARVEST_CLOCKS_STOP", "1s")]).await;
    let serve = format!("echo kept >> /workspace/work; setsid -f sleep {SERVICE} >/dev/null 2>&1 </dev/null");
    let serve = json!([{ "bash": serve }, { "text": "on" }]);
    let session = begin(&host, &serve).await;
    let mut follower = host.follow(session.clone());

    // A prompt gets nowhere, and is stopped.
    freeze(&host, &session).await;
    let stuck = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    host.wait_for(&session, SessionState::Running).await;
    host.post(&format!("/v1/sessions/{session}/stop"), json!({})).await;
    assert_eq!(outcome(&mut follower, &stuck).await, TurnOutcome::Stopped);
    let again = host.prompt(&session, "Go on.", &serve).await;
    assert_eq!(outcome(&mut follower, &again).await, TurnOutcome::Completed);

    freeze(&host, &session).await;
    host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    host.wait_for(&session, SessionState::Paused).await;
    let again = host.prompt(&session, "Go on.", &serve).await;
    assert_eq!(outcome(&mut follower, &again).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "kept\nkept\nkept\n");
    told_once(&host, &session).await;

    freeze(&host, &session).await;
    let gone = host.harvest(["rm", &session.to_string()]);
    assert_eq!(gone.code, 0, "{gone:?}");
    eventually("its service to be gone", || async { processes_with(SERVICE).is_empty().then_some(()) }).await;
}
