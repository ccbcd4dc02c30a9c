//! The local forge with the real git, over loopback.
#![expect(clippy::unwrap_used, reason = "tests panic on failure")]

#[path = "forge/clients.rs"]
mod clients;
#[path = "forge/emulate.rs"]
mod emulate;
#[path = "forge/github.rs"]
mod github;
#[path = "forge/hooks.rs"]
mod hooks;
#[path = "forge/hostile_github.rs"]
mod hostile_github;
#[path = "forge/import.rs"]
mod import;
#[path = "forge/octocrab.rs"]
mod octocrab;
#[path = "forge/rest.rs"]
mod rest;
#[path = "forge/rest_host.rs"]
mod rest_host;

use std::{fs, path::Path};

use axum::Router;
use harvest_forge::{Forge, ForgeFailure, LocalForge, PullRequestSpec, RemoteRepository};
use harvest_proto::{
    Secret, Timestamp,
    api::{CheckOutcome, Evidence, PullRequest, PullRequestState},
    bridge::Exit,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Command,
};

const TOKEN: &str = "s3cret-t0ken";

struct Host {
    folder: TempDir,
    forge: LocalForge,
    address: String,
}

impl Host {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let forge =
            LocalForge::open(folder.path().join("forge"), &format!("http://{address}/forge"))
                .unwrap();
        forge.create("app", &Secret::new(TOKEN.to_owned())).await.unwrap();
        let router = Router::new().nest("/forge", forge.router());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { folder, forge, address }
    }

    fn url(&self, token: &str) -> String {
        format!("http://x-access-token:{token}@{}/forge/local/app.git", self.address)
    }

    async fn git(&self, folder: &str, arguments: &[&str]) -> Result<String, String> {
        let folder = self.folder.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        git(&folder, arguments).await
    }

    /// A checkout with one commit on `main`, pushed.
    async fn pushed(&self) {
        self.git("work", &["init", "-q", "-b", "main"]).await.unwrap();
        self.commit("one").await;
        self.git("work", &["push", "-q", &self.url(TOKEN), "main"]).await.unwrap();
    }

    async fn commit(&self, name: &str) -> String {
        fs::write(self.folder.path().join("work").join(name), name).unwrap();
        self.git("work", &["add", "-A"]).await.unwrap();
        self.git("work", &["commit", "-q", "--allow-empty", "-m", name]).await.unwrap();
        self.git("work", &["rev-parse", "HEAD"]).await.unwrap().trim().to_owned()
    }

    async fn push_branch(&self, branch: &str) -> String {
        self.git("work", &["checkout", "-q", "-B", branch]).await.unwrap();
        let commit = self.commit(&format!("file-{}", branch.replace('/', "-"))).await;
        self.git("work", &["push", "-q", &self.url(TOKEN), branch]).await.unwrap();
        commit
    }

    async fn http(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    async fn get(&self, path: &str, headers: &str) -> String {
        self.http(&format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n"))
            .await
    }
}

async fn git(folder: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("git")
        .args(["-c", "user.name=T", "-c", "user.email=t@example.org", "-c", "http.proxy="])
        .args(arguments)
        .current_dir(folder)
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_TERMINAL_PROMPT", "0")
        .env_remove("GIT_SSL_CAINFO")
        .output()
        .await
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(stderr)
    }
}

fn basic() -> String {
    use base64::Engine;
    let credentials = base64::prelude::BASE64_STANDARD.encode(format!("any:{TOKEN}"));
    format!("Authorization: Basic {credentials}\r\n")
}

impl Host {
    fn remote(&self) -> RemoteRepository {
        RemoteRepository { url: self.forge.url("app"), token: None }
    }

    async fn open(&self, branch: &str) -> Result<PullRequest, ForgeFailure> {
        let spec = PullRequestSpec {
            title: "A <b>title</b>".to_owned(),
            body: "What it does".to_owned(),
            branch: branch.parse().unwrap(),
            base: "main".parse().unwrap(),
            draft: false,
        };
        self.forge.open_pull_request(&self.remote(), spec).await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pushed_commits_can_be_cloned() {
    let host = Host::new().await;
    host.pushed().await;
    host.git(".", &["clone", "-q", &host.url(TOKEN), "copy"]).await.unwrap();
    assert_eq!(fs::read_to_string(host.folder.path().join("copy/one")).unwrap(), "one");
}

#[tokio::test(flavor = "multi_thread")]
async fn clone_checks_out_the_only_branch() {
    let host = Host::new().await;
    host.git("work", &["init", "-q", "-b", "trunk"]).await.unwrap();
    host.commit("one").await;
    host.git("work", &["push", "-q", &host.url(TOKEN), "trunk"]).await.unwrap();
    host.git(".", &["clone", "-q", &host.url(TOKEN), "copy"]).await.unwrap();
    assert!(host.folder.path().join("copy/one").is_file());
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_requires_the_token() {
    let host = Host::new().await;
    host.pushed().await;
    assert!(host.git(".", &["clone", "-q", &host.url("wrong"), "copy"]).await.is_err());
    let anonymous = format!("http://{}/forge/local/app.git", host.address);
    assert!(host.git(".", &["ls-remote", &anonymous]).await.is_err());
    for path in [
        "/forge/local/app.git/info/refs?service=git-upload-pack",
        "/forge/local/missing.git/info/refs?service=git-upload-pack",
        "/forge/local/..%2fapp.git/info/refs?service=git-upload-pack",
        "/forge/local/app/pr",
        "/forge/local/app/pr/1",
    ] {
        let answer = host.get(path, "").await;
        assert!(answer.starts_with("HTTP/1.1 401 "), "{path}: {answer}");
        assert!(answer.ends_with("requires its access token\n"), "{path}: {answer}");
        assert!(answer.to_ascii_lowercase().contains("www-authenticate: basic"), "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dumb_http_protocol_is_not_served() {
    let host = Host::new().await;
    host.pushed().await;
    for path in [
        "/forge/local/app.git/HEAD",
        "/forge/local/app.git/config",
        "/forge/local/app/token",
        "/forge/local/app.git/objects/info/packs",
    ] {
        assert!(host.get(path, &basic()).await.starts_with("HTTP/1.1 404 "), "{path}");
    }
    assert!(
        host.get("/forge/local/app.git/info/refs", &basic()).await.starts_with("HTTP/1.1 403 ")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn push_larger_than_gits_buffer_succeeds() {
    let host = Host::new().await;
    host.pushed().await;
    // Incompressible and larger than http.postBuffer (1 MiB), so git uses chunked encoding.
    let noise: Vec<u8> = (0u64..1 << 19)
        .flat_map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i << 7).to_le_bytes())
        .collect();
    fs::write(host.folder.path().join("work/noise"), noise).unwrap();
    let commit = host.commit("two").await;
    host.git("work", &["push", "-q", &host.url(TOKEN), "main"]).await.unwrap();
    let remote =
        host.git("work", &["ls-remote", &host.url(TOKEN), "refs/heads/main"]).await.unwrap();
    assert!(remote.starts_with(&commit));
}

#[tokio::test(flavor = "multi_thread")]
async fn force_push_is_taken_as_at_github() {
    let host = Host::new().await;
    host.pushed().await;
    host.git("work", &["commit", "-q", "--amend", "-m", "other"]).await.unwrap();
    assert!(host.git("work", &["push", "-q", &host.url(TOKEN), "main"]).await.is_err());
    host.git("work", &["push", "-q", "--force", &host.url(TOKEN), "main"]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_during_push_leaves_no_process() {
    let host = Host::new().await;
    host.pushed().await;
    let mut stream = TcpStream::connect(&host.address).await.unwrap();
    let head = format!(
        "POST /forge/local/app.git/git-receive-pack HTTP/1.1\r\nHost: x\r\n{}Content-Type: application/x-git-receive-pack-request\r\nContent-Length: 100000\r\n\r\n",
        basic()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let folder = host.folder.path().join("forge/app");
    until(|| processes_for(&folder) > 0).await;
    drop(stream);
    until(|| processes_for(&folder) == 0).await;
}

async fn until(condition: impl Fn() -> bool) {
    let reached = async {
        while !condition() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), reached)
        .await
        .expect("condition not met within 60 seconds");
}

fn processes_for(folder: &Path) -> usize {
    let needle = format!("GIT_PROJECT_ROOT={}", fs::canonicalize(folder).unwrap().display());
    let processes = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    let environments = processes.filter_map(|entry| fs::read(entry.path().join("environ")).ok());
    environments
        .filter(|bytes| bytes.windows(needle.len()).any(|part| part == needle.as_bytes()))
        .count()
}

#[tokio::test(flavor = "multi_thread")]
async fn branch_has_one_open_pull_request() {
    let host = Host::new().await;
    host.pushed().await;
    let first = host.push_branch("harvest/a").await;
    let opened = host.open("harvest/a").await.unwrap();
    assert_eq!((opened.number, &opened.commit, opened.state), (1, &first, PullRequestState::Open));
    assert_eq!(opened.url, format!("http://{}/forge/local/app/pr/1", host.address));
    host.forge.set_evidence("app", 1, evidence(&first)).await.unwrap();
    let same = host.open("harvest/a").await.unwrap();
    assert_eq!((same.number, same.evidence), (1, Some(evidence(&first))));
    let second = host.push_branch("harvest/a").await;
    assert_ne!(first, second);
    let moved = host.open("harvest/a").await.unwrap();
    assert_eq!((moved.number, moved.commit, moved.evidence), (1, second, None));
    host.push_branch("harvest/b").await;
    assert_eq!(host.open("harvest/b").await.unwrap().number, 2);
    assert_eq!(host.forge.pull_requests("app").await.unwrap().len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn pull_request_needs_branches_and_new_commits() {
    let host = Host::new().await;
    host.pushed().await;
    let refused = async |branch| host.open(branch).await.unwrap_err();
    for (branch, expected) in [("none", "no branch `none`"), ("main", "no commits that")] {
        let refused = refused(branch).await;
        assert!(!refused.is_brief() && refused.to_string().contains(expected), "{refused}");
    }
    let missing = Forge::pull_request(&host.forge, &host.remote(), 1).await;
    assert!(matches!(missing, Err(ForgeFailure::NoPullRequest { number: 1 })));
}

#[tokio::test(flavor = "multi_thread")]
async fn merged_pull_request_is_not_reused() {
    let host = Host::new().await;
    host.pushed().await;
    host.push_branch("harvest/a").await;
    host.open("harvest/a").await.unwrap();
    host.git("work", &["push", "-q", &host.url(TOKEN), "harvest/a:main"]).await.unwrap();
    assert_eq!(host.forge.pull_request("app", 1).await.unwrap().state, PullRequestState::Merged);
    host.push_branch("harvest/a").await;
    host.commit("more").await;
    host.git("work", &["push", "-q", &host.url(TOKEN), "harvest/a"]).await.unwrap();
    assert_eq!(host.open("harvest/a").await.unwrap().number, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn pull_request_is_served_as_json_and_html() {
    let host = Host::new().await;
    host.pushed().await;
    let commit = host.push_branch("harvest/a").await;
    host.open("harvest/a").await.unwrap();
    host.forge.set_evidence("app", 1, evidence(&commit)).await.unwrap();
    let json = host.get("/forge/local/app/pr/1", &basic()).await;
    assert!(json.contains(&format!("\"commit\":\"{commit}\"")), "{json}");
    let page =
        host.get("/forge/local/app/pr/1", &format!("{}Accept: text/html\r\n", basic())).await;
    assert!(page.contains("A &lt;b&gt;title&lt;/b&gt;") && !page.contains("<b>title"), "{page}");
    assert!(
        page.contains("file-harvest-a")
            && page.contains("1 file changed")
            && page.contains("make check"),
        "{page}"
    );
    assert!(
        page.to_ascii_lowercase().contains("content-security-policy: default-src 'none'"),
        "{page}"
    );
}

fn evidence(commit: &str) -> Evidence {
    Evidence {
        repository: "local/app".parse().unwrap(),
        commit: commit.to_owned(),
        check: "make check".to_owned(),
        command: ".harvest/check.sh".into(),
        base: None,
        base_commit: None,
        changed: Vec::new(),
        changed_count: 0,
        snapshot_id: None,
        outcome: CheckOutcome::Passed,
        exit: Exit::Code(0),
        millis: 12,
        tail: "ok".to_owned(),
        at: Timestamp::from_millis(0),
    }
}

#[tokio::test]
async fn malformed_objects_are_refused() {
    let host = Host::new().await;
    host.pushed().await;
    // A tree with an entry named `.git`, which would overwrite a clone's configuration.
    let script = "tree=$(printf '100644 blob %s\\t.git\\n' $(git rev-parse HEAD:one) | git mktree); \
                  git commit-tree $tree -p HEAD -m bad";
    let alias = format!("alias.bad=!{script}");
    let commit = host.git("work", &["-c", &alias, "bad"]).await.unwrap();
    let target = format!("{}:refs/heads/bad", commit.trim());
    let refused = host.git("work", &["push", "-q", &host.url(TOKEN), &target]).await.unwrap_err();
    assert!(refused.contains("hasDotgit"), "{refused}");
}
