//! kill -9 of the supervisor, the zygote and the agent.

use std::time::Duration;

use harvest_e2e::Host;
use harvest_proto::{
    EventBody, StateReason,
    api::{PromptStatus, SessionState},
    event::{BootPhase, PhaseStatus, TurnOutcome},
};
use serde_json::json;

use super::{
    Dice, begin, kill_zygote, lives, outcome, recovered, rests, signal, supervisor, supervisor_now,
    told_once,
};
use crate::completed;

#[tokio::test]
async fn killed_supervisor_costs_one_turn_and_keeps_queue() {
    let host = Host::start().await;
    let work = json!([{ "bash": "echo one > /workspace/work; exec sleep 98711.5" }]);
    let session = begin(&host, &work).await;
    let first = super::prompts(&host, &session).await.remove(0);
    let second = host
        .prompt(
            &session,
            "Go on.",
            &json!([{ "bash": "echo two >> /workspace/work" }, { "text": "ok" }]),
        )
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

    // With an empty queue the session reports the loss, and the next prompt finds all files.
    let before = host.show(&session).await.seq;
    host.exec(&session, "harvest", "echo three >> /workspace/work; sync").await;
    assert!(signal(supervisor(&host, &session).await, "-9"));
    let lost = host.wait_for(&session, SessionState::Paused).await;
    assert_eq!((lost.reason, lost.sandbox), (StateReason::SandboxLost, None));
    follower.after(before, "what it left to be kept", recovered).await;
    let third = host.prompt(&session, "Go on.", &json!([{ "history": true }])).await;
    assert_eq!(outcome(&mut follower, &third).await, TurnOutcome::Completed);
    assert!(follower.text().contains("I remember 2 earlier prompts."), "{}", follower.text());
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "one\ntwo\nthree\n");
    told_once(&host, &session).await;
}

#[tokio::test]
async fn supervisor_kill_at_any_point_loses_no_file() {
    let host = Host::start().await;
    let session = begin(&host, &json!([{ "bash": "echo begun > /workspace/work" }])).await;
    let mut dice = Dice(13);
    let mut asked = Vec::new();
    for round in 0..10 {
        let script = json!([{ "bash": format!("echo {round} >> /workspace/work; sleep 0.1") }, { "text": "ok" }]);
        asked.push(host.prompt(&session, "Go on.", &script).await);
        // During boot, a turn, a snapshot or idle time.
        tokio::time::sleep(Duration::from_millis(dice.below(400))).await;
        if let Some(pid) = supervisor_now(&host, &session).await {
            signal(pid, "-9");
        }
    }
    // The breaker opens after three failed boots; a prompt closes it.
    asked.push(host.prompt(&session, "Go on.", &json!([{ "text": "here" }])).await);
    let mut follower = host.follow(session.clone());
    for prompt in &asked {
        outcome(&mut follower, prompt).await;
    }
    rests(&host, &session).await;
    told_once(&host, &session).await;
    let (_, work) = host.exec(&session, "harvest", "cat /workspace/work").await;
    for (round, prompt) in super::prompts(&host, &session).await[1..11].iter().enumerate() {
        let lines = work.lines().filter(|line| *line == round.to_string()).count();
        let done = prompt.status == PromptStatus::Completed;
        assert!(lines == 1 || (lines == 0 && !done), "{round} {prompt:?}: {work}");
    }
}

#[tokio::test]
async fn zygote_kill_interrupts_no_turn_or_start() {
    let host = Host::start().await;
    let session = begin(&host, &json!([{ "bash": "exec sleep 98712.5" }])).await;
    let sleeper = lives("98712.5").await;
    let before = host.show(&session).await;
    // During a turn, whose snapshot the next zygote takes.
    assert!(kill_zygote(&host));
    signal(sleeper, "-15");
    let mut follower = host.follow(session.clone());
    follower.until("the turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    // While the session is idle.
    assert!(kill_zygote(&host));
    let again = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    assert_eq!(outcome(&mut follower, &again).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    let now = host.show(&session).await;
    assert_eq!((now.sandbox, now.epoch), (before.sandbox, before.epoch), "it is the same sandbox");

    // Before, during and after a start.
    let mut started = Vec::new();
    for round in 0..6 {
        let next = begin(&host, &json!([{ "bash": "echo here > here" }, { "text": "ok" }])).await;
        tokio::time::sleep(Duration::from_millis(round * 4)).await;
        kill_zygote(&host);
        started.push(next);
    }
    for next in &started {
        host.follow(next.clone()).until("the turn", completed).await;
        told_once(&host, next).await;
    }

    // Without a zygote the death of a supervisor is noticed too.
    assert!(kill_zygote(&host));
    assert!(signal(supervisor(&host, &session).await, "-9"));
    assert_eq!(
        host.wait_for(&session, SessionState::Paused).await.reason,
        StateReason::SandboxLost
    );
    told_once(&host, &session).await;
}

#[tokio::test]
async fn broken_agent_is_reported_and_restore_repairs_it() {
    let host = Host::start().await;
    let session = begin(&host, &json!([{ "text": "fine" }])).await;
    let mut follower = host.follow(session.clone());
    follower.until("the turn", completed).await;
    // The scripted agent's memory file.
    let spoil = "rm -r ~/.harvest/scripted && echo no folder > ~/.harvest/scripted";
    let spoilt =
        host.prompt(&session, "Spoil.", &json!([{ "bash": spoil }, { "text": "spoilt" }])).await;
    assert_eq!(outcome(&mut follower, &spoilt).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    host.post(&format!("/v1/sessions/{session}/pause"), json!({})).await;
    let waiting = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    let failed = host.wait_for(&session, SessionState::Failed).await;
    assert_eq!(failed.reason, StateReason::BootFailed);
    let boot = follower
        .until("the boot to fail", |body| {
            matches!(
                body,
                EventBody::BootPhase { phase: BootPhase::Agent, status: PhaseStatus::Failed, .. }
            )
        })
        .await;
    assert!(
        matches!(&boot.body, EventBody::BootPhase { tail: Some(tail), .. } if tail.contains("the scripted agent failed")),
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
