//! All session verbs, sent concurrently in a pseudo-random order with a fixed seed. Every request
//! gets a proper response, every prompt ends once, every session still works, and deleting them
//! leaves nothing.

use std::{collections::BTreeSet, sync::Mutex, time::Duration};

use futures_util::future::join_all;
use harvest_e2e::{Host, eventually, processes_with};
use harvest_proto::{SessionId, api::PromptStatus, event::TurnOutcome};
use reqwest::Method;
use serde_json::{Value, json};

use super::{Dice, begin, outcome, prompts, rests, told_once};

const CALLERS: u64 = 4;
const ROUNDS: usize = 40;

// A response that takes longer counts as missing.
const ANSWER: Duration = Duration::from_secs(60);

/// The next request: method, path below the session's, body.
fn wish(dice: &mut Dice) -> (Method, &'static str, Value) {
    let prompt = |script: Value| json!({ "text": format!("Go on.\nscript: {script}") });
    let quick = json!([{ "bash": "echo x >> /workspace/work" }, { "text": "done" }]);
    let post = Method::POST;
    match dice.below(20) {
        0..5 => (post, "/prompts", prompt(quick)),
        5..8 => (post, "/prompts", prompt(json!([{ "bash": "sleep 1.98731" }]))),
        8 => {
            let mut now = prompt(quick);
            now["now"] = json!(true);
            (post, "/prompts", now)
        }
        9..11 => (post, "/stop", json!({})),
        11..13 => (post, "/pause", json!({})),
        13 => (post, "/resume", json!({})),
        14 => (post, "/terminate", json!({})),
        15 => (post, "/archive", json!({})),
        16 => (post, "/restore", json!({ "turn": 1 + dice.below(3) })),
        17 => (post, "/fork", json!({})),
        18 => (post, "/exec", json!({ "argv": ["sh", "-c", "echo y >> /workspace/work"] })),
        _ => (Method::DELETE, "", json!({})),
    }
}

async fn call(host: &Host, living: &Mutex<Vec<SessionId>>, seed: u64) {
    let mut dice = Dice(seed);
    for _ in 0..ROUNDS {
        // At a random moment of the work the last request started.
        tokio::time::sleep(Duration::from_millis(dice.below(150))).await;
        let session = {
            let living = living.lock().unwrap();
            living[usize::try_from(dice.below(living.len() as u64)).unwrap()].clone()
        };
        let (method, path, body) = wish(&mut dice);
        let deletes = method == Method::DELETE;
        // A few forks and deletions are enough.
        let many = living.lock().unwrap().len();
        if (path == "/fork" && many > 6) || (deletes && many < 4) {
            continue;
        }
        let asked = host.request(method.clone(), &format!("/v1/sessions/{session}{path}"));
        let answer = asked
            .json(&body)
            .timeout(ANSWER)
            .send()
            .await
            .unwrap_or_else(|_| panic!("{method} {path}"));
        let status = answer.status();
        let said = tokio::time::timeout(ANSWER, answer.text())
            .await
            .expect("it is said to the end")
            .unwrap();
        assert!(
            status.is_success() || matches!(status.as_u16(), 404 | 409),
            "{method} {path}: {status} {said}"
        );
        if deletes && status.is_success() {
            living.lock().unwrap().retain(|other| *other != session);
        }
        if path == "/fork" && status.is_success() {
            let made: Value = serde_json::from_str(&said).unwrap();
            living.lock().unwrap().push(made["items"][0]["id"].as_str().unwrap().parse().unwrap());
        }
    }
}

/// The names in a folder of the home.
fn names(host: &Host, folder: &str) -> BTreeSet<String> {
    let entries = std::fs::read_dir(host.home().join(folder)).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The session accepts and completes a prompt in any state; a hanging turn is stopped first.
async fn works(host: &Host, session: &SessionId) {
    // A session that is being archived refuses prompts before its state shows it.
    host.post(&format!("/v1/sessions/{session}/resume"), json!({})).await;
    for prompt in prompts(host, session).await {
        if prompt.status == PromptStatus::Queued {
            let path = format!("/v1/sessions/{session}/prompts/{}", prompt.id);
            // The turn may have started meanwhile.
            host.request(Method::DELETE, &path).send().await.unwrap();
        }
    }
    let last = json!({ "text": "Go on.\nscript: [{\"text\":\"here\"}]", "now": true });
    let last = host.post(&format!("/v1/sessions/{session}/prompts"), last).await;
    let last = serde_json::from_value(last).unwrap();
    let mut follower = host.follow(session.clone());
    assert_eq!(outcome(&mut follower, &last).await, TurnOutcome::Completed, "{session}");
    rests(host, session).await;
    told_once(host, session).await;
}

#[tokio::test]
async fn concurrent_verbs_leave_sessions_usable_and_clean() {
    let host =
        Host::start_with(&[("HARVEST_LIMITS_SANDBOXES", "4"), ("HARVEST_CLOCKS_STOP", "20s")])
            .await;
    let folders = ["sandboxes", "snapshots", "layers"];
    let before = folders.map(|folder| names(&host, folder));
    let living = Mutex::new(Vec::new());
    for _ in 0..4 {
        let session =
            begin(&host, &json!([{ "bash": "echo begun > /workspace/work" }, { "text": "begun" }]))
                .await;
        living.lock().unwrap().push(session);
    }
    join_all((1..=CALLERS).map(|seed| call(&host, &living, seed * 7919))).await;

    let living = living.into_inner().unwrap();
    join_all(living.iter().map(|session| works(&host, session))).await;
    let listed: Value = host.get("/v1/sessions").send().await.unwrap().json().await.unwrap();
    let listed: BTreeSet<_> =
        listed["items"].as_array().unwrap().iter().map(|one| one["id"].to_string()).collect();
    assert_eq!(listed, living.iter().map(|session| json!(session).to_string()).collect());
    let with: Vec<_> = join_all(living.iter().map(|session| host.show(session))).await;
    let owned: BTreeSet<_> =
        with.iter().flat_map(|one| &one.sandbox).map(|one| one.part().to_owned()).collect();
    eventually("no sandbox without an owner", || async {
        (names(&host, "sandboxes") == owned).then_some(())
    })
    .await;

    for session in &living {
        assert_eq!(host.harvest(["rm", "--yes", &session.to_string()]).code, 0);
    }
    eventually("everything to be as it was", || async {
        let now = folders.map(|folder| names(&host, folder));
        (now == before && names(&host, "trash").is_empty()).then_some(())
    })
    .await;
    assert_eq!(processes_with("1.98731"), [0u32; 0]);
}
