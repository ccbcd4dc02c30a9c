//! Sandboxes of the warm pool: the agent starts before there is a session.

use std::fs;

use harvest_proto::{
    EventBody,
    bridge::*,
    event::{BootPhase, PhaseStatus},
};

use crate::{beside::Slow, harness::*};

/// The order to stand by on the disk of a build, and that of the session which comes later.
fn orders(boot: Boot) -> (Boot, Boot) {
    let agent = boot.agent.map(|agent| AgentLaunch { name: "scripted".parse().unwrap(), ..agent });
    let session = Boot { start: BootStart::Image, agent, env: Default::default(), ..boot };
    (Boot { standby: true, author: None, ..session.clone() }, session)
}

fn post(client: &mut Client, boot: &Boot) -> Result<Reply, Fault> {
    client.request(|id| ToSupervisor::Boot { id, boot: Box::new(boot.clone()) })
}

fn failure(client: &mut Client) -> String {
    let failed = client
        .event(|body| matches!(body, EventBody::BootPhase { status: PhaseStatus::Failed, .. }));
    let EventBody::BootPhase { failure: Some(failure), .. } = failed else { unreachable!() };
    assert!(failure.permanent, "{failure:?}");
    failure.message
}

#[test]
fn standby_does_nothing_for_sessions_before_assignment() {
    let (origin, boot) = Slow::built(&[]);
    let (standby, session) = orders(boot);
    let mut slow = Slow::boot(origin, standby.clone());
    slow.owner.phase(BootPhase::Agent, PhaseStatus::Done);
    // Repeated as after a lost connection.
    assert_eq!(post(&mut slow.owner, &standby), Ok(Reply::Done));
    let calls = fs::read_to_string(slow.sandbox.at("home/git-calls")).unwrap();
    assert!(!calls.contains("fetch"), "{calls}");
    let config = fs::read_to_string(slow.sandbox.at("home/.gitconfig")).unwrap();
    assert!(!config.contains("ada@example.org"), "{config}");
    let is_ready = |event: &OutboxEvent| {
        matches!(event.body, EventBody::BootPhase { phase: BootPhase::Ready, .. })
    };
    assert!(!slow.owner.events.iter().any(is_ready));

    // The session's server has stored nothing yet, and gets every event.
    let mut owner = slow.sandbox.owner(2, 0);
    owner.phase(BootPhase::Agent, PhaseStatus::Done);
    assert_eq!(post(&mut owner, &session), Ok(Reply::Done));
    owner.phase(BootPhase::Ready, PhaseStatus::Done);
    let config = fs::read_to_string(slow.sandbox.at("home/.gitconfig")).unwrap();
    assert!(config.contains("ada@example.org"), "{config}");
    wait_until("git fetches", || slow.sandbox.at("home/fetching").exists());
    slow.release();
    owner.event(|body| matches!(body, EventBody::Synced { .. }));
}

#[test]
fn standby_belongs_to_one_session() {
    let (origin, boot) = Slow::built(&[]);
    let (standby, session) = orders(boot);
    let mut slow = Slow::boot(origin, standby);
    slow.release();
    let other = Boot { session: harvest_proto::SessionId::random(), ..session.clone() };
    assert!(post(&mut slow.owner, &other).is_err());
    let eve = Author { name: "Eve".into(), email: "eve@example.org".into() };
    assert_eq!(post(&mut slow.owner, &session), Ok(Reply::Done));
    slow.owner.phase(BootPhase::Ready, PhaseStatus::Done);
    assert_eq!(post(&mut slow.owner, &Boot { author: Some(eve), ..session }), Ok(Reply::Done));
    let config = fs::read_to_string(slow.sandbox.at("home/.gitconfig")).unwrap();
    assert!(config.contains("ada@example.org") && !config.contains("eve"), "{config}");
}

#[test]
fn standby_that_would_start_otherwise_is_refused() {
    let (origin, boot) = Slow::built(&[(".mcp.json", r#"{"mcpServers": {}}"#)]);
    let mut slow = Slow::boot(origin, orders(boot).0);
    assert!(failure(&mut slow.owner).contains("before the sandbox belongs to a session"));

    let (origin, boot) = Slow::built(&[(".harvest/start.sh", "true\n")]);
    let mut slow = Slow::boot(origin, orders(boot).0);
    failure(&mut slow.owner);
}
