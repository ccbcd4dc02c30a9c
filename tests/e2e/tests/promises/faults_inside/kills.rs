//! kill -9 of the supervisor, the zygote and the agent.

use harvest_e2e::Host;
use harvest_proto::{
    EventBody,
    api::SessionState,
    event::{BootPhase, PhaseStatus, TurnOutcome},
};
use serde_json::json;

use super::{begin, kill_zygote, lives, outcome, recovered, signal, supervisor, told_once};
use crate::completed;

#[tokio::test]
async fn a_killed_supervisor_costs_its_turn_and_what_waited_goes_on_with_the_files() {
    let host = Host::start().await;
    let work = json!([{ "bash": "echo one > /workspace/work; exec sleep 98711.5" }]);
    let session = begin(&host, &work).await;
    let first = super::prompts(&host, &session).await.remove(0);
    let second = host
        .prompt(&session, "Go on.", &json!([{ "bash": "echo two >> /workspace/work" }, { "text": "ok" }]))
        .await;
    lives("98711.5").await;
    let epoch = host.show(&session).await.epoch;
    assert!(signal(supervisor(&host, &session).await, "-9"));
    let mut follower = host.follow(session.clone());
    assert_eq!(outcome(&mut follower, &first).await, TurnOutcome::Interrupted);
    follower.until("what it left to be kept", recovered).await;
    assert_eq!(outcome(&mut follower, &second).await, TurnOutcome::Completed);
    let idle = host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(idle.epoch, epoch + 1, "in one other sandbox");
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "one\ntwo\n");

    // Nothing waits, nothing runs: it is said why, and the next prompt finds everything.
    let before = host.show(&session).await.seq;
    host.exec(&session, "harvest", "echo three >> /workspace/work; sync").await;
    assert!(signal(supervisor(&host, &session).await, "-9"));
    let lost = host.wait_for(&session, SessionState::Paused).await;
    assert_eq!((&lost.reason[..], lost.sandbox), ("sandbox_lost", None));
    follower.after(before, "what it left to be kept", recovered).await;
    let third = host.prompt(&session, "Go on.", &json!([{ "history": true }])).await;
    assert_eq!(outcome(&mut follower, &third).await, TurnOutcome::Completed);
    assert!(follower.text().contains("I remember 2 earlier prompts."), "{}", follower.text());
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "one\ntwo\nthree\n");
    told_once(&host, &session).await;
}

#[tokio::test]
async fn sandboxes_turns_and_starts_go_on_when_the_zygote_is_killed() {
    let host = Host::start().await;
    let session = begin(&host, &json!([{ "bash": "exec sleep 98712.5" }])).await;
    let sleeper = lives("98712.5").await;
    let before = host.show(&session).await;
    // In the middle of a turn, which is kept afterwards: by the next zygote.
    assert!(kill_zygote(&host));
    signal(sleeper, "-15");
    let mut follower = host.follow(session.clone());
    follower.until("the turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    // While it is idle.
    assert!(kill_zygote(&host));
    let again = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    assert_eq!(outcome(&mut follower, &again).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    let now = host.show(&session).await;
    assert_eq!((now.sandbox, now.epoch), (before.sandbox, before.epoch), "it is the same sandbox");

    // At some moment of a start: before, during and after it.
    let mut started = Vec::new();
    for round in 0..6 {
        let next = begin(&host, &json!([{ "bash": "echo here > here" }, { "text": "ok" }])).await;
        tokio::time::sleep(std::time::Duration::from_millis(round * 4)).await;
        kill_zygote(&host);
        started.push(next);
    }
    for next in &started {
        host.follow(next.clone()).until("the turn", completed).await;
        told_once(&host, next).await;
    }

    // With the zygote dead, a supervisor that is killed is missed all the same.
    assert!(kill_zygote(&host));
    assert!(signal(supervisor(&host, &session).await, "-9"));
    assert_eq!(host.wait_for(&session, SessionState::Paused).await.reason, "sandbox_lost");
    told_once(&host, &session).await;
}

#[tokio::test]
async fn an_agent_that_cannot_start_is_told_with_its_last_words_and_an_earlier_turn_has_it_back() {
    let host = Host::start().await;
    let session = begin(&host, &json!([{ "text": "fine" }])).await;
    let mut follower = host.follow(session.clone());
    follower.until("the turn", completed).await;
    // What the scripted agent remembers lies here.
    let spoil = "rm -r ~/.harvest/scripted && echo no folder > ~/.harvest/scripted";
    let spoilt = host.prompt(&session, "Spoil.", &json!([{ "bash": spoil }, { "text": "spoilt" }])).await;
    assert_eq!(outcome(&mut follower, &spoilt).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    let waiting = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    let failed = host.wait_for(&session, SessionState::Failed).await;
    assert_eq!(failed.reason, "boot_failed");
    let boot = follower
        .until("the boot to fail", |body| {
            matches!(body, EventBody::BootPhase { phase: BootPhase::Agent, status: PhaseStatus::Failed, .. })
        })
        .await;
    assert!(
        matches!(&boot.body, EventBody::BootPhase { tail: Some(tail), .. } if tail.contains("cannot go on")),
        "{boot:?}"
    );
    let shown = host.harvest(["show", &session.to_string()]);
    assert!(shown.code == 0 && shown.stdout.contains("boot_failed"), "{shown:?}");

    let back = host.harvest(["restore", &format!("{session}@1")]);
    assert_eq!(back.code, 0, "{back:?}");
    host.post(&format!("/v1/sessions/{session}/resume"), json!({})).await;
    assert_eq!(outcome(&mut follower, &waiting).await, TurnOutcome::Completed);
    told_once(&host, &session).await;
}
