//! Runs git on the forge's own repositories: short commands with no configuration but the repository's.

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use tokio::process::Command;

use super::ForgeError;

// What a repository of the forge is set up with.
const SETTINGS: [(&str, &str); 6] = [
    ("http.receivepack", "true"),
    // No hook is ever run, wherever it may come from.
    ("core.hooksPath", "/dev/null"),
    // Tidying up would go on in the background after the request that set it off is gone.
    ("receive.autogc", "false"),
    ("gc.auto", "0"),
    // What was pushed stays reachable: evidence and pull requests name commits.
    ("receive.denyNonFastForwards", "true"),
    ("core.logAllRefUpdates", "true"),
];

/// Where git keeps its CGI program.
pub(super) fn backend() -> Result<PathBuf, ForgeError> {
    let failed = |message: String| ForgeError::Git { doing: "say where its programs are", message };
    let output = std::process::Command::new("git")
        .arg("--exec-path")
        .output()
        .map_err(|error| failed(error.to_string()))?;
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let backend = folder.join("git-http-backend");
    if !backend.is_file() {
        return Err(failed(format!("{} is missing", backend.display())));
    }
    Ok(backend)
}

/// Makes an empty bare repository.
pub(super) async fn init(repository: &Path) -> Result<(), ForgeError> {
    let doing = "make a repository";
    let mut command = bare("git");
    command
        .args(["init", "--quiet", "--bare", "--initial-branch=main", "--template="])
        .arg(repository);
    good(doing, command.output().await)?;
    for (key, value) in SETTINGS {
        run(repository, doing, &["config", key, value]).await?;
    }
    Ok(())
}

/// What git prints; an error when it fails.
pub(super) async fn run(
    repository: &Path,
    doing: &'static str,
    arguments: &[&str],
) -> Result<String, ForgeError> {
    good(doing, output(repository, arguments).await)
}

/// Whether git says yes.
pub(super) async fn says_yes(
    repository: &Path,
    doing: &'static str,
    arguments: &[&str],
) -> Result<bool, ForgeError> {
    let output = output(repository, arguments).await;
    match output {
        Ok(Output { status, .. }) if status.code() == Some(1) => Ok(false),
        other => good(doing, other).map(|_| true),
    }
}

/// Points `HEAD` at a branch that exists, so that a clone of what was pushed checks something out. Left alone
/// when it already does, and when there is more than one branch to choose from.
pub(super) async fn settle_head(repository: &Path) -> Result<(), ForgeError> {
    // A pushed branch is a file: nothing packs references here. So the usual case needs no process.
    if repository.join("refs/heads/main").is_file() {
        return Ok(());
    }
    let doing = "choose the default branch";
    let list =
        run(repository, doing, &["for-each-ref", "--format=%(refname)", "refs/heads/"]).await?;
    let branches: Vec<_> = list.lines().collect();
    let usual = branches.iter().find(|branch| **branch == "refs/heads/master");
    match (branches.as_slice(), usual) {
        ([only], _) | (_, Some(only)) => {
            run(repository, doing, &["symbolic-ref", "HEAD", only]).await.map(drop)
        }
        _ => Ok(()),
    }
}

/// The commit a branch points to, if there is such a branch.
pub(super) async fn head(repository: &Path, branch: &str) -> Result<Option<String>, ForgeError> {
    let reference = format!("refs/heads/{branch}^{{commit}}");
    let arguments = ["rev-parse", "--verify", "--quiet", "--end-of-options", &reference];
    let output = output(repository, &arguments).await.map_err(|error| ForgeError::Git {
        doing: "look a branch up",
        message: error.to_string(),
    })?;
    let commit = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok((output.status.success() && !commit.is_empty()).then_some(commit))
}

/// A program that sees nothing of this process's environment but where programs are, and none of the
/// user's or the system's git configuration.
pub(super) fn bare(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
        .envs([
            ("HOME", "/nonexistent"),
            ("LC_ALL", "C.UTF-8"),
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_TERMINAL_PROMPT", "0"),
        ])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

async fn output(repository: &Path, arguments: &[&str]) -> std::io::Result<Output> {
    bare("git").arg("--git-dir").arg(repository).args(arguments).output().await
}

pub(super) fn good(
    doing: &'static str,
    output: std::io::Result<Output>,
) -> Result<String, ForgeError> {
    let output = output.map_err(|error| ForgeError::Git { doing, message: error.to_string() })?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).trim().chars().take(500).collect();
        return Err(ForgeError::Git { doing, message });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
