//! The history has a budget: a flood of output is truncated, and on a full disk sessions can be
//! deleted and the server can start.

use harvest_e2e::Host;
use harvest_proto::EventBody;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::{completed, faults_host::SmallDisk, turn_ended};

/// A tool call of 50 kB.
fn call() -> Value {
    json!({ "bash": "head -c 50000 /dev/zero | tr '\\0' x" })
}

fn flood(calls: usize) -> Value {
    let mut script = vec![call(); calls];
    script.push(json!({ "text": "done" }));
    script.into()
}

fn is_limit_warning(body: &EventBody) -> bool {
    matches!(body, EventBody::Warning { message } if message.contains("has reached 1 MiB"))
}

#[tokio::test]
async fn flooding_turn_is_truncated_with_one_warning() {
    let host = Host::start_with(&[("HARVEST_RETENTION_HISTORY_PER_TURN", "1m")]).await;
    let session = host.bare("Flood.", &flood(60)).await.id;
    let ended = host.follow(session.clone()).until("the turn to end", turn_ended).await;
    assert!(completed(&ended.body), "{:?}", ended.body);
    let events = host.events(&session).await;
    assert_eq!(events.iter().filter(|body| is_limit_warning(body)).count(), 1);
    let stored: usize = events.iter().map(|body| serde_json::to_string(body).unwrap().len()).sum();
    assert!((900_000..1_200_000).contains(&stored), "{stored}");
    // The next turn has its own budget.
    host.prompt(&session, "Again.", &json!([{ "text": "small" }])).await;
    let mut follower = host.follow(session);
    follower.after(ended.seq, "the turn to end", turn_ended).await;
    assert!(follower.text().ends_with("small"));
}

#[tokio::test]
async fn restarted_server_repeats_no_limit_warning() {
    let mut host = Host::start_with(&[("HARVEST_RETENTION_HISTORY_PER_TURN", "1m")]).await;
    let mut script = vec![call(); 35];
    script[30] = json!({ "bash": "until test -e /tmp/go; do sleep 0.05; done" });
    let session = host.bare("Flood.", &script.into()).await.id;
    host.follow(session.clone()).until("the warning", is_limit_warning).await;
    host.kill();
    host.up().await;
    host.exec(&session, "harvest", "touch /tmp/go").await;
    host.follow(session.clone()).until("the turn to end", completed).await;
    let events = host.events(&session).await;
    assert_eq!(events.iter().filter(|body| is_limit_warning(body)).count(), 1);
}

#[tokio::test]
async fn full_disk_allows_deletion_and_start() {
    let disk = SmallDisk::new();
    let mut host = Host::start_below(&disk.place, &[]).await;
    let first = host.bare("Flood.", &flood(20)).await.id;
    let second = host.bare("Flood.", &flood(20)).await.id;
    for session in [&first, &second] {
        host.follow(session.clone()).until("the turn to end", turn_ended).await;
    }
    host.kill();
    let ballast = disk.fill();
    for session in [&first, &second] {
        host.up().await;
        let path = format!("/v1/sessions/{session}/prompts");
        let refused = host.request(Method::POST, &path).json(&json!({ "text": "x" })).send().await;
        assert_eq!(refused.unwrap().status(), StatusCode::INSUFFICIENT_STORAGE);
        let path = format!("/v1/sessions/{session}");
        let deleted = host.request(Method::DELETE, &path).send().await.unwrap();
        assert_eq!(deleted.status(), StatusCode::NO_CONTENT);
        host.kill();
    }
    std::fs::remove_file(&ballast).unwrap();
    host.up().await;
    let third = host.bare("Go on.", &json!([{ "text": "done" }])).await.id;
    host.follow(third).until("the turn to end", turn_ended).await;
}
