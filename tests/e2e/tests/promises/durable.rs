//! Promises 1 to 3: an accepted prompt is on disk, events have no gap and no repeat, and a turn
//! continues while the server is down.

use std::time::Duration;

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, api::SessionState};
use serde_json::json;

use crate::{SAMPLE, completed, turn_ended};

#[tokio::test]
async fn accepted_prompt_runs_once_after_server_kill() {
    runs_once_although_the_server_dies(&mut Host::start().await).await;
}

/// Checks the promise on any store; the session has had two turns afterwards.
pub(crate) async fn runs_once_although_the_server_dies(host: &mut Host) -> SessionId {
    host.repository("calc", SAMPLE).await;
    let session = host.session("calc", "Begin.", &json!([{ "text": "ready" }])).await.id;
    host.follow(session.clone()).until("the first turn", completed).await;

    let script = json!([{ "bash": "echo once >> /workspace/calc/ran" }, { "text": "written" }]);
    let prompt = host.prompt(&session, "Write a line.", &script).await;
    host.kill();
    host.up().await;

    let mut follower = host.follow(session.clone());
    let ended = |body: &EventBody| matches!(body, EventBody::TurnEnded { prompt: of, .. } if *of == prompt.id);
    follower.until("the second turn", ended).await;
    let (_, ran) = host.exec(&session, "harvest", "cat /workspace/calc/ran").await;
    assert_eq!(ran, "once\n");
    assert_eq!(follower.seen.iter().filter(|event| ended(&event.body)).count(), 1);
    session
}

#[tokio::test]
async fn turn_survives_server_kill_during_model_stream() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    // The model stream is cut: the agent retries and its connection waits at the door.
    let script = json!([
        { "bash": "echo before > /workspace/calc/before" },
        [
            { "text": "a long answer that is still being written when the server dies", "chunks": 20, "delay_ms": 300 },
            { "bash": "echo after > /workspace/calc/after" },
        ],
        { "text": "done" },
    ]);
    let session = host.session("calc", "Work slowly.", &script).await.id;
    host.follow(session.clone())
        .until("the stream to begin", |body| matches!(body, EventBody::TextDelta { .. }))
        .await;
    let before = host.show(&session).await;

    host.kill();
    // The downtime is what this test is about: agents give up on a service after a while.
    tokio::time::sleep(Duration::from_secs(20)).await;
    host.up().await;

    let mut follower = host.follow(session.clone());
    let end = follower.until("the turn to end", turn_ended).await;
    assert!(completed(&end.body), "{:?}", end.body);
    let (_, files) =
        host.exec(&session, "harvest", "cat /workspace/calc/before /workspace/calc/after").await;
    assert_eq!(files, "before\nafter\n");
    let after = host.show(&session).await;
    assert_eq!(
        (after.sandbox, after.epoch),
        (before.sandbox, before.epoch),
        "the sandbox was adopted"
    );
}

#[tokio::test]
async fn events_are_gapless_and_unique_across_restarts() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let loops = "for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.3; done";
    let script = json!([
        { "bash": loops },
        [{ "text": "one", "chunks": 10, "delay_ms": 50 }, { "bash": loops }],
        { "text": "two" },
    ]);
    let session = host.session("calc", "Count.", &script).await.id;
    let mut follower = host.follow(session.clone());
    for _ in 0..3 {
        let last = follower.seen.last().map_or(0, |event| event.seq);
        follower.after(last, "something to happen", |_| true).await;
        let seen = std::mem::take(&mut follower.seen);
        host.kill();
        host.up().await;
        follower = host.follow(session.clone());
        follower.seen = seen;
    }
    // The follower asserts that sequence numbers have no gap and no repeat.
    follower.until("the turn to end", turn_ended).await;
    let outcomes = follower.seen.iter().filter(|event| turn_ended(&event.body)).count();
    assert_eq!(outcomes, 1);
    let idle = host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(idle.turns, 1);
}

#[tokio::test]
async fn second_server_on_same_home_is_refused() {
    let host = Host::start().await;
    let second = host.harvest(["up", "--listen", "127.0.0.1:0"]);
    assert_ne!(second.code, 0);
    assert!(second.stderr.contains("hint:"), "{}", second.stderr);
}
