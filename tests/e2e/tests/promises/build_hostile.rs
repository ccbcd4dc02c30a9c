//! Builds of hostile repositories. Nothing of them runs on the host, where git reads none of their
//! settings; the last good build stays; and nothing of a failed build is left behind.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use harvest_e2e::{Host, Ran, until};
use harvest_proto::{SessionId, api::SessionState};
use serde_json::{Value, json};

use crate::{
    build_faults::json, completed, faults_host::SmallDisk, image_refresh::Cache,
    repository_config::add,
};

fn build(host: &Host) -> Ran {
    host.harvest(["repo", "build", "shop"])
}

/// The build that sessions start from.
fn current(host: &Host) -> Value {
    json(host, &["repo", "show", "shop"])["build"].clone()
}

/// No build is in progress, and no sandbox is left.
fn assert_over(host: &Host) {
    let builds = json(host, &["repo", "builds", "shop"]);
    assert!(builds.as_array().unwrap().iter().all(|one| one["status"] != "building"), "{builds}");
    let sandboxes = json(host, &["sandbox", "ls"]);
    assert_eq!(sandboxes.as_array().map(Vec::len), Some(0), "{sandboxes}");
}

/// Runs git in the folder of the repository.
fn git(folder: &Path, arguments: &[&str], stdin: &str) -> String {
    let mut git = Command::new("git");
    git.args(["-c", "user.name=T", "-c", "user.email=t@example.org"]).current_dir(folder);
    git.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut git = git.spawn().unwrap();
    std::io::Write::write_all(&mut git.stdin.take().unwrap(), stdin.as_bytes()).unwrap();
    let done = git.wait_with_output().unwrap();
    assert!(done.status.success(), "git {arguments:?}");
    String::from_utf8(done.stdout).unwrap().trim().to_owned()
}

/// A folder of the host that every program may write to, which no sandbox has.
struct Canary(PathBuf);

impl Canary {
    fn new(host: &Host) -> Self {
        let folder = host.home().join("canary");
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let canary = Self(folder);
        let program = canary.0.parent().unwrap().join("evil");
        fs::write(&program, canary.program()).unwrap();
        let ran = Command::new("sh").arg(&program).stdin(Stdio::null()).status().unwrap();
        assert!(ran.success() && canary.has_sung(), "the program shows where it runs");
        fs::remove_file(canary.0.join("ran")).unwrap();
        canary
    }

    /// A program that leaves a mark where it runs, and passes its input on, as a filter has to.
    fn program(&self) -> String {
        let folder = self.0.display();
        format!("#!/bin/sh\ntouch {folder}/ran 2>/dev/null\ntouch ~/ran 2>/dev/null\nexec cat\n")
    }

    fn has_sung(&self) -> bool {
        fs::read_dir(&self.0).unwrap().next().is_some()
    }
}

/// Makes git run the program wherever its configuration names programs.
const PROGRAMS: &str = r#"
git config filter.evil.clean ~/evil; git config filter.evil.smudge ~/evil
git config diff.evil.textconv ~/evil; git config merge.evil.driver ~/evil
for key in core.fsmonitor core.sshCommand core.pager core.editor core.askPass core.gitProxy \
    core.alternateRefsCommand diff.external gpg.program uploadpack.packObjectsHook \
    remote.origin.uploadpack remote.origin.receivepack credential.helper sequence.editor; do
  git config $key ~/evil
done
git config url.ext::$HOME/evil.insteadOf http://git.harvest.internal/
git config protocol.ext.allow always; git config core.hooksPath ~/hooks
mkdir -p ~/hooks .git/info
for hook in post-checkout post-merge post-rewrite pre-commit pre-push pre-auto-gc \
    post-index-change reference-transaction update pre-receive post-receive; do
  cp ~/evil ~/hooks/$hook; cp ~/evil .git/hooks/$hook
done
echo '* filter=evil diff=evil merge=evil' > .git/info/attributes
"#;

/// Names and kinds of files in `.git` that mislead careless code.
const FILES: &str = r#"
printf 'x' > "$(printf '.git/refs/heads/\001\033[31m')"; mkdir -p .git/.GIT .git/git~1
echo CANARY > .git/objects/info/alternates; ln -sf /dev/zero .git/FETCH_HEAD
ln -sf CANARY/ran .git/ORIG_HEAD; ln -sf CANARY/ran .git/COMMIT_EDITMSG; rm -rf .git/logs
ln -s CANARY .git/logs
"#;

/// A `.git` that names a folder of the host.
const ABROAD: &str = "echo CANARY > .git/commondir; ln -sf CANARY/ran .git/config";

/// A `.git` that is none, with one around the checkout.
const ELSEWHERE: &str = r#"
cp -a .git ../.git; rm -rf .git; echo 'gitdir: CANARY' > .git
git -C .. config core.fsmonitor ~/evil; git -C .. config filter.evil.clean ~/evil
"#;

#[tokio::test]
async fn hostile_git_folder_runs_nothing_on_the_host() {
    let host = Host::start().await;
    let canary = Canary::new(&host);
    add(&host, &[("file", "1"), (".gitattributes", "*.lfs filter=lfs\n* filter=evil ident\n")]);
    assert_eq!(build(&host).code, 0);
    for (number, hostile) in [PROGRAMS, FILES, ABROAD, ELSEWHERE].into_iter().enumerate() {
        let hostile = hostile.replace("CANARY", canary.0.to_str().unwrap());
        let evil = format!(
            "cat > ~/evil <<'END'\n{}END\nchmod +x ~/evil\n{hostile}\ntrue\n",
            canary.program()
        );
        add(&host, &[(".harvest/setup.sh", &evil), ("file", &format!("{number}\n"))]);
        let first = build(&host);
        // The next build continues with what the script has left, if there is a disk.
        let kept = current(&host);
        add(&host, &[("file", &format!("{number} again\n"))]);
        let second = build(&host);
        for built in [&first, &second] {
            assert!(matches!(built.code, 0 | 1), "{number}: {built:?}");
            assert!(!built.stderr.contains(['\u{1}', '\u{1b}']), "{number}: {built:?}");
        }
        if second.code == 1 {
            assert_eq!(current(&host), kept, "{number}");
        }
        let ran = session(&host).await;
        // The control: in the sandbox, git does run them.
        assert!(number != 0 || ran, "the programs are run inside");
        assert!(!canary.has_sung(), "{number}: something ran on the host, or wrote there");
        assert_over(&host);
    }
}

/// Works in a session, and compares; returns whether a program of the repository ran in it.
async fn session(host: &Host) -> bool {
    let script = json!([{ "bash": "echo more >> file; git add file; git status; true" },
                        { "text": "done" }]);
    let id: SessionId = host.scripted("shop", "Work.", &script).await.id;
    let ended = |body: &_| completed(body) || is_failure(body);
    let last = host.follow(id.clone()).until("the turn", ended).await;
    let mut ran = false;
    if completed(&last.body) {
        host.wait_for(&id, SessionState::Idle).await;
        let _may_have_no_repository = host.harvest(["diff", &id.to_string(), "--turn", "1"]);
        ran = host.exec(&id, "harvest", "ls ~/ran").await.1.contains("ran");
    }
    let removed = host.harvest(["rm", &id.to_string(), "--yes"]);
    assert_eq!(removed.code, 0, "{removed:?}");
    ran
}

fn is_failure(body: &harvest_proto::EventBody) -> bool {
    use harvest_proto::EventBody::StateChanged;
    matches!(body, StateChanged { state: SessionState::Failed | SessionState::Paused, .. })
}

#[tokio::test]
async fn hostile_tree_names_keep_the_earlier_build() {
    let host = Host::start().await;
    add(&host, &[("file", "1")]);
    assert_eq!(build(&host).code, 0);
    let before = current(&host);
    let folder = host.home().join("sources/shop");
    let good = git(&folder, &["rev-parse", "HEAD"], "");
    let blob = git(&folder, &["hash-object", "-w", "--stdin"], "[core]\n\tfsmonitor = touch x\n");
    let tree = git(&folder, &["mktree"], &format!("100644 blob {blob}\tconfig\n"));
    for name in ["..", ".git", ".GIT", ".gIt", "git~1", "."] {
        let top = git(&folder, &["mktree"], &format!("040000 tree {tree}\t{name}\n"));
        let commit = git(&folder, &["commit-tree", &top, "-p", &good, "-m", name], "");
        git(&folder, &["update-ref", "refs/heads/main", &commit], "");
        let added = host.harvest(["repo", "add", folder.to_str().unwrap()]);
        assert_eq!(added.code, 0, "{name}: {added:?}");
        let built = build(&host);
        assert_eq!(built.code, 1, "{name}: {built:?}");
        assert!(built.stderr.contains("cannot clone or fetch"), "{name}: {built:?}");
        assert_eq!(current(&host), before, "{name}");
    }
    assert_over(&host);
}

#[tokio::test]
async fn links_in_place_of_settings_are_not_followed() {
    let host = Host::start().await;
    add(&host, &[("file", "1")]);
    assert_eq!(build(&host).code, 0);
    let folder = host.home().join("sources/shop");
    fs::write(folder.join("\u{1}\u{1b}[31mred"), "odd").unwrap();
    for (name, target) in [
        ("package.json", "/dev/zero"),
        (".nvmrc", "/etc/passwd"),
        ("requirements.txt", "../../../../etc/shadow"),
        ("Makefile", "Makefile"),
        ("pyproject.toml", "/proc/self/environ"),
    ] {
        symlink(target, folder.join(name)).unwrap();
    }
    add(&host, &[]);
    let built = build(&host);
    assert!(!built.stderr.contains("root:"), "{built:?}");
    assert!(!built.stderr.contains(['\u{1}', '\u{1b}']), "{built:?}");
    assert_over(&host);
    fs::create_dir_all(folder.join(".harvest")).unwrap();
    for name in ["config.toml", "setup.sh", "check.sh"] {
        let before = current(&host);
        let link = folder.join(".harvest").join(name);
        symlink("/dev/zero", &link).unwrap();
        add(&host, &[]);
        let built = build(&host);
        assert!(matches!(built.code, 0 | 1), "{name}: {built:?}");
        if built.code == 1 {
            assert_eq!(current(&host), before, "{name}");
        }
        assert_over(&host);
        fs::remove_file(link).unwrap();
    }
}

#[tokio::test]
async fn full_host_disk_keeps_the_earlier_build() {
    let disk = SmallDisk::new();
    // The cache of the machine would remember a home that is gone with its disk.
    let cache = Cache::with_base();
    let host = Host::start_below(&disk.place, &cache.env()).await;
    add(&host, &[("file", "1")]);
    assert_eq!(build(&host).code, 0);
    let before = current(&host);
    let free = || rustix::fs::statvfs(&disk.place).map(|disk| disk.f_bavail * disk.f_bsize);
    let free_before = free().unwrap();
    // Full in the middle of the build.
    add(&host, &[(".harvest/setup.sh", "head -c 4G /dev/zero > /workspace/large\n")]);
    let built = build(&host);
    assert_eq!(built.code, 1, "{built:?}");
    assert!(built.stderr.contains("No space left on device"), "{built:?}");
    assert!(built.stderr.contains("harvest gc"), "{built:?}");
    assert_eq!(current(&host), before);
    assert_over(&host);
    until("what it wrote to be deleted", || free_before.saturating_sub(free().unwrap()) < 64 << 20);
    // Full before it begins.
    let ballast = disk.fill();
    let built = build(&host);
    assert!(built.code == 1 && built.stderr.contains("harvest gc"), "{built:?}");
    fs::remove_file(ballast).unwrap();
    assert_eq!(current(&host), before);
    assert_over(&host);
    add(&host, &[(".harvest/setup.sh", "true\n")]);
    assert!(!session_fails(&host).await, "sessions start from the earlier build");
    let built = build(&host);
    assert_eq!(built.code, 0, "{built:?}");
}

async fn session_fails(host: &Host) -> bool {
    let id = host.scripted("shop", "Rest.", &json!([{ "text": "done" }])).await.id;
    let ended = |body: &_| completed(body) || is_failure(body);
    is_failure(&host.follow(id).until("the turn", ended).await.body)
}
