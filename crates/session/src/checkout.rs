//! Prepares and inspects a session's checkouts over the bridge.

use std::collections::BTreeMap;

use harvest_proto::{
    BranchName, RepositoryName,
    bridge::{Command, Exit, GitRequest, Reply, ToSupervisor},
    git::NO_HOOKS_ENV,
    names::InvalidBranchName,
};
use harvest_store::{CheckoutRecord, Write};

use crate::bridge::{Bridge, BridgeError};

// Enough for a person to read; generated files may exceed it.
const DIFF_BYTES: usize = 1024 * 1024;

// Enough for git on a large checkout with a cold cache.
const GIT_LIMIT_MILLIS: u64 = 60_000;

// Untracked files are part of the diff, so they are added to a copy of the index, never to the
// agent's.
const DIFF: &str = r#"
cd "$3" 2>/dev/null || exit 0
index=$(mktemp) && rm -f "$index" && trap 'rm -f "$index"' EXIT
cp "$(git rev-parse --git-dir)/index" "$index" 2>/dev/null
export GIT_INDEX_FILE="$index"
git add -A -N . && git diff --no-color --no-ext-diff --no-textconv --src-prefix="a/$2" --dst-prefix="b/$2" "$1" --
"#;

// Git's hash of the empty tree.
pub(crate) const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";

#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("cannot run git in the sandbox")]
    Bridge(#[from] BridgeError),
    #[error("cannot create branch `{branch}`: {tail}")]
    Branch { branch: BranchName, tail: String },
}

/// The folder of a repository's checkout; with an empty name, the parent of all checkouts.
pub(crate) fn folder(repository: &str) -> String {
    format!("/workspace/{repository}").trim_end_matches('/').to_owned()
}

/// A command run as the agent's user, so that it has no more rights than the agent.
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

/// A git command that ignores the agent's git settings.
pub(crate) fn git_command(argv: &[&str], folder: &str, timeout_millis: u64) -> Command {
    let env = NO_HOOKS_ENV.map(|(name, value)| (name.to_owned(), value.to_owned()));
    Command { env: env.into(), ..command(argv, folder, timeout_millis) }
}

/// The commit that is checked out and the remote's default branch.
pub(crate) async fn head(
    bridge: &Bridge,
    repository: &RepositoryName,
) -> Result<(Option<String>, Option<String>), BridgeError> {
    let request = GitRequest::Head { checkout: repository.clone() };
    match bridge.request(|id| ToSupervisor::Git { id, request }).await? {
        Reply::Head { commit, default_branch } => Ok((commit, default_branch)),
        _ => Err(BridgeError::UnexpectedReply),
    }
}

/// Fetches a branch and checks out a commit of it. True when the commit changes `.harvest`.
pub(crate) async fn check_out(
    bridge: &Bridge,
    repository: &RepositoryName,
    branch: &BranchName,
    commit: &str,
) -> Result<bool, BridgeError> {
    let (checkout, branch) = (repository.clone(), branch.clone());
    let request = GitRequest::CheckOut { checkout, branch, commit: commit.to_owned() };
    match bridge.request(|id| ToSupervisor::Git { id, request }).await? {
        Reply::CheckedOut { changed_harvest_folder } => Ok(changed_harvest_folder),
        _ => Err(BridgeError::UnexpectedReply),
    }
}

/// Puts each checkout on `branch`, if given. With `record_base`, also records the base commits that
/// are not yet known.
pub(crate) async fn prepare(
    bridge: &Bridge,
    checkouts: &[CheckoutRecord],
    branch: Option<&BranchName>,
    record_base: bool,
) -> Result<Vec<Write>, PrepareError> {
    let mut writes = Vec::new();
    for checkout in checkouts {
        let repository = &checkout.repository;
        if let Some(branch) = branch {
            let (checkout, branch) = (repository.clone(), branch.clone());
            let request = GitRequest::SetBranch { checkout, branch: branch.clone() };
            let set = bridge.request(|id| ToSupervisor::Git { id, request }).await;
            set.map_err(|error| match error {
                BridgeError::Fault(fault) => PrepareError::Branch { branch, tail: fault.message },
                other => PrepareError::Bridge(other),
            })?;
        }
        if record_base && checkout.base_commit.is_none() {
            writes.extend(base_writes(bridge, repository).await?);
        }
    }
    Ok(writes)
}

/// Records the checked-out commit and the remote's default branch.
async fn base_writes(
    bridge: &Bridge,
    repository: &RepositoryName,
) -> Result<Vec<Write>, BridgeError> {
    let (commit, base) = head(bridge, repository).await?;
    let commit =
        commit.map(|commit| Write::BaseCommit { repository: repository.to_string(), commit });
    let base = base.and_then(|base| match base.parse() {
        Ok(base) => Some(Write::DefaultBase { repository: repository.to_string(), base }),
        Err(error) => {
            let error: InvalidBranchName = error;
            tracing::warn!(%repository, %error, "cannot record the default branch");
            None
        }
    });
    Ok(commit.into_iter().chain(base).collect())
}

/// The diff of each checkout against its base commit. With several checkouts, paths start with the
/// repository's name, so that one patch in `/workspace` applies them all.
pub(crate) async fn diff(
    bridge: &Bridge,
    checkouts: &[CheckoutRecord],
) -> Result<String, BridgeError> {
    let mut whole = String::new();
    for checkout in checkouts {
        let prefix = match checkouts.len() {
            1 => String::new(),
            _ => format!("{}/", checkout.repository),
        };
        let base = checkout.base_commit.as_deref().unwrap_or(EMPTY_TREE);
        whole += &diff_of(bridge, &folder(&checkout.repository), base, &prefix).await?;
    }
    Ok(whole)
}

async fn diff_of(
    bridge: &Bridge,
    folder: &str,
    base: &str,
    prefix: &str,
) -> Result<String, BridgeError> {
    let script = ["sh", "-c", DIFF, "sh", base, prefix, folder];
    let order = git_command(&script, &self::folder(""), GIT_LIMIT_MILLIS);
    let output = bridge.run_command(order, DIFF_BYTES).await?;
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.truncated {
        text.push_str("\n… the rest of the diff is left out\n");
    } else if output.exit == Exit::Timeout {
        // An empty diff would look like no changes.
        text.push_str("\n… git timed out: the diff is incomplete\n");
    }
    Ok(text)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::{path::Path, process::Command};

    use super::*;

    /// Runs a script on the host, without the host's git settings.
    pub(crate) fn sh(folder: &Path, script: &str, arguments: &[&str]) -> (i32, String) {
        let output = Command::new("sh")
            .args(["-c", script, "sh"])
            .args(arguments)
            .current_dir(folder)
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .envs(["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_NAME"), "Ada")))
            .envs(
                ["AUTHOR", "COMMITTER"].map(|who| (format!("GIT_{who}_EMAIL"), "ada@example.org")),
            )
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code().unwrap(), text)
    }

    /// A repository with one commit, on `main`.
    pub(crate) fn repository() -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        let init = "git init -q -b main && echo one > file && git add file && git commit -q -m one";
        assert_eq!(sh(folder.path(), init, &[]).0, 0);
        let head = sh(folder.path(), "git rev-parse HEAD", &[]).1.trim().to_owned();
        (folder, head)
    }

    #[test]
    fn diff_includes_untracked_files_without_touching_index() {
        let (folder, base) = repository();
        let work = "echo two > second && git add second && git commit -q -m two && echo x >> file && echo new > third";
        assert_eq!(sh(folder.path(), work, &[]).0, 0);
        let before = sh(folder.path(), "git status --porcelain", &[]).1;
        let (code, diff) = sh(folder.path(), DIFF, &[&base, "", "."]);
        assert_eq!(code, 0);
        for shown in ["+two", "+x", "+new"] {
            assert!(diff.contains(shown), "{shown} is missing in {diff}");
        }
        assert_eq!(sh(folder.path(), "git status --porcelain", &[]).1, before);
    }

    #[test]
    fn repository_without_commits_diffs_against_empty_tree() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(sh(folder.path(), "git init -q && echo new > file", &[]).0, 0);
        let (code, diff) = sh(folder.path(), DIFF, &[EMPTY_TREE, "", "."]);
        assert!(code == 0 && diff.contains("+new"), "{code}: {diff}");
    }

    #[test]
    fn missing_checkout_has_an_empty_diff() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(sh(folder.path(), DIFF, &[EMPTY_TREE, "", "gone"]), (0, String::new()));
    }

    #[test]
    fn diff_paths_carry_repository_prefix() {
        let (folder, base) = repository();
        assert_eq!(sh(folder.path(), "echo x >> file", &[]).0, 0);
        let diff = sh(folder.path(), DIFF, &[&base, "app/", "."]).1;
        assert!(diff.contains("--- a/app/file\n+++ b/app/file\n"), "{diff}");
    }
}
