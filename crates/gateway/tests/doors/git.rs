//! The git door between real git and the local forge.

use std::{collections::HashMap, fs, path::Path};

use axum::Router;
use harvest_forge::LocalForge;
use harvest_gateway::{
    GatewayConfig, PrivateHosts,
    ledger::{GitAccess, Refusal},
};
use harvest_proto::{EventBody, Secret, door::GIT_NAME};
use tempfile::TempDir;
use tokio::{net::TcpListener, process::Command};

use crate::{RecordingLedger, TestDoor, policy};

const TOKEN: &str = "f0rge-t0ken-never-inside";
const BRANCH: &str = "harvest/fix-it";

struct GitSetup {
    door: TestDoor,
    forge: LocalForge,
    inside: String,
    outside: TempDir,
}

impl GitSetup {
    async fn new(branch: Option<&str>) -> Self {
        Self::with(branch, RecordingLedger::default(), true).await
    }

    /// A remote with the secret `FORGE_TOKEN`, or one that the server's own credential opens.
    async fn with(branch: Option<&str>, ledger: RecordingLedger, secret: bool) -> Self {
        let outside = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let public = format!("http://{}/forge", listener.local_addr().unwrap());
        let forge = LocalForge::open(outside.path().join("forge"), &public).unwrap();
        let router = Router::new().nest("/forge", forge.router());
        tokio::spawn(async move { axum::serve(listener, router).await });
        for name in ["app", "secret-plans"] {
            forge.create(name, &Secret::new(TOKEN.to_owned())).await.unwrap();
        }
        seed(outside.path(), &forge.repository_path("app").unwrap()).await;
        let mut policy = policy(&[]);
        policy.repositories = vec![GitAccess {
            name: "local/app".parse().unwrap(),
            url: forge.url("app"),
            local: secret,
            secret: secret.then(|| "FORGE_TOKEN".into()),
            branch: branch.map(|name| name.parse().unwrap()),
        }];
        let ledger = RecordingLedger { secrets: HashMap::from([("FORGE_TOKEN", TOKEN)]), ..ledger };
        *ledger.rotated.lock().unwrap() = Some(forge.clone());
        let private_hosts = PrivateHosts::new(vec!["127.0.0.1".to_owned()]);
        let config = GatewayConfig { private_hosts, ..GatewayConfig::default() };
        let door = TestDoor::new(ledger, config, policy);
        let inside = format!("http://{}", door.inside(GIT_NAME, 80).await);
        Self { door, forge, inside, outside }
    }

    fn folder(&self) -> &Path {
        self.door.folder.path()
    }

    async fn clone_app(&self) {
        let url = format!("{}/local/app.git", self.inside);
        let cloned = git(self.folder(), &["clone", "-q", &url, "work"]).await;
        assert_eq!(cloned.1, "");
    }

    /// Commits in the clone, then pushes.
    async fn push(&self, content: &[u8], arguments: &[&str]) -> (bool, String) {
        let work = self.folder().join("work");
        fs::write(work.join("file"), content).unwrap();
        git(&work, &["add", "-A"]).await;
        git(&work, &["commit", "-q", "--allow-empty", "-m", "change"]).await;
        git(&work, &[&["push"], arguments].concat()).await
    }

    async fn remote_heads(&self) -> String {
        git(&self.forge.repository_path("app").unwrap(), &["for-each-ref"]).await.1
    }

    async fn head(&self) -> String {
        git(&self.folder().join("work"), &["rev-parse", "HEAD"]).await.1.trim().to_owned()
    }
}

async fn seed(folder: &Path, repository: &Path) {
    let seed = folder.join("seed");
    fs::create_dir(&seed).unwrap();
    git(&seed, &["init", "-q", "-b", "main"]).await;
    fs::write(seed.join("file"), "one").unwrap();
    git(&seed, &["add", "-A"]).await;
    git(&seed, &["commit", "-q", "-m", "one"]).await;
    assert!(git(&seed, &["push", "-q", repository.to_str().unwrap(), "main"]).await.0);
}

/// Whether it ok, and all it printed.
async fn git(folder: &Path, arguments: &[&str]) -> (bool, String) {
    let output = Command::new("git")
        .args(["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "http.proxy="])
        .args(arguments)
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_TERMINAL_PROMPT", "0")
        .output()
        .await
        .unwrap();
    (
        output.status.success(),
        String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_uses_credentials_unknown_to_sandbox() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    let url = format!("{}/local/app.git", setup.inside);
    let traced = Command::new("git")
        .args(["-c", "http.proxy=", "clone", &url, "work"])
        .current_dir(setup.folder())
        .env("GIT_TRACE_CURL", "1")
        .env("GIT_TRACE_PACKET", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .await
        .unwrap();
    assert!(traced.status.success(), "{}", String::from_utf8_lossy(&traced.stderr));
    assert_eq!(fs::read_to_string(setup.folder().join("work/file")).unwrap(), "one");
    let trace = String::from_utf8_lossy(&traced.stderr).to_ascii_lowercase();
    let encoded = "eC1hY2Nlc3MtdG9rZW4".to_ascii_lowercase();
    assert!(
        !trace.contains(TOKEN) && !trace.contains(&encoded) && !trace.contains("authorization")
    );
    assert!(trace.contains("version=2") || trace.contains("version 2"), "protocol 2 is used");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_request_asks_for_a_credential() {
    // The token of each request ends with the next one, in the middle of a push too.
    let setup = GitSetup::with(Some(BRANCH), RecordingLedger::default(), false).await;
    setup.clone_app().await;
    let (ok, output) = setup.push(b"two", &["origin", &format!("HEAD:refs/heads/{BRANCH}")]).await;
    assert!(ok, "{output}");
    let asked = setup.door.ledger.asked.lock().unwrap().clone();
    let (fetches, pushes) =
        (asked.iter().filter(|push| !**push), asked.iter().filter(|push| **push));
    assert!(fetches.count() >= 2 && pushes.count() >= 2, "{asked:?}");
    assert!(asked.is_sorted(), "rights to push are asked for only to push: {asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_credential_is_reported_and_never_shown() {
    let refusing = RecordingLedger {
        refusal: Some(Refusal::Final(String::new())),
        ..RecordingLedger::default()
    };
    let setup = GitSetup::with(Some(BRANCH), refusing, false).await;
    let url = format!("{}/local/app.git", setup.inside);
    let (ok, output) = git(setup.folder(), &["clone", "-q", &url, "work"]).await;
    assert!(!ok && output.contains("403") && !output.contains("t0ken"), "{output}");
    // Asked for once more, and no third time.
    assert_eq!(*setup.door.ledger.refused.lock().unwrap(), ["t0ken-1", "t0ken-2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn push_to_own_branch_is_recorded_once() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.clone_app().await;
    let (ok, output) = setup.push(b"two", &["origin", &format!("HEAD:refs/heads/{BRANCH}")]).await;
    assert!(ok, "{output}");
    let commit = setup.head().await;
    assert!(setup.remote_heads().await.contains(&format!("{commit} commit\trefs/heads/{BRANCH}")));
    let pushed = EventBody::Pushed {
        repository: "local/app".parse().unwrap(),
        branch: BRANCH.parse().unwrap(),
        commit: commit.clone(),
    };
    assert_eq!(setup.door.ledger.events(), [pushed]);
    // An update larger than git's buffer, which is sent in chunks after a probe.
    let noise: Vec<u8> = (0u64..1 << 18)
        .flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i << 7).to_le_bytes())
        .collect();
    git(&setup.folder().join("work"), &["config", "http.extraHeader", "Expect: 100-continue"])
        .await;
    let (ok, output) = setup.push(&noise, &["origin", &format!("HEAD:refs/heads/{BRANCH}")]).await;
    assert!(ok, "{output}");
    let newer = setup.head().await;
    assert!(
        matches!(&setup.door.ledger.events()[..], [_, EventBody::Pushed { commit, .. }] if *commit == newer)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn push_elsewhere_is_refused_with_reason() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.clone_app().await;
    let before = setup.remote_heads().await;
    let own = format!("HEAD:refs/heads/{BRANCH}");
    let large = vec![7; 3 << 20];
    for (content, references) in [
        (&b"two"[..], &["HEAD:main"][..]),
        (b"two", &["HEAD:refs/tags/v1"]),
        (b"two", &["--force", "HEAD:main"]),
        (b"two", &[&own, "HEAD:main"]),
        (b"two", &["HEAD:refs/heads/harvest/fix-it/more"]),
        (&large, &["HEAD:main"]),
    ] {
        let (ok, output) = setup.push(content, &[&["origin"], references].concat()).await;
        assert!(!ok && output.contains("remote rejected"), "{references:?}: {output}");
        assert!(
            output.contains("push to its branch: git push origin HEAD:harvest/fix-it"),
            "{output}"
        );
        assert_eq!(setup.remote_heads().await, before, "{references:?}");
    }
    let events = setup.door.ledger.events();
    assert_eq!(events.len(), 6);
    assert!(events.iter().all(
        |event| matches!(event, EventBody::PushRefused { repository, .. } if repository == "local/app")
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn compressed_fetch_negotiation_passes() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.clone_app().await;
    // Many commits unknown to the remote make the request long.
    let mut import = String::from("reset refs/heads/local\nfrom refs/heads/main^0\n");
    for number in 0..200 {
        import += &format!(
            "commit refs/heads/local\ncommitter T <t@example.org> {} +0000\ndata 1\nx\n",
            2_000_000_000 + number
        );
    }
    let work = setup.folder().join("work");
    fs::write(work.join("import"), import).unwrap();
    let imported = Command::new("git")
        .args(["fast-import", "--quiet"])
        .current_dir(&work)
        .stdin(fs::File::open(work.join("import")).unwrap())
        .status()
        .await
        .unwrap();
    assert!(imported.success());
    let seed = setup.outside.path().join("seed");
    git(&seed, &["commit", "-q", "--allow-empty", "-m", "newer"]).await;
    git(
        &seed,
        &["push", "-q", setup.forge.repository_path("app").unwrap().to_str().unwrap(), "main"],
    )
    .await;
    let traced = Command::new("git")
        .args(["-c", "http.proxy=", "fetch", "origin"])
        .current_dir(&work)
        .env("GIT_TRACE_CURL", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .output()
        .await
        .unwrap();
    let trace = String::from_utf8_lossy(&traced.stderr).to_ascii_lowercase();
    assert!(traced.status.success() && trace.contains("content-encoding: gzip"), "{trace}");
    let heads = git(&work, &["rev-parse", "origin/main"]).await.1;
    assert_eq!(heads, git(&seed, &["rev-parse", "main"]).await.1);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleting_own_branch_is_refused() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.clone_app().await;
    assert!(setup.push(b"two", &["origin", &format!("HEAD:refs/heads/{BRANCH}")]).await.0);
    let before = setup.remote_heads().await;
    let (ok, output) =
        git(&setup.folder().join("work"), &["push", "origin", "--delete", BRANCH]).await;
    assert!(!ok && output.contains("this session may not delete its branch"), "{output}");
    assert_eq!(setup.remote_heads().await, before);
}

/// A clone whose branch is pushed, and the pushed commit.
async fn pushed() -> (GitSetup, String) {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.clone_app().await;
    let (ok, output) = setup.push(b"two", &["origin", &own()]).await;
    assert!(ok, "{output}");
    let commit = setup.head().await;
    (setup, commit)
}

fn own() -> String {
    format!("HEAD:refs/heads/{BRANCH}")
}

/// Commits to the session's branch from elsewhere, as a person does; returns the commit.
async fn push_as_person(setup: &GitSetup) -> String {
    let (bare, other) =
        (setup.forge.repository_path("app").unwrap(), setup.outside.path().join("person"));
    let (from, to) = (bare.to_str().unwrap(), other.to_str().unwrap());
    assert!(git(setup.outside.path(), &["clone", "-q", "-b", BRANCH, from, to]).await.0);
    git(&other, &["commit", "-q", "--allow-empty", "-m", "by a person"]).await;
    assert!(git(&other, &["push", "-q", "origin", BRANCH]).await.0);
    git(&other, &["rev-parse", "HEAD"]).await.1.trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn own_commits_are_replaced_and_kept() {
    let (setup, first) = pushed().await;
    let work = setup.folder().join("work");
    // Twice: back to the first commit, which is kept then, and away from it again.
    for message in ["rewritten", "again"] {
        git(&work, &["reset", "-q", "--hard", "HEAD^"]).await;
        git(&work, &["commit", "-q", "--allow-empty", "-m", message]).await;
        let second = setup.head().await;
        let (ok, output) = git(&work, &["push", "--force", "origin", &own()]).await;
        assert!(ok, "{output}");
        let heads = setup.remote_heads().await;
        assert!(heads.contains(&format!("{second} commit\trefs/heads/{BRANCH}")), "{heads}");
        assert!(heads.contains(&format!("{first} commit\trefs/harvest/kept/{first}")), "{heads}");
        git(&work, &["reset", "-q", "--hard", &first]).await;
        assert!(git(&work, &["push", "--force", "origin", &own()]).await.0);
        let heads = setup.remote_heads().await;
        assert!(heads.contains(&format!("{second} commit\trefs/harvest/kept/{second}")), "{heads}");
    }
    assert_eq!(setup.door.ledger.replaced.lock().unwrap().len(), 4);
    let listed = git(&work, &["ls-remote", "origin"]).await.1;
    assert!(listed.contains(BRANCH) && !listed.contains("kept"), "{listed}");
}

#[tokio::test(flavor = "multi_thread")]
async fn commits_of_a_person_are_never_replaced() {
    let (setup, _) = pushed().await;
    let work = setup.folder().join("work");
    let theirs = push_as_person(&setup).await;
    let before = setup.remote_heads().await;
    git(&work, &["commit", "-q", "--amend", "-m", "rewritten"]).await;
    let (ok, output) = git(&work, &["push", "--force", "origin", &own()]).await;
    let named = format!("the branch is at {}, which this session did not push", &theirs[..7]);
    assert!(!ok && output.contains(&named), "{output}");
    assert!(output.contains("git rebase origin/harvest/fix-it"), "{output}");
    assert_eq!(setup.remote_heads().await, before);
    // With their commit below it, the same work is taken.
    git(&work, &["fetch", "-q", "origin"]).await;
    git(&work, &["reset", "-q", "--hard", &theirs]).await;
    let (ok, output) = setup.push(b"three", &["origin", &own()]).await;
    assert!(ok, "{output}");
    assert_eq!(setup.door.ledger.replaced.lock().unwrap().len(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn lease_of_unrecorded_push_is_not_lost() {
    let (setup, first) = pushed().await;
    // The server was killed before it recorded that the push succeeded.
    setup.door.ledger.events.lock().unwrap().clear();
    assert_eq!(*setup.door.ledger.pushed.lock().unwrap(), [first]);
    let work = setup.folder().join("work");
    git(&work, &["commit", "-q", "--amend", "-m", "rewritten"]).await;
    let (ok, output) = git(&work, &["push", "--force", "origin", &own()]).await;
    assert!(ok, "{output}");
}

/// Sends a push whose pack is broken off; returns the answer.
async fn push_without_objects(setup: &GitSetup, old: &str, new: &str) -> String {
    let line = format!("{old} {new} refs/heads/{BRANCH}\0 report-status");
    let mut body = format!("{:04x}{line}0000", line.len() + 4).into_bytes();
    body.extend(b"PACK\0\0\0\x02\0\0\0\0");
    let url = format!("{}/local/app.git/git-receive-pack", setup.inside);
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let kind = "application/x-git-receive-pack-request";
    let request = client.post(url).header("content-type", kind).body(body);
    request.send().await.unwrap().text().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn pushes_of_a_session_begin_one_by_one() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    let ids: Vec<_> = (1..=8).map(|number| format!("{number:040x}")).collect();
    let none = "0".repeat(40);
    let pushes = ids.iter().map(|id| push_without_objects(&setup, &none, id));
    let answers = futures_util::future::join_all(pushes).await;
    assert!(answers.iter().all(|answer| answer.contains("unpack")), "{answers:?}");
    assert_eq!(*setup.door.ledger.most_open_pushes.lock().unwrap(), 1);
    assert!(setup.door.ledger.pushed.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn push_to_locked_remote_claims_no_commit() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.forge.set_token("app", &Secret::new("another".to_owned())).unwrap();
    let answer = push_without_objects(&setup, &"0".repeat(40), &"1".repeat(40)).await;
    assert!(answer.contains("refused the token"), "{answer}");
    assert_eq!(*setup.door.ledger.most_open_pushes.lock().unwrap(), 1, "it had begun");
    assert!(setup.door.ledger.pushed.lock().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn push_with_stale_tip_gives_no_lease() {
    let (setup, first) = pushed().await;
    let theirs = push_as_person(&setup).await;
    let work = setup.folder().join("work");
    git(&work, &["fetch", "-q", "origin"]).await;
    // As a hostile sandbox sends it: their commit as its own, in place of a commit of its own.
    let answer = push_without_objects(&setup, &first, &theirs).await;
    assert!(answer.contains("which this session did not push"), "{answer}");
    assert_eq!(*setup.door.ledger.pushed.lock().unwrap(), [first]);
}

#[tokio::test(flavor = "multi_thread")]
async fn push_refused_by_remote_is_not_recorded() {
    let (setup, first) = pushed().await;
    let bare = setup.forge.repository_path("app").unwrap();
    git(&bare, &["config", "receive.denyNonFastForwards", "true"]).await;
    git(&setup.folder().join("work"), &["commit", "-q", "--amend", "-m", "rewritten"]).await;
    let (ok, output) =
        git(&setup.folder().join("work"), &["push", "--force", "origin", &own()]).await;
    assert!(!ok, "{output}");
    assert_eq!(setup.door.ledger.events().len(), 1);
    assert_eq!(*setup.door.ledger.pushed.lock().unwrap(), [first]);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_replaced_that_cannot_be_kept() {
    let (setup, first) = pushed().await;
    let bare = setup.forge.repository_path("app").unwrap();
    git(&bare, &["config", "receive.hideRefs", "refs/harvest"]).await;
    let before = setup.remote_heads().await;
    git(&setup.folder().join("work"), &["commit", "-q", "--amend", "-m", "rewritten"]).await;
    let (ok, output) =
        git(&setup.folder().join("work"), &["push", "--force", "origin", &own()]).await;
    assert!(!ok && output.contains("does not keep the commit"), "{output}");
    assert_eq!(setup.remote_heads().await, before);
    assert_eq!(*setup.door.ledger.pushed.lock().unwrap(), [first]);
}

#[tokio::test(flavor = "multi_thread")]
async fn read_only_session_cannot_push() {
    let setup = GitSetup::new(None).await;
    setup.clone_app().await;
    let (ok, output) = setup.push(b"two", &["origin", "HEAD:main"]).await;
    assert!(!ok && output.contains("read-only access"), "{output}");
    assert!(matches!(setup.door.ledger.events()[..], [EventBody::PushRefused { .. }]));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_repositories_are_not_found() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    for name in [
        "local/secret-plans",
        "local/app.git/../secret-plans",
        "local/%61pp",
        "local/app/",
        "app",
        "other/app",
    ] {
        let url = format!("{}/{name}.git", setup.inside);
        let (ok, output) = git(setup.folder(), &["ls-remote", &url]).await;
        assert!(!ok && output.contains("not found"), "{name}: {output}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_token_is_explained_without_password_prompt() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    setup.forge.set_token("app", &Secret::new("another".to_owned())).unwrap();
    let (ok, output) =
        git(setup.folder(), &["ls-remote", &format!("{}/local/app.git", setup.inside)]).await;
    assert!(!ok && output.contains("harvest secret set FORGE_TOKEN"), "{output}");
    assert!(!output.contains("terminal prompts disabled") && !output.contains(TOKEN), "{output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_push_never_reaches_the_remote() {
    let setup = GitSetup::new(Some(BRANCH)).await;
    let before = setup.remote_heads().await;
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let url = format!("{}/local/app.git/git-receive-pack", setup.inside);
    let post = |body: &[u8]| {
        let request =
            client.post(&url).header("content-type", "application/x-git-receive-pack-request");
        request.body(body.to_vec()).send()
    };
    for body in [&b"zzzz"[..], b"0004", b"00010000", b"0008oops0000", b"0000PACK", b"ffff"] {
        let answered = post(body).await;
        assert!(answered.is_err() || answered.unwrap().status().as_u16() == 400, "{body:?}");
    }
    let compressed =
        client.post(&url).header("content-encoding", "gzip").body("x").send().await.unwrap();
    assert_eq!(compressed.status(), 415);
    // The probe that git sends before a large push: no commands.
    assert_eq!(post(b"0000").await.unwrap().status(), 200);
    let answered = client.get(format!("{}/local/app.git/HEAD", setup.inside)).send().await.unwrap();
    assert_eq!(answered.status(), 404);
    assert_eq!(setup.remote_heads().await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_is_checked_from_the_host() {
    let setup = GitSetup::new(None).await;
    let gateway = &setup.door.gateway;
    let access = GitAccess {
        name: "local/app".parse().unwrap(),
        url: setup.forge.url("app"),
        local: true,
        secret: Some("FORGE_TOKEN".into()),
        branch: None,
    };
    assert_eq!(gateway.check_remote(&access, &[]).await, Ok(()));
    let tip = gateway.tip(&access, &[], Some("main")).await.flatten().unwrap();
    assert_eq!(gateway.tip(&access, &[], None).await, Some(Some(tip)));
    assert_eq!(gateway.tip(&access, &[], Some("mai")).await, Some(None));
    let wrong = |url: String, secret: Option<&str>| GitAccess {
        url,
        secret: secret.map(str::to_owned),
        ..access.clone()
    };
    let missing = wrong(setup.forge.url("nope"), Some("FORGE_TOKEN"));
    for (access, why) in [
        // The forge does not say which repositories it has.
        (missing, "refused the token"),
        (wrong(setup.forge.url("app"), None), "needs a token"),
        (wrong(setup.forge.url("app"), Some("NOPE")), "secret NOPE for repository"),
        (wrong("http://127.0.0.1:1/app.git".into(), None), "cannot reach"),
    ] {
        let error = gateway.check_remote(&access, &[]).await.unwrap_err();
        assert!(error.contains(why), "{error}");
        assert_eq!(gateway.tip(&access, &[], Some("main")).await, None);
    }
}

/// A listener on loopback that counts its connections.
async fn counting_server() -> (u16, std::sync::Arc<std::sync::atomic::AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let dialled = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&dialled);
    tokio::spawn(async move {
        while listener.accept().await.is_ok() {
            counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        }
    });
    (port, dialled)
}

#[tokio::test(flavor = "multi_thread")]
async fn remote_at_private_address_is_never_dialled() {
    let (port, dialled) = counting_server().await;
    let count = || dialled.load(std::sync::atomic::Ordering::SeqCst);
    let address = std::net::SocketAddr::from(([127, 0, 0, 1], port));
    for (host, allowed) in [
        ("127.0.0.1", vec![]),
        ("loc%61lhost", vec![]),
        ("rebinding.example", vec![]),
        ("rebinding.example", vec!["rebinding.example".to_owned()]),
    ] {
        let expected = !allowed.is_empty();
        let mut policy = policy(&[]);
        policy.repositories = vec![GitAccess {
            name: "local/app".parse().unwrap(),
            url: format!("http://{host}:{port}/app.git"),
            local: false,
            secret: None,
            branch: None,
        }];
        let config = GatewayConfig {
            pinned: [("rebinding.example".to_owned(), address)].into(),
            private_hosts: PrivateHosts::new(allowed),
            ..GatewayConfig::default()
        };
        let door = TestDoor::new(RecordingLedger::default(), config, policy);
        let inside = door.inside(GIT_NAME, 80).await;
        let url = format!("http://{inside}/local/app.git/info/refs?service=git-upload-pack");
        let client = reqwest::Client::builder().no_proxy().build().unwrap();
        let answered = client.get(url).send().await.unwrap();
        let (status, text) = (answered.status(), answered.text().await.unwrap());
        assert_eq!(count() > 0, expected, "{host}: {text}");
        if !expected {
            assert!(status == 403 && text.contains("private_hosts"), "{host}: {status} {text}");
            let events = door.ledger.events();
            assert!(matches!(&events[..], [EventBody::EgressRefused { .. }]), "{events:?}");
        }
    }
}
