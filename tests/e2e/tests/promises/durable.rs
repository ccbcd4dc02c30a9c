//! Promises 1 to 3: what was answered 202 is on disk, events have no gap and no repeat, and a turn
//! goes on while the server is away.

use std::time::Duration;

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, api::SessionState};
use serde_json::json;

use crate::{SAMPLE, completed, turn_ended};

#[tokio::test]
async fn a_prompt_answered_202_runs_once_although_the_server_dies_right_after() {
    runs_once_although_the_server_dies(&mut Host::start().await).await;
}

/// The promise, wherever the host's store is; the session has had two turns then.
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
async fn a_turn_goes_on_while_the_server_is_dead_in_the_middle_of_a_model_stream() {
    let mut host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    // The answer is cut while it streams: the agent asks again and is made to wait at the door.
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
    // The absence is the point of this test: agents give up on a service that is gone for long.
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
async fn events_have_no_gap_and_no_repeat_across_restarts() {
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
    // The follower asserts on every frame that numbers neither skip nor repeat.
    follower.until("the turn to end", turn_ended).await;
    let outcomes = follower.seen.iter().filter(|event| turn_ended(&event.body)).count();
    assert_eq!(outcomes, 1);
    let idle = host.wait_for(&session, SessionState::Idle).await;
    assert_eq!(idle.turns, 1);
}

#[tokio::test]
async fn a_second_server_on_the_same_home_is_refused() {
    let host = Host::start().await;
    let second = host.harvest(["up", "--listen", "127.0.0.1:0"]);
    assert_ne!(second.code, 0);
    assert!(second.stderr.contains("hint:"), "{}", second.stderr);
}
