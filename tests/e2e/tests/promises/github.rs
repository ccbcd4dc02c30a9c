//! Pull requests at GitHub, for which the local forge of another server stands, and on the local
//! forge itself.

use std::{fs, path::Path, process::Command};

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, api::PullRequestState, bridge::Exit};
use serde_json::{Value, json};

use crate::SAMPLE;

const FIX: &str = "sed -i 's/a - b/a + b/' calc.py && git commit -qam Fix && git push -q";

pub(crate) fn key(folder: &Path) -> String {
    let path = folder.join("app.pem");
    let made = Command::new("openssl").args(["genrsa", "-out"]).arg(&path).arg("2048").output();
    assert!(made.unwrap().status.success(), "openssl makes a key");
    path.to_str().unwrap().to_owned()
}

/// A line in the middle of a key.
fn part(key: &str) -> String {
    fs::read_to_string(key).unwrap().lines().nth(5).unwrap().to_owned()
}

/// Whether a text is in a file below a folder.
fn is_below(folder: &Path, text: &str) -> bool {
    let found = Command::new("grep").args(["-rlaF", text]).arg(folder).output().unwrap();
    !found.stdout.is_empty()
}

async fn fixed(host: &Host, repository: &str, more: Value) -> SessionId {
    let script = json!([{ "bash": FIX }, { "text": "done" }]);
    let mut body = json!({
        "repository": repository, "agent": "scripted", "model": "scripted", "network": "none",
        "prompt": format!("Fix it.\nscript: {script}"),
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let session = host.post("/v1/sessions", body).await;
    let session: SessionId = session["id"].as_str().unwrap().parse().unwrap();
    let mut follower = host.follow(session.clone());
    follower.until("the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    session
}

#[tokio::test]
async fn app_pushes_and_opens_pull_request_with_evidence() {
    let github = Host::start().await;
    github.repository("calc", SAMPLE).await;
    let key = key(github.home());
    let app = github.harvest(["repo", "app", "My bot", "--key", &key, "-r", "calc"]);
    assert_eq!((app.code, app.stdout.as_str()), (0, "1\n"), "{app:?}");
    let forge = format!("{}/forge", github.url().unwrap());
    let host = Host::start_with(&[
        ("HARVEST_GITHUB_URL", &forge),
        ("HARVEST_PRIVATE_HOSTS", "127.0.0.1"),
        ("GITHUB_APP_ID", "1"),
        ("GITHUB_APP_PRIVATE_KEY", &key),
    ])
    .await;
    let url = format!("{forge}/local/calc.git");
    let added = host.harvest(["repo", "add", &url, "--name", "acme/calc"]);
    assert_eq!(added.code, 0, "{added:?}");
    // No secret opens the repository for a build, either.
    let built = host.harvest(["repo", "build", "acme/calc"]);
    assert_eq!(built.code, 0, "{built:?}");
    let session = fixed(&host, "acme/calc", json!({})).await;
    let pull = host.show(&session).await.repositories.remove(0).pr.unwrap();
    assert_eq!((pull.number, pull.state), (1, PullRequestState::Open));
    assert!(pull.url.starts_with(&forge), "{}", pull.url);
    let recorded = github.home().join("forge/calc/pr/1.json");
    let recorded: Value = serde_json::from_slice(&fs::read(recorded).unwrap()).unwrap();
    assert_eq!(recorded["author"], "my-bot[bot]");
    let body = recorded["body"].as_str().unwrap();
    assert!(body.contains("- check: `.harvest/check.sh` passed on"), "{body}");
    let statuses = github.home().join(format!("forge/calc/statuses/{}.json", pull.commit));
    let statuses: Value = serde_json::from_slice(&fs::read(statuses).unwrap()).unwrap();
    assert_eq!(
        (&statuses[0]["context"], &statuses[0]["state"]),
        (&json!("harvest/check"), &json!("success"))
    );
    let merge = host.harvest(["pr", "merge", &session.to_string()]);
    assert!(merge.code == 1 && merge.stderr.contains(&pull.url), "{merge:?}");
    // Neither the App's key nor its tokens are anywhere.
    let search = "env; git config --list; grep -rlaF ghs_ /home /tmp /workspace /app /etc || true";
    let (exit, inside) = host.exec(&session, "harvest", search).await;
    assert_eq!(exit, Exit::Code(0), "{inside}");
    assert!(!inside.contains("ghs_") && !inside.contains("GITHUB_APP"), "{inside}");
    assert!(!is_below(host.home(), "ghs_") && !is_below(host.home(), &part(&key)));
}

#[tokio::test]
async fn wrong_app_is_said_without_its_key() {
    let github = Host::start().await;
    github.repository("calc", SAMPLE).await;
    let key = key(github.home());
    let forge = format!("{}/forge", github.url().unwrap());
    let host = Host::start_with(&[
        ("HARVEST_GITHUB_URL", &forge),
        ("HARVEST_PRIVATE_HOSTS", "127.0.0.1"),
        ("GITHUB_APP_ID", "42"),
        ("GITHUB_APP_PRIVATE_KEY", &key),
    ])
    .await;
    let url = format!("{forge}/local/calc.git");
    let refused = host.harvest(["repo", "add", &url, "--name", "acme/calc"]);
    assert_ne!(refused.code, 0, "{refused:?}");
    assert!(refused.stderr.contains("GitHub knows no App with the id 42"), "{refused:?}");
    assert!(!is_below(host.home(), &part(&key)));
}

#[tokio::test]
async fn pull_request_is_created_changed_and_merged() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = fixed(&host, "calc", json!({ "pr_mode": "none" })).await;
    let id = session.to_string();
    assert!(host.show(&session).await.repositories[0].pr.is_none());
    let missing = host.harvest(["pr", "merge", &id]);
    assert!(missing.code == 1 && missing.stderr.contains("harvest pr create"), "{missing:?}");
    let created = host.harvest(["pr", "create", &id, "--title", "Add, not subtract"]);
    assert!(created.stdout.starts_with("local/calc #1 open  http://"), "{created:?}");
    let updated = host.harvest(["pr", "update", &id, "--body", "The sign was wrong."]);
    assert_eq!(updated.code, 0, "{updated:?}");
    let merged = host.harvest(["pr", "merge", &id]);
    assert!(merged.stdout.starts_with("local/calc #1 merged  http://"), "{merged:?}");
    let pull = host.show(&session).await.repositories.remove(0).pr.unwrap();
    assert_eq!((pull.title.as_str(), pull.state), ("Add, not subtract", PullRequestState::Merged));
    assert!(pull.body.starts_with("The sign was wrong.\n\n<!-- harvest:begin -->"), "{pull:?}");
    let changed = |body: &EventBody| matches!(body, EventBody::PrChanged { .. });
    assert!(host.events(&session).await.iter().any(changed));
    let again = host.harvest(["pr", "merge", &id]);
    assert!(again.code == 1 && again.stderr.contains("it is not open"), "{again:?}");
}
