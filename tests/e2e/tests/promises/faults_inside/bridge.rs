//! The bridge cut, stalled and garbled: what was asked for is done once, and what was said is heard once.

use std::path::PathBuf;

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, api::SessionState, event::TurnOutcome};
use serde_json::{Value, json};

use super::{
    Dice, begin,
    between::{Between, Fate, Passing, Way},
    lives, outcome, prompts, recovered, signal, supervisor, told_once,
};

/// Says this much, in pieces, and does something at last.
fn talk() -> (String, Value) {
    let text: String = (0..400).map(|number| format!("{number} ")).collect();
    let script = json!([
        { "text": text, "chunks": 400, "delay_ms": 4 },
        { "bash": "echo once >> /workspace/ran" },
    ]);
    (text, script)
}

const QUICK: [(&str, &str); 2] =
    [("HARVEST_CLOCKS_HEARTBEAT", "200ms"), ("HARVEST_CLOCKS_STALE", "2s")];

async fn socket(host: &Host, session: &SessionId) -> PathBuf {
    let sandbox = host.show(session).await.sandbox.unwrap();
    host.home().join("run").join(sandbox.part()).join("bridge.sock")
}

/// A session in the middle of a turn whose next server speaks with its supervisor through somebody.
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

/// The turn ends well, everything it said was heard once, and so does one that is asked for now.
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
async fn a_bridge_that_is_cut_anywhere_loses_and_repeats_nothing() {
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
async fn a_bridge_with_wrong_bytes_in_it_is_dialled_anew_and_no_word_is_changed() {
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
async fn a_frame_that_never_ends_keeps_nobody_waiting_for_it() {
    // Not the greeting but the next one, of each side; heartbeats would fill it in hours.
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
async fn a_supervisor_that_stands_still_is_given_up_and_its_files_are_not() {
    let host = Host::start_with(&QUICK).await;
    let session =
        begin(&host, &json!([{ "bash": "echo one > /workspace/work; exec sleep 98721.5" }])).await;
    lives("98721.5").await;
    // In the middle of a turn.
    assert!(signal(supervisor(&host, &session).await, "-STOP"));
    let first = prompts(&host, &session).await.remove(0);
    let mut follower = host.follow(session.clone());
    assert_eq!(outcome(&mut follower, &first).await, TurnOutcome::Interrupted);
    let lost = host.wait_for(&session, SessionState::Paused).await;
    assert_eq!((&lost.reason[..], lost.sandbox), ("sandbox_lost", None));
    let kept = follower.until("what it left to be kept", recovered).await.seq;
    let second = host.prompt(&session, "Go on.", &json!([{ "bash": "cat /workspace/work" }])).await;
    assert_eq!(outcome(&mut follower, &second).await, TurnOutcome::Completed);
    host.wait_for(&session, SessionState::Idle).await;
    // While nothing is done.
    assert!(signal(supervisor(&host, &session).await, "-STOP"));
    let third = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    follower.after(kept, "what it left to be kept", recovered).await;
    // Nobody knows whether it has begun: it is told, and not done twice.
    let ended = outcome(&mut follower, &third).await;
    assert!(matches!(ended, TurnOutcome::Interrupted | TurnOutcome::Completed), "{ended:?}");
    let last = host.prompt(&session, "Go on.", &json!([{ "text": "on" }])).await;
    assert_eq!(outcome(&mut follower, &last).await, TurnOutcome::Completed);
    assert_eq!(host.exec(&session, "harvest", "cat /workspace/work").await.1, "one\n");
    told_once(&host, &session).await;
}

#[tokio::test]
async fn a_supervisor_that_stood_still_while_the_server_changed_goes_on_where_it_was() {
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
