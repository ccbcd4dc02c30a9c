//! Freezing, waiting for a slot, restoring a turn and terminating, with real sandboxes.

use std::{fs, path::PathBuf};

use harvest_e2e::{Host, eventually, processes_with, unique};
use harvest_proto::{
    EventBody, SessionId, StateReason,
    api::{Session, SessionState},
    event::{SnapshotKind, TurnOutcome},
};
use reqwest::Method;
use serde_json::json;

use crate::{SAMPLE, completed, turn_ended};

/// The freezer file of a process's cgroup and the text that freezes it.
pub(crate) fn freezer(pid: u32) -> (PathBuf, &'static str) {
    let groups = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    for line in groups.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) =
            (parts.next().unwrap(), parts.next().unwrap().trim_start_matches('/'));
        if controllers.split(',').any(|name| name == "freezer") {
            return (
                PathBuf::from("/sys/fs/cgroup/freezer").join(path).join("freezer.state"),
                "FROZEN",
            );
        }
    }
    let path =
        groups.lines().find_map(|line| line.strip_prefix("0::/")).expect("a process has a cgroup");
    (PathBuf::from("/sys/fs/cgroup").join(path).join("cgroup.freeze"), "1")
}

/// Whether a process is frozen, through its own cgroup or one above it.
pub(crate) fn stands_still(pid: u32) -> bool {
    let (file, word) = freezer(pid);
    match word {
        "FROZEN" => fs::read_to_string(file).is_ok_and(|state| state.trim() == word),
        _ => fs::read_to_string(file.with_file_name("cgroup.events"))
            .is_ok_and(|events| events.contains("frozen 1")),
    }
}

pub(crate) fn frozen(body: &EventBody) -> bool {
    matches!(body, EventBody::StateChanged { state: SessionState::Idle, reason, .. } if *reason == StateReason::Frozen)
}

/// A unique argument of a process that keeps running after its turn.
async fn lives(word: &str) -> u32 {
    eventually("the service to run", || async { processes_with(word).first().copied() }).await
}

#[tokio::test]
async fn idle_session_freezes_and_thaws_on_demand() {
    let mut host = Host::start_with(&[("HARVEST_CLOCKS_IDLE_FREEZE", "300ms")]).await;
    host.repository("calc", SAMPLE).await;
    let word = unique();
    let service = format!("setsid -f sleep {word} >/dev/null 2>&1 </dev/null");
    let session =
        host.session("calc", "Serve.", &json!([{ "bash": service }, { "text": "on" }])).await.id;
    let mut follower = host.follow(session.clone());
    let still = follower.until("it to stand still", frozen).await;
    let pid = lives(&word).await;
    eventually("the service to stand still", || async { stands_still(pid).then_some(()) }).await;
    assert_eq!(host.show(&session).await.state, SessionState::Idle);

    let (_, said) = host.exec(&session, "harvest", "echo awake").await;
    assert_eq!(said, "awake\n");
    let again = follower.after(still.seq, "it to stand still again", frozen).await;
    host.prompt(
        &session,
        "Go on.",
        &json!([{ "bash": "echo done > /tmp/done" }, { "text": "ok" }]),
    )
    .await;
    let end = follower.after(again.seq, "the turn to end", turn_ended).await;
    assert!(completed(&end.body), "{:?}", end.body);

    // The next server knows of the freeze and thaws.
    let again = follower.after(end.seq, "it to stand still once more", frozen).await.seq;
    let epoch = host.show(&session).await.epoch;
    host.kill();
    host.up().await;
    host.prompt(&session, "Go on.", &json!([{ "bash": "cat /tmp/done" }, { "text": "ok" }])).await;
    let mut follower = host.follow(session.clone());
    let end = follower.after(again, "the turn to end", turn_ended).await;
    assert!(completed(&end.body), "{:?}", end.body);
    assert_eq!(host.show(&session).await.epoch, epoch, "in the same sandbox");
    assert_eq!(lives(&word).await, pid, "and the service lives");
}

#[tokio::test]
async fn detached_command_outlives_server_and_delays_freeze() {
    let mut host = Host::start_with(&[("HARVEST_CLOCKS_IDLE_FREEZE", "300ms")]).await;
    let session = host.bare("Begin.", &json!([{ "text": "ready" }])).await.id;
    let mut follower = host.follow(session.clone());
    follower.until("it to stand still", frozen).await;
    let word = unique();
    // Several times the freeze timeout of an idle session.
    let script = "echo on; for n in 1 2 3 4; do sleep 0.5; done; echo $0 > ~/went";
    let body = json!({ "argv": ["sh", "-c", script, word], "detach": true });
    let ask = host.request(Method::POST, &format!("/v1/sessions/{session}/exec")).json(&body);
    let mut answer = ask.send().await.unwrap();
    assert!(answer.chunk().await.unwrap().is_some(), "it has begun");
    drop(answer);
    host.kill();
    host.up().await;
    eventually("it to end", || async { processes_with(&word).is_empty().then_some(()) }).await;
    // The file exists only if the command was neither killed nor frozen.
    let told = host.exec(&session, "harvest", "cat ~/went").await.1;
    assert_eq!(told.trim_end(), word);
    let seq = host.show(&session).await.seq;
    host.follow(session.clone()).after(seq, "it to stand still again", frozen).await;
}

#[tokio::test]
async fn externally_frozen_turn_can_be_stopped_and_saved() {
    let host = Host::start_with(&[("HARVEST_CLOCKS_STOP", "1s")]).await;
    host.repository("calc", SAMPLE).await;
    let word = unique();
    let script =
        json!([{ "bash": format!("echo precious > /workspace/calc/work; exec sleep {word}") }]);
    let session = host.session("calc", "Work.", &script).await.id;
    let pid = lives(&word).await;
    let (file, word) = freezer(pid);
    fs::write(&file, word).unwrap();
    eventually("it to stand still", || async { stands_still(pid).then_some(()) }).await;
    host.post(&format!("/v1/sessions/{session}/stop"), json!({})).await;
    let mut follower = host.follow(session.clone());
    let end = follower.until("the turn to end", turn_ended).await;
    assert!(
        matches!(end.body, EventBody::TurnEnded { outcome: TurnOutcome::Stopped, .. }),
        "{:?}",
        end.body
    );
    host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    follower.until("the next turn", completed).await;
    let (_, work) = host.exec(&session, "harvest", "cat /workspace/calc/work").await;
    assert_eq!(work, "precious\n");
}

async fn with_sandbox(host: &Host, sessions: &[SessionId]) -> usize {
    let mut count = 0;
    for session in sessions {
        count += usize::from(host.show(session).await.sandbox.is_some());
    }
    count
}

#[tokio::test]
async fn six_sessions_share_two_slots_across_restart() {
    let mut host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "2")]).await;
    host.repository("calc", SAMPLE).await;
    let script =
        json!([{ "bash": "sleep 1; echo once >> /workspace/calc/ran" }, { "text": "done" }]);
    let mut sessions = Vec::new();
    for number in 0..6 {
        let body = json!({
            "repository": "calc", "agent": "scripted", "network": "none",
            "prompt": format!("Work {number}.\nscript: {script}"),
        });
        let session: Session =
            serde_json::from_value(host.post("/v1/sessions", body).await).unwrap();
        sessions.push(session.id);
    }
    let last = eventually("the last to stand in line", || async {
        let last = host.show(&sessions[5]).await;
        last.position.map(|position| (position, last.state, last.reason))
    })
    .await;
    assert!(
        last.0 >= 1 && (last.1, last.2) == (SessionState::Queued, StateReason::LimitSandboxes),
        "{last:?}"
    );
    assert!(with_sandbox(&host, &sessions).await <= 2);
    host.kill();
    host.up().await;
    for session in &sessions {
        let mut follower = host.follow(session.clone());
        let end = follower.until("its turn to end", turn_ended).await;
        assert!(completed(&end.body), "{:?}", end.body);
        assert!(with_sandbox(&host, &sessions).await <= 2, "never more than the limit run");
        let turns = follower.seen.iter().filter(|event| turn_ended(&event.body)).count();
        assert_eq!(turns, 1, "every prompt ran once");
    }
    let waited = host.events(&sessions[5]).await;
    let places: Vec<u32> = waited
        .iter()
        .filter_map(|body| match body {
            EventBody::Waiting { position } => Some(*position),
            _ => None,
        })
        .collect();
    assert!(
        !places.is_empty() && places.is_sorted_by(|one, next| one > next),
        "the line moves on: {places:?}"
    );
}

#[tokio::test]
async fn session_restores_earlier_and_later_turns() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let write = |word: &str| json!([{ "bash": format!("echo {word} > /workspace/calc/note") }, { "text": word }]);
    let session = host.session("calc", "One.", &write("one")).await.id;
    let mut follower = host.follow(session.clone());
    let end = follower.until("turn 1", completed).await;
    host.prompt(&session, "Two.", &write("two")).await;
    follower.after(end.seq, "turn 2", completed).await;
    host.wait_for(&session, SessionState::Idle).await;

    let back = host.harvest(["restore", &format!("{session}@1")]);
    assert_eq!(back.code, 0, "{back:?}");
    host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/calc/note").await.1, "one\n");
    let forth = host.harvest(["restore", "-@2"]);
    assert_eq!(forth.code, 0, "{forth:?}");
    host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/calc/note").await.1, "two\n");

    let end = host.show(&session).await.seq;
    host.prompt(&session, "Three.", &write("three")).await;
    follower.after(end, "turn 3", completed).await;
    assert_eq!(host.show(&session).await.turns, 3);
    let without = host.harvest(["restore", &session.to_string()]);
    assert!(without.code == 1 && without.stderr.contains("hint:"), "{without:?}");
}

#[tokio::test]
async fn terminated_session_keeps_work_for_next_prompt() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let script = json!([{ "bash": "echo precious > /workspace/calc/work" }, { "hang": 600 }]);
    let session = host.session("calc", "Work.", &script).await.id;
    let mut follower = host.follow(session.clone());
    follower
        .until("the file to be written", |body| matches!(body, EventBody::ToolEnded { .. }))
        .await;
    let ended = host.harvest(["terminate", "-"]);
    assert_eq!(ended.code, 0, "{ended:?}");
    let shown = host.show(&session).await;
    assert_eq!(
        (shown.state, shown.reason, shown.sandbox),
        (SessionState::Paused, StateReason::Terminated, None)
    );
    follower
        .until("what it left to be kept", |body| {
            matches!(body, EventBody::SnapshotTaken { kind: SnapshotKind::Recovered, .. })
        })
        .await;
    host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    follower.until("the next turn", completed).await;
    let (_, work) = host.exec(&session, "harvest", "cat /workspace/calc/work").await;
    assert_eq!(work, "precious\n");
}
