//! A sandbox frozen from outside: every request on its session still works.

use std::fs;

use harvest_e2e::{Host, eventually, processes_with, unique};
use harvest_proto::{SessionId, api::SessionState, event::TurnOutcome};
use serde_json::json;

use super::{begin, lives, outcome, told_once};
use crate::freeze_pause_restore::{freezer, stands_still};

const SERVICE: &str = "98741.5";

/// An idle session with a background process, frozen through the cgroup that many levels above the
/// process; the highest level is the whole sandbox.
async fn freeze(host: &Host, session: &SessionId, service: &str, up: usize) {
    host.wait_for(session, SessionState::Idle).await;
    let pid = lives(service).await;
    let (file, word) = freezer(pid);
    let name = file.file_name().unwrap().to_owned();
    let group = file.ancestors().nth(1 + up).unwrap();
    fs::write(group.join(name), word).unwrap();
    eventually("it to stand still", || async { stands_still(pid).then_some(()) }).await;
}

#[tokio::test]
async fn externally_frozen_sandbox_can_be_paused_and_deleted() {
    let host = Host::start().await;
    let serve = format!(
        "echo kept >> /workspace/work; setsid -f sleep {SERVICE} >/dev/null 2>&1 </dev/null"
    );
    let serve = json!([{ "bash": serve }, { "text": "on" }]);
    let session = begin(&host, &serve).await;
    let mut follower = host.follow(session.clone());

    freeze(&host, &session, SERVICE, 0).await;
    host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    host.wait_for(&session, SessionState::Paused).await;
    let again = host.prompt(&session, "Go on.", &serve).await;
    assert_eq!(outcome(&mut follower, &again).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "kept\nkept\n");
    told_once(&host, &session).await;

    freeze(&host, &session, SERVICE, 0).await;
    let gone = host.harvest(["rm", "--yes", &session.to_string()]);
    assert_eq!(gone.code, 0, "{gone:?}");
    eventually("its service to be gone", || async {
        processes_with(SERVICE).is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn prompt_and_exec_thaw_externally_frozen_sandbox() {
    // All timeouts are longer than the test, so none of them can thaw the sandbox.
    let host = Host::start().await;
    let service = unique();
    let serve = format!("setsid -f sleep {service} >/dev/null 2>&1 </dev/null");
    let session = begin(&host, &json!([{ "bash": serve }, { "text": "on" }])).await;
    let mut follower = host.follow(session.clone());
    // The cgroup of commands or the agent, their parent, and the whole sandbox with its supervisor.
    for up in 0..3 {
        freeze(&host, &session, &service, up).await;
        assert_eq!(host.exec(&session, "harvest", "echo on").await.1, "on\n");
        freeze(&host, &session, &service, up).await;
        let work = json!([{ "bash": "echo work" }, { "text": "on" }]);
        let prompt = host.prompt(&session, "Go on.", &work).await;
        assert_eq!(outcome(&mut follower, &prompt).await, TurnOutcome::Completed);
    }
    assert_eq!(host.show(&session).await.epoch, 1, "in the same sandbox");
    told_once(&host, &session).await;
}
