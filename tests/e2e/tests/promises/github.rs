//! Pull requests at GitHub, for which the local forge of another server stands, and on the local
//! forge itself.

use std::{
    fs,
    path::Path,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use harvest_e2e::Host;
use harvest_proto::{EventBody, SessionId, api::PullRequestState, bridge::Exit};
use serde_json::{Value, json};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
};

use crate::{SAMPLE, completed};

const FIX: &str = "sed -i 's/a - b/a + b/' calc.py && git commit -qam Fix && git push -q";

fn key(folder: &Path) -> String {
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

/// A server whose forge plays GitHub with the repository `calc`, and one that signs in there as an
/// App and has the repository as `acme/calc`; with the path of the App's key.
pub(crate) async fn github_and_app() -> (Host, Host, String) {
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
    (github, host, key)
}

#[tokio::test]
async fn app_pushes_and_opens_pull_request_with_evidence() {
    let (github, host, key) = github_and_app().await;
    let forge = format!("{}/forge", github.url().unwrap());
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

#[tokio::test]
async fn draft_is_made_ready_then_merged() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let session = fixed(&host, "calc", json!({ "pr_mode": "draft" })).await;
    let id = session.to_string();
    let refused = host.harvest(["pr", "merge", &id]);
    assert!(refused.code == 1 && refused.stderr.contains("is a draft"), "{refused:?}");
    assert!(refused.stderr.contains(&format!("harvest pr update {id} --ready")), "{refused:?}");
    for (flag, shown) in
        [("--ready", "#1 open  "), ("--draft", "#1 open (draft)"), ("--ready", "#1 open  ")]
    {
        let updated = host.harvest(["pr", "update", &id, flag]);
        assert!(updated.code == 0 && updated.stdout.contains(shown), "{flag}: {updated:?}");
        let listed = host.harvest(["pr", "show", &id, "--json"]);
        let draft: Value = serde_json::from_str(&listed.stdout).unwrap();
        assert_eq!(draft["draft"], flag == "--draft", "{listed:?}");
    }
    let merged = host.harvest(["pr", "merge", &id]);
    assert_eq!(merged.code, 0, "{merged:?}");
}

/// A host that stands for GitHub, with an App, and the path of the App's key.
async fn github_with_app() -> (Host, String) {
    let github = Host::start().await;
    github.repository("calc", SAMPLE).await;
    let key = key(github.home());
    let app = github.harvest(["repo", "app", "My bot", "--key", &key, "-r", "calc"]);
    assert_eq!((app.code, app.stdout.as_str()), (0, "1\n"), "{app:?}");
    (github, key)
}

/// A host that signs in as the App to the GitHub at this URL, with `acme/calc`.
async fn signed_in(forge: &str, key: &str) -> Host {
    let host = Host::start_with(&[
        ("HARVEST_GITHUB_URL", forge),
        ("HARVEST_PRIVATE_HOSTS", "127.0.0.1"),
        ("GITHUB_APP_ID", "1"),
        ("GITHUB_APP_PRIVATE_KEY", key),
    ])
    .await;
    let url = format!("{forge}/local/calc.git");
    let added = host.harvest(["repo", "add", &url, "--name", "acme/calc"]);
    assert_eq!(added.code, 0, "{added:?}");
    host
}

/// A relay in front of a host that keeps the answer to the opening of a pull request.
struct HeldOpening {
    url: String,
    /// Keeps the answer.
    holds: Arc<AtomicBool>,
    opened: Arc<Notify>,
}

impl HeldOpening {
    async fn start(github: &Host) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/forge", listener.local_addr().unwrap());
        let (holds, opened) = (Arc::new(AtomicBool::new(true)), Arc::new(Notify::new()));
        let behind = github.url().unwrap().trim_start_matches("http://").to_owned();
        let (held, told) = (Arc::clone(&holds), Arc::clone(&opened));
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(server) = TcpStream::connect(&behind).await else { return };
                tokio::spawn(relay(client, server, Arc::clone(&held), Arc::clone(&told)));
            }
        });
        Self { url, holds, opened }
    }
}

async fn relay(client: TcpStream, server: TcpStream, holds: Arc<AtomicBool>, opened: Arc<Notify>) {
    let ((mut from, mut to_client), (mut answers, mut to_server)) =
        (client.into_split(), server.into_split());
    let opens = Arc::new(AtomicBool::new(false));
    let opening = Arc::clone(&opens);
    tokio::spawn(async move {
        let mut chunk = vec![0; 64 * 1024];
        while let Ok(count @ 1..) = from.read(&mut chunk).await {
            if chunk[..count].starts_with(b"POST /forge/api/v3/repos/local/calc/pulls ") {
                opening.store(true, Ordering::SeqCst);
            }
            if to_server.write_all(&chunk[..count]).await.is_err() {
                return;
            }
        }
    });
    let mut chunk = vec![0; 64 * 1024];
    while let Ok(count @ 1..) = answers.read(&mut chunk).await {
        if opens.load(Ordering::SeqCst) && holds.load(Ordering::SeqCst) {
            opened.notify_one();
            std::future::pending::<()>().await;
        }
        if to_client.write_all(&chunk[..count]).await.is_err() {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn server_killed_before_recording_finds_its_pull_request() {
    let (github, key) = github_with_app().await;
    let between = HeldOpening::start(&github).await;
    let mut host = signed_in(&between.url, &key).await;
    let session = host.scripted("acme/calc", "Fix it.", &json!([{ "bash": FIX }])).await.id;
    between.opened.notified().await;
    host.kill();
    let records = github.home().join("forge/calc/pr");
    assert!(records.join("1.json").exists(), "GitHub opened it");
    between.holds.store(false, Ordering::SeqCst);
    host.up().await;
    let mut follower = host.follow(session.clone());
    follower.until("the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    let pull = host.show(&session).await.repositories.remove(0).pr.unwrap();
    assert_eq!(pull.number, 1);
    assert_eq!(fs::read_dir(&records).unwrap().count(), 1, "there is no second one");
}

#[tokio::test]
async fn token_that_ended_early_is_renewed_by_push() {
    let (github, key) = github_with_app().await;
    let host = signed_in(&format!("{}/forge", github.url().unwrap()), &key).await;
    let session = fixed(&host, "acme/calc", json!({})).await;
    let first = host.show(&session).await.repositories.remove(0).pr.unwrap();
    let tokens = github.home().join("forge/.tokens");
    let held: Vec<_> = fs::read_dir(&tokens).unwrap().map(|one| one.unwrap().path()).collect();
    assert!(!held.is_empty());
    for token in &held {
        fs::remove_file(token).unwrap();
    }
    let before = host.show(&session).await.seq;
    let again = "echo '# more' >> calc.py && git commit -qam More && git push -q";
    host.prompt(&session, "More.", &json!([{ "bash": again }])).await;
    let mut follower = host.follow(session.clone());
    follower.after(before, "the turn", completed).await;
    follower.after(before, "the evidence", |body| matches!(body, EventBody::Evidence(_))).await;
    let second = host.show(&session).await.repositories.remove(0).pr.unwrap();
    assert_eq!((second.number, second.commit == first.commit), (1, false));
    assert!(held.iter().all(|token| !token.exists()), "the tokens are other ones");
}

#[tokio::test]
async fn name_is_looked_up_at_configured_github() {
    let github = Host::start().await;
    let forge = format!("{}/forge", github.url().unwrap());
    let env = [("HARVEST_GITHUB_URL", &*forge), ("HARVEST_PRIVATE_HOSTS", "127.0.0.1")];
    let host = Host::start_with(&env).await;
    // The other server answers: it has no such repository.
    for verb in [&["repo", "add"][..], &["run", "-d", "-a", "scripted", "x", "-r"]] {
        let ran = host.harvest(verb.iter().chain(&["acme/calc"]));
        assert!(ran.stderr.contains("the remote of `acme/calc` does not exist"), "{ran:?}");
    }
}
