//! The client library octocrab uses the forge over TLS as a GitHub App. `.ci/github-peers` compiles
//! the program in `tests/peers/octocrab`.

use std::process::Output;

use harvest_forge::{App, PermissionLevel::Write};
use harvest_proto::api::PullRequestState;
use serde_json::{Value, json};
use tokio::process::Command;

use super::{
    TOKEN,
    rest_host::{RestHost, peers},
};

/// A forge with two branches and an App, at the machine's time, which is octocrab's.
async fn host_with_app() -> (RestHost, App) {
    let host = RestHost::with_tls().await;
    host.push_branches().await;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    host.set_time(i64::try_from(now.as_secs()).unwrap());
    let app = host
        .register(&[
            ("contents", Write),
            ("issues", Write),
            ("pull_requests", Write),
            ("statuses", Write),
        ])
        .await;
    (host, app)
}

async fn octocrab(host: &RestHost, app: &App, key: &str) -> Output {
    Command::new(peers().join("octocrab-peer"))
        .arg(format!("{}/api/v3", host.url))
        .arg(peers().join(key))
        .args([&app.id.to_string(), "local/app", "harvest/a"])
        .env("SSL_CERT_FILE", peers().join("ca.pem"))
        .output()
        .await
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn octocrab_works_as_an_app() {
    let (host, app) = host_with_app().await;
    let main = host.git(&["rev-parse", "main"]).await.unwrap().trim().to_owned();
    let change = host.git(&["rev-parse", "harvest/a"]).await.unwrap().trim().to_owned();
    let output = octocrab(&host, &app, "app.pkcs1.pem").await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
    let pull = host.forge.pull_request("app", 1).await.unwrap();
    assert_eq!((pull.state, pull.commit), (PullRequestState::Merged, change.clone()));
    assert_eq!((pull.title.as_str(), pull.body.as_str()), ("Better", "More"));
    assert_eq!(host.forge.pull_requests("app").await.unwrap().len(), 1);
    host.git(&["fetch", "-q", &host.git_url(TOKEN), "main"]).await.unwrap();
    let merged = host.git(&["log", "-1", "--format=%H %P %s", "FETCH_HEAD"]).await.unwrap();
    let (commit, rest) = merged.trim().split_once(' ').unwrap();
    assert_eq!(rest, format!("{main} {change} Merged by octocrab"));
    let (_, status) = host.get(&format!("/repos/local/app/commits/{change}/status")).await;
    let status = &status["statuses"][0];
    let status = ["context", "state", "description", "target_url"].map(|field| &status[field]);
    assert_eq!(status, ["octocrab", "success", "It works", "https://example.org/log"]);
    let (_, comments) = host.get("/repos/local/app/issues/1/comments").await;
    let texts: Vec<&Value> =
        comments.as_array().unwrap().iter().map(|comment| &comment["body"]).collect();
    assert_eq!(texts, ["Looks good", "Thank you"]);
    let expected = json!({
        "installed_for": "local",
        "repository": "local/app",
        "base": "main",
        "content": "one\ntwo\n",
        "pull": [1, "harvest[bot]", "open", true],
        "again": "422 \"A pull request already exists for local:harvest/a.\"",
        "listed": [1],
        "status": ["success", "harvest[bot]"],
        "combined": ["success", 1],
        "comments": ["Looks good", "Thank you"],
        "pages": 2,
        "changed": ["Better", "More"],
        "merged": [false, true, true],
        "closed": true,
        "merge_commit": [commit, commit],
    });
    assert_eq!(seen, expected);
    host.validate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn octocrab_with_a_wrong_key_changes_nothing() {
    let (host, app) = host_with_app().await;
    let output = octocrab(&host, &app, "other.pkcs8.pem").await;
    let problem = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && problem.contains("status_code: 401"), "{problem}");
    assert!(host.forge.pull_requests("app").await.unwrap().is_empty());
    host.validate().await;
}
