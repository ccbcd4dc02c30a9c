//! A session's primary checkout, looked at and prepared by commands over the bridge.

use std::collections::BTreeMap;

use harvest_proto::bridge::Command;
use harvest_store::Write;

use crate::bridge::{Bridge, BridgeError, Output};

// What the ancestors keep of a diff: enough for a person, not for a generated file.
const DIFF_BYTES: usize = 1024 * 1024;

// Git on a large checkout with a cold cache; beyond that the machine is in trouble.
const GIT_LIMIT_MILLIS: u64 = 60_000;

// Untracked files are part of the work, so they are added to a copy of the index, never to the agent's own.
const DIFF: &str = r#"
index=$(mktemp) && rm -f "$index" && trap 'rm -f "$index"' EXIT
cp "$(git rev-parse --git-dir)/index" "$index" 2>/dev/null
export GIT_INDEX_FILE="$index"
git add -A -N . && git diff --no-color --no-ext-diff --no-textconv "$1" --
"#;

const RENAME: &str = r#"
current=$(git symbolic-ref -q --short HEAD)
[ "$current" = "$1" ] && exit 0
if [ -n "$current" ]; then git branch -M "$1"; else git checkout -q -B "$1"; fi || exit 1
git branch --unset-upstream 2>/dev/null
exit 0
"#;

// The hash git gives a tree with nothing in it.
pub(crate) const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";

/// Why a checkout could not be prepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("git cannot be asked")]
    Bridge(#[from] BridgeError),
    #[error("the branch `{branch}` cannot be made: {tail}")]
    Branch { branch: String, tail: String },
}

/// Where a repository's checkout is.
pub(crate) fn folder(repository: &str) -> String {
    format!("/workspace/{repository}")
}

/// A command of ours, run as the agent's user so that it can do no more than the agent could.
pub(crate) fn command(argv: &[&str], folder: &str, timeout_millis: u64) -> Command {
    Command {
        argv: argv.iter().map(|&part| part.to_owned()).collect(),
        env: BTreeMap::new(),
        cwd: Some(folder.to_owned()),
        user: Some("harvest".to_owned()),
        timeout_millis: Some(timeout_millis),
        ..Command::default()
    }
}

async fn git(bridge: &Bridge, argv: &[&str], folder: &str) -> Result<Output, BridgeError> {
    bridge.run_command(command(argv, folder, GIT_LIMIT_MILLIS), 4096).await
}

async fn line(bridge: &Bridge, argv: &[&str], folder: &str) -> Result<Option<String>, BridgeError> {
    let output = git(bridge, argv, folder).await?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok(Some(text).filter(|text| output.ok() && !text.is_empty()))
}

/// The commit that is checked out.
pub(crate) async fn head(bridge: &Bridge, folder: &str) -> Result<Option<String>, BridgeError> {
    line(bridge, &["git", "rev-parse", "--verify", "HEAD"], folder).await
}

/// Gives the checkout the session's own branch, when it needs one, and looks what the session starts
/// from, when that is not known.
pub(crate) async fn prepare(
    bridge: &Bridge,
    folder: &str,
    branch: Option<&str>,
    look: bool,
) -> Result<Vec<Write>, PrepareError> {
    if let Some(branch) = branch {
        let renamed = git(bridge, &["sh", "-c", RENAME, "sh", branch], folder).await?;
        if !renamed.ok() {
            return Err(PrepareError::Branch { branch: branch.to_owned(), tail: renamed.tail() });
        }
    }
    let mut writes = Vec::new();
    if look {
        if let Some(commit) = head(bridge, folder).await? {
            writes.push(Write::BaseCommit(commit));
        }
        let default = ["git", "symbolic-ref", "--short", "refs/remotes/origin/HEAD"];
        if let Some(base) = line(bridge, &default, folder).await? {
            writes.push(Write::DefaultBase(base.trim_start_matches("origin/").to_owned()));
        }
    }
    Ok(writes)
}

/// The session's work: everything that differs from where it started.
pub(crate) async fn diff(bridge: &Bridge, folder: &str, base: Option<&str>) -> Result<String, BridgeError> {
    let base = base.unwrap_or(EMPTY_TREE);
    let order = command(&["sh", "-c", DIFF, "sh", base], folder, GIT_LIMIT_MILLIS);
    let output = bridge.run_command(order, DIFF_BYTES).await?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.cut {
        text.push_str("\n… the rest of the diff is left out\n");
    }
    Ok(text)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{path::Path, process::Command};

    use super::*;

    /// Runs a script as the sandbox would, but here, with nothing of this host's git settings.
    pub(crate) fn sh(folder: &Path, script: &str, arguments: &[&str]) -> (i32, String) {
        let output = Command::new("sh")
            .args(["-c", script, "sh"])
            .args(arguments)
            .current_dir(folder)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_NAME"), "Ada")))
            .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_EMAIL"), "ada@example.org")))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code().unwrap(), text)
    }

    /// A repository with one commit, on `main`.
    pub(crate) fn repository() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let made = "git init -q -b main && echo one > file && git add file && git commit -q -m one";
        assert_eq!(sh(folder.path(), made, &[]).0, 0);
        let head = sh(folder.path(), "git rev-parse HEAD", &[]).1.trim().to_owned();
        (folder, head)
    }

    #[test]
    fn a_diff_shows_commits_changes_and_new_files_and_leaves_the_index_alone() {
        let (folder, base) = repository();
        let work = "echo two > second && git add second && git commit -q -m two && echo x >> file && echo new > third";
        assert_eq!(sh(folder.path(), work, &[]).0, 0);
        let before = sh(folder.path(), "git status --porcelain", &[]).1;
        let (code, diff) = sh(folder.path(), DIFF, &[&base]);
        assert_eq!(code, 0);
        for shown in ["+two", "+x", "+new"] {
            assert!(diff.contains(shown), "{shown} is missing in {diff}");
        }
        assert_eq!(sh(folder.path(), "git status --porcelain", &[]).1, before);
    }

    #[test]
    fn a_repository_without_a_commit_is_compared_with_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(sh(folder.path(), "git init -q && echo new > file", &[]).0, 0);
        let (code, diff) = sh(folder.path(), DIFF, &[EMPTY_TREE]);
        assert!(code == 0 && diff.contains("+new"), "{code}: {diff}");
    }

    #[test]
    fn a_fork_gets_its_own_branch_wherever_its_checkout_stands() {
        for before in ["git checkout -q -b harvest/old", "git checkout -q --detach"] {
            let (folder, _) = repository();
            assert_eq!(sh(folder.path(), before, &[]).0, 0);
            for _ in 0..2 {
                assert_eq!(sh(folder.path(), RENAME, &["harvest/new"]).0, 0);
                let now = sh(folder.path(), "git symbolic-ref --short HEAD", &[]).1;
                assert_eq!(now.trim(), "harvest/new");
            }
        }
    }
}
