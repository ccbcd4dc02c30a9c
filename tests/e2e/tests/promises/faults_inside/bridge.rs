//! The bridge cut, stalled and corrupted: each prompt runs once and each event arrives once.

use std::path::PathBuf;

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, StateReason, api::SessionState, event::TurnOutcome};
use serde_json::{Value, json};

use super::{
    Dice, begin,
    bridge_proxy::{Between, Fate, Passing, Way},
    lives, outcome, prompts, recovered, signal, supervisor, told_once,
};

/// A script that prints this much in pieces and runs a command at the end.
fn talk() -> (String, Value) {
    let text: String = (0..400).map(|number| format!("{number} ")).collect();
    let script = json!([
        { "text": text, "chunks": 400, "delay_ms": 4 },
        { "bash": "echo once >> /workspace/ran" },
    ]);
    (text, script)
}

const QUICK: [(&str, &str); 2] =
    [("HARVEST_CLOCKS_HEARTBEAT", "200ms"), ("HARVEST_CLOCKS_STALE", "5s")];

async fn socket(host: &Host, session: &SessionId) -> PathBuf {
    let sandbox = host.show(session).await.sandbox.unwrap();
    host.home().join("run").join(sandbox.part()).join("bridge.sock")
}

/// A session in a turn whose next server reaches its supervisor through a proxy.
async fn through(
    judge: impl FnMut(Passing<'_>) -> Fate + Send + 'static,
) -> (Host, SessionId, Between, String) {
    let mut host = Host::start_with(&QUICK).await;
    let (text, script) = talk();
    let session = begin(&host, &script).await;
    let mut follower = host.follow(session.clone());
    follower.until("it to talk", |body| matches!(body, EventBody::TextDelta { .. })).await;
    let socket = socket(&host, &session).await;
    host.kill();
    let between = Between::at(&socket, judge);
    host.up().await;
    (host, session, between, text)
}

/// The turn completes with each event once, and so does a new turn.
async fn ends_well(host: &Host, session: &SessionId, text: &str) {
    let first = prompts(host, session).await.remove(0);
    let second = host.prompt(session, "Go on.", &json!([{ "text": "over and out" }])).await;
    let mut follower = host.follow(session.clone());
    assert_eq!(outcome(&mut follower, &first).await, TurnOutcome::Completed);
    assert_eq!(outcome(&mut follower, &second).await, TurnOutcome::Completed);
    assert_eq!(follower.text(), format!("{text}over and out"));
    let idle = host.wait_for(session, SessionState::Idle).await;
    assert_eq!(idle.epoch, 1, "all of it in one sandbox");
    assert_eq!(host.exec(session, "harvest", "cat /workspace/ran").await.1, "once\n");
    told_once(host, session).await;
}

#[tokio::test]
async fn cut_bridge_loses_and_repeats_no_event() {
    let mut dice = Dice(3);
    let (host, session, _between, text) =
        through(move |passing| match passing.connection < 30 && dice.below(8) == 0 {
            true => Fate::Cut(usize::try_from(dice.below(passing.frame.len() as u64)).unwrap()),
            false => Fate::Pass,
        })
        .await;
    ends_well(&host, &session, &text).await;
}

#[tokio::test]
async fn corrupt_bridge_is_redialled_without_data_loss() {
    let mut dice = Dice(5);
    let (host, session, _between, text) = through(move |passing| {
        if passing.connection < 30 && dice.below(8) == 0 {
            let at = usize::try_from(dice.below(passing.frame.len() as u64)).unwrap();
            passing.frame[at] ^= 0x80;
        }
        Fate::Pass
    })
    .await;
    ends_well(&host, &session, &text).await;
}

#[tokio::test]
async fn endless_bridge_frame_times_out() {
    // The frame after the greeting, in each direction; heartbeats would take hours to fill it.
    let (host, session, _between, text) = through(|passing| {
        let way = if passing.connection == 0 { Way::Out } else { Way::In };
        if passing.connection < 2 && passing.way == way && passing.index == 1 {
            passing.frame[1] |= 0x0f;
        }
        Fate::Pass
    })
    .await;
    ends_well(&host, &session, &text).await;
}

#[tokio::test]
async fn frozen_supervisor_is_abandoned_but_files_survive() {
    let host = Host::start_with(&QUICK).await;
    let session =
        begin(&host, &json!([{ "bash": "echo one > /workspace/work; exec sleep 98721.5" }])).await;
    lives("98721.5").await;
    // During a turn.
    assert!(signal(supervisor(&host, &session).await, "-STOP"));
    let first = prompts(&host, &session).await.remove(0);
    let mut follower = host.follow(session.clone());
    assert_eq!(outcome(&mut follower, &first).await, TurnOutcome::Interrupted);
    let lost = host.wait_for(&session, SessionState::Paused).await;
    assert_eq!((lost.reason, lost.sandbox), (StateReason::SandboxLost, None));
    let kept = follower.until("what it left to be kept", recovered).await.seq;
    let second = host.prompt(&session, "Go on.", &json!([{ "bash": "cat /workspace/work" }])).await;
    assert_eq!(outcome(&mut follower, &second).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    // While the session is idle.
    assert!(signal(supervisor(&host, &session).await, "-STOP"));
    let third = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    follower.after(kept, "what it left to be kept", recovered).await;
    // Whether the turn had begun is unknown: it is reported interrupted and not repeated.
    let ended = outcome(&mut follower, &third).await;
    assert!(matches!(ended, TurnOutcome::Interrupted | TurnOutcome::Completed), "{ended:?}");
    let last = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    assert_eq!(outcome(&mut follower, &last).await, TurnOutcome::Completed);
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "one\n");
    told_once(&host, &session).await;
}

#[tokio::test]
async fn supervisor_frozen_across_restart_continues() {
    let mut host = Host::start().await;
    let (text, script) = talk();
    let session = begin(&host, &script).await;
    host.follow(session.clone())
        .until("it to talk", |body| matches!(body, EventBody::TextDelta { .. }))
        .await;
    let pid = supervisor(&host, &session).await;
    assert!(signal(pid, "-STOP"));
    host.kill();
    host.up().await;
    assert_eq!(host.show(&session).await.state, SessionState::Running);
    assert!(signal(pid, "-CONT"));
    ends_well(&host, &session, &text).await;
}
