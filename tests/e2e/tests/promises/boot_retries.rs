//! An agent that dies while its session boots costs one attempt, not the session.

use harvest_e2e::Host;
use harvest_proto::{
    EventBody,
    event::{BootPhase, PhaseStatus},
};
use serde_json::json;

use crate::{SAMPLE, completed};

/// Kills the first agent of this repository as soon as its process exists. The state volume
/// remembers it across sandboxes; builds have none.
const START: &str = r#"#!/bin/sh
mkdir /mnt/state/killed 2> /dev/null || exit 0
setsid python3 - > /dev/null 2>&1 <<'END' &
import os
while True:
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            argv = open(f'/proc/{pid}/cmdline', 'rb').read().split(b'\0')
            if b'scripted-agent' in argv or argv[0].endswith(b'claude'):
                os.kill(int(pid), 9)
                os._exit(0)
        except OSError:
            pass
END
"#;

/// The agent is killed once during the boot; returns the events up to the end of the turn.
async fn events_after_kill(agent: &str) -> Vec<EventBody> {
    let host = Host::start().await;
    let files = [SAMPLE, &[(".harvest/start.sh", START)]].concat();
    host.repository("calc", &files).await;
    let script = json!([{ "bash": "echo alive" }, { "text": "done" }]);
    let session = host.session_of(agent, "calc", "Begin.", &script).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    host.events(&session).await
}

fn agent_phase_failed(body: &EventBody) -> bool {
    let (agent, failed) = (BootPhase::Agent, PhaseStatus::Failed);
    matches!(body, EventBody::BootPhase { phase, status, .. } if (*phase, *status) == (agent, failed))
}

#[tokio::test]
async fn claude_killed_during_boot_costs_one_attempt() {
    let events = events_after_kill("claude").await;
    assert_eq!(events.iter().filter(|body| agent_phase_failed(body)).count(), 1, "{events:?}");
}

// The scripted agent is ready within milliseconds, so it may die just after the boot.
#[tokio::test]
async fn scripted_agent_killed_during_boot_is_restarted() {
    let events = events_after_kill("scripted").await;
    let died = |body: &&EventBody| {
        agent_phase_failed(body) || matches!(body, EventBody::AgentExited { .. })
    };
    assert_eq!(events.iter().filter(died).count(), 1, "{events:?}");
}
