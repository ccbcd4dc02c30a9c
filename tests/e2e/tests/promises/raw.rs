//! Sandboxes that no session has, on the real binaries: in the limits, made once, with a terminal.

use std::process::Command;

use harvest_e2e::{Host, eventually};
use harvest_proto::{SessionId, api::SessionState};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

use crate::completed;

const PLAIN: &str = r#"{"image": "claude", "state": false}"#;

fn plain() -> Value {
    serde_json::from_str(PLAIN).unwrap()
}

async fn shown(host: &Host, sandbox: &str) -> Value {
    host.get(&format!("/v1/sandboxes/{sandbox}")).send().await.unwrap().json().await.unwrap()
}

async fn waits(host: &Host, session: &SessionId) {
    eventually("the session to wait", || async {
        let now = host.show(session).await;
        (now.state == SessionState::Queued && now.reason == "limit_sandboxes").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_sandbox_of_ones_own_has_one_of_the_places_and_sessions_wait_for_it() {
    let mut host = Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "1")]).await;
    let made = host.harvest(["sandbox", "create", "--image", "claude", "--no-state"]);
    assert_eq!(made.code, 0, "{made:?}");
    let first = made.stdout.trim().to_owned();
    assert!(shown(&host, &first).await["made_by"].is_string());
    // There is no place for another, nor for a command in a fresh one, and it is said kindly.
    let refused = host.request(Method::POST, "/v1/sandboxes").json(&plain()).send().await.unwrap();
    assert_eq!(
        (refused.status(), refused.headers().contains_key("retry-after")),
        (StatusCode::TOO_MANY_REQUESTS, true)
    );
    let problem: Value = refused.json().await.unwrap();
    assert_eq!(problem["code"], "limit_sandboxes", "{problem}");
    let told = host.harvest(["exec", "--image", "claude", "--no-state", "--", "true"]);
    assert!(told.code == 125 && told.stderr.contains("`limits.sandboxes`"), "{told:?}");
    // A session waits, and starts by itself when the sandbox goes.
    let session = host.bare("Wait.", &json!([{ "text": "done" }])).await.id;
    waits(&host, &session).await;
    assert_eq!(host.harvest(["sandbox", "rm", &first]).code, 0);
    host.follow(session.clone()).until("its turn", completed).await;
    // It is idle now: who wants its place gets it in a moment.
    let second = eventually("the idle session to give its place up", || async {
        let answer = host.request(Method::POST, "/v1/sandboxes").json(&plain()).send().await.unwrap();
        let is_made = answer.status() == StatusCode::CREATED;
        assert!(is_made || answer.status() == StatusCode::TOO_MANY_REQUESTS, "{answer:?}");
        let body: Value = answer.json().await.unwrap();
        is_made.then(|| body["sandbox_id"].as_str().unwrap().to_owned())
    })
    .await;
    host.wait_for(&session, SessionState::Paused).await;
    // The next server knows it, and notices when it dies by itself.
    host.kill();
    host.up().await;
    let next = host.bare("Wait.", &json!([{ "text": "done" }])).await.id;
    waits(&host, &next).await;
    let pid = shown(&host, &second).await["pid"].to_string();
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    host.follow(next).until("its turn", completed).await;
}
