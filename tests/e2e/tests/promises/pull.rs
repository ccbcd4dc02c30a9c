//! `harvest pull`: a session's commits come home as a branch, and nothing else changes there,
//! whatever the session's repository contains.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use harvest_e2e::{Host, Ran};
use harvest_proto::{SessionId, api::SessionState, bridge::Exit};
use serde_json::{Value, json};

use crate::{SAMPLE, completed};

/// Makes every way by which a repository runs programs create a file on the host.
fn hostile(trap: &Path) -> String {
    let trap = trap.display();
    let configured: String = [
        "core.fsmonitor",
        "core.sshCommand",
        "core.pager",
        "core.editor",
        "uploadpack.packObjectsHook",
        "filter.x.clean",
        "filter.x.smudge",
        "diff.external",
        "gpg.program",
    ]
    .map(|key| format!("git config {key} 'touch {trap}; cat'; "))
    .concat();
    format!(
        "{configured} echo '* filter=x' > .gitattributes; mkdir -p .git/hooks; for hook in \
         reference-transaction post-checkout post-merge pre-push post-update; do printf \
         '#!/bin/sh\\ntouch {trap}\\n' > .git/hooks/$hook; chmod +x .git/hooks/$hook; done"
    )
}

fn git(folder: &Path, arguments: &[&str]) -> String {
    let ran = Command::new("git")
        .args(["-c", "user.name=Ada", "-c", "user.email=ada@example.org"])
        .current_dir(folder)
        .args(arguments)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{arguments:?}: {ran:?}");
    String::from_utf8(ran.stdout).unwrap().trim().to_owned()
}

/// All that a pull must not change.
fn state(folder: &Path) -> (String, String, String, Vec<u8>) {
    let status = git(folder, &["status", "--porcelain"]);
    let (head, main) =
        (git(folder, &["symbolic-ref", "HEAD"]), git(folder, &["rev-parse", "main"]));
    (status, head, main, fs::read(folder.join(".git/index")).unwrap())
}

/// A session with a commit that is not pushed and a file that is not committed.
async fn committed(host: &Host, prepare: &str) -> (SessionId, PathBuf) {
    host.repository("calc", SAMPLE).await;
    let work = format!("echo '# ours' >> calc.py; git commit -qam ours; echo x > new; {prepare}");
    let session = host.scripted("calc", "Begin.", &json!([{ "bash": work }])).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    (session, host.home().join("sources/calc"))
}

fn pull(host: &Host, session: &SessionId, more: &[&str]) -> Ran {
    let session = session.to_string();
    host.harvest([&["pull", session.as_str()], more].concat())
}

#[tokio::test]
async fn commits_come_home_and_nothing_else_changes() {
    let host = Host::start().await;
    let trap = host.home().join("trap");
    let (session, folder) = committed(&host, &hostile(&trap)).await;
    fs::write(folder.join("calc.py"), "mine\n").unwrap();
    git(&folder, &["add", "calc.py"]);
    let before = state(&folder);
    let pulled = pull(&host, &session, &["--json"]);
    assert_eq!(pulled.code, 0, "{pulled:?}");
    let shown: Value = serde_json::from_str(&pulled.stdout).unwrap();
    let branch = shown["branch"].as_str().unwrap();
    assert_eq!((&shown["commits"], &shown["change"]), (&json!(1), &json!("created")));
    assert_eq!(git(&folder, &["log", "-1", "--format=%s", branch]), "ours");
    assert_eq!(shown["commit"].as_str(), Some(git(&folder, &["rev-parse", branch]).as_str()));
    assert!(pulled.stderr.contains("uncommitted changes in the session are not brought"));
    assert_eq!(state(&folder), before);
    let again = pull(&host, &session, &["-r", "calc"]);
    assert!(again.stdout.contains("is up to date at"), "{again:?}");

    // The branch has other commits now, and is checked out elsewhere.
    let other = host.home().join("elsewhere");
    git(&folder, &["worktree", "add", "-q", other.to_str().unwrap(), branch]);
    git(&other, &["commit", "-q", "--amend", "-m", "mine"]);
    let mine = git(&folder, &["rev-parse", branch]);
    let refused = pull(&host, &session, &[]);
    assert!(refused.code == 1 && refused.stderr.contains("is checked out in"), "{refused:?}");
    git(&other, &["switch", "-q", "--detach"]);
    let refused = pull(&host, &session, &[]);
    assert!(refused.code == 1 && refused.stderr.contains("has commits that"), "{refused:?}");
    assert!(refused.stderr.contains("--as NAME"), "{refused:?}");
    let named = pull(&host, &session, &["--as", "theirs"]);
    assert_eq!(named.code, 0, "{named:?}");
    assert_eq!(git(&folder, &["rev-parse", branch]), mine);

    // From the snapshot of a paused session, and from a server elsewhere into another clone.
    let more = "cd /workspace/calc && git -c core.hooksPath=/dev/null -c user.name=A -c \
                user.email=a@b.c commit -q --allow-empty -m more";
    let (exit, output) = host.exec(&session, "harvest", more).await;
    assert_eq!(exit, Exit::Code(0), "{output}");
    let paused = host.harvest(["pause", &session.to_string()]);
    assert_eq!(paused.code, 0, "{paused:?}");
    host.wait_for(&session, SessionState::Paused).await;
    let clone = host.home().join("clone");
    git(host.home(), &["clone", "-q", folder.to_str().unwrap(), "clone"]);
    let (url, token) = (host.url().unwrap(), host.token());
    let env = [("HARVEST_URL", url.as_str()), ("HARVEST_TOKEN", token.as_str())];
    let into = ["pull", &session.to_string(), "--into", clone.to_str().unwrap()];
    let remote = host.harvest_with(&env, into);
    assert_eq!(remote.code, 0, "{remote:?}");
    assert_eq!(git(&clone, &["log", "-2", "--format=%s", branch]), "more\nours");
    assert_eq!(host.show(&session).await.state, SessionState::Paused);
    assert_eq!(state(&folder), before);
    assert!(!trap.exists(), "a program of the session's repository ran on the host");
}

#[tokio::test]
async fn malformed_objects_of_a_session_are_refused() {
    let host = Host::start().await;
    let evil = "blob=$(git hash-object -w calc.py); tree=$(printf \"100644 blob $blob\\t.git\\n\" | \
                git mktree); git update-ref HEAD $(git commit-tree $tree -p HEAD -m evil)";
    let (session, folder) = committed(&host, evil).await;
    let before = (state(&folder), git(&folder, &["for-each-ref"]));
    let refused = pull(&host, &session, &[]);
    assert_eq!(refused.code, 1, "{refused:?}");
    assert!(refused.stderr.contains("git refused the session's objects"), "{refused:?}");
    assert_eq!((state(&folder), git(&folder, &["for-each-ref"])), before);
}

#[tokio::test]
async fn pull_without_commits_or_folder_says_next_command() {
    let host = Host::start().await;
    host.repository("calc", SAMPLE).await;
    let edit = json!([{ "bash": "echo x > new" }]);
    let session = host.scripted("calc", "Begin.", &edit).await.id;
    host.follow(session.clone()).until("the turn", completed).await;
    host.wait_for(&session, SessionState::Idle).await;
    let nothing = pull(&host, &session, &[]);
    assert!(nothing.code == 1 && nothing.stderr.contains("no commits of its own"), "{nothing:?}");
    assert!(nothing.stderr.contains("1 file with uncommitted changes"), "{nothing:?}");
    let plain = host.home().join("plain");
    fs::create_dir(&plain).unwrap();
    let no_git = pull(&host, &session, &["--into", plain.to_str().unwrap()]);
    assert!(no_git.code == 1 && no_git.stderr.contains("is not a git repository"), "{no_git:?}");
    let bare = host.bare("Begin.", &json!([{ "text": "x" }])).await.id;
    host.follow(bare.clone()).until("the turn", completed).await;
    let none = pull(&host, &bare, &[]);
    assert!(none.code == 1 && none.stderr.contains("the session has no repository"), "{none:?}");
}
