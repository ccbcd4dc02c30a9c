//! Runs short git commands on the forge's repositories, with no configuration but the repository's.

use std::{
    fs,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Command,
};

use super::{ForgeError, file_error};

/// The configuration of every repository, after git's own.
const CONFIG: &str = "\
[http]
	receivepack = true
[core]
	logAllRefUpdates = true
	# Disables all hooks.
	hooksPath = /dev/null
[gc]
	# gc would continue in the background after the request that triggered it.
	auto = 0
[receive]
	autogc = false
	maxInputSize = 2g
	# Malformed objects harm clients that read them later.
	fsckObjects = true
[uploadpack]
	# Commits that a push replaced are no business of ordinary clones and fetches.
	hideRefs = refs/harvest
[receive \"fsck\"]
	# Found in histories of well-known projects; git hosts accept them as well.
	badTimezone = ignore
	missingSpaceBeforeDate = ignore
	zeroPaddedFilemode = ignore
";

/// The path of git's CGI program.
pub(super) fn http_backend() -> Result<PathBuf, ForgeError> {
    let failed = |message: String| ForgeError::Git { doing: "locate its programs", message };
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

/// Creates an empty bare repository.
pub(super) async fn init(repository: &Path) -> Result<(), ForgeError> {
    let doing = "create a repository";
    let mut command = isolated("git");
    command
        .args(["init", "--quiet", "--bare", "--initial-branch=main", "--template="])
        .arg(repository);
    stdout_of(doing, command.output().await)?;
    let path = repository.join("config");
    let written = fs::OpenOptions::new().append(true).open(&path);
    written
        .and_then(|mut config| config.write_all(CONFIG.as_bytes()))
        .map_err(file_error("write", &path))
}

/// Runs git and returns its standard output.
pub(super) async fn run(
    repository: &Path,
    doing: &'static str,
    arguments: &[&str],
) -> Result<String, ForgeError> {
    stdout_of(doing, output(repository, arguments).await)
}

/// Runs a git command that answers by its exit code: 0 is true, 1 is false.
pub(super) async fn is_true(
    repository: &Path,
    doing: &'static str,
    arguments: &[&str],
) -> Result<bool, ForgeError> {
    let output = output(repository, arguments).await;
    match output {
        Ok(Output { status, .. }) if status.code() == Some(1) => Ok(false),
        other => stdout_of(doing, other).map(|_| true),
    }
}

/// Points `HEAD` at an existing branch, so that a clone checks something out. Does nothing when it
/// already does, or when several branches could be meant.
pub(super) async fn choose_default_branch(repository: &Path) -> Result<(), ForgeError> {
    // References are never packed here, so a branch is a file and the usual case needs no process.
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

/// The id of the empty tree, which is written if needed.
pub(super) async fn empty_tree(repository: &Path) -> Result<String, ForgeError> {
    let arguments = ["hash-object", "-t", "tree", "-w", "--stdin"];
    let id = with_input(repository, "write the empty tree", &arguments, &[], "").await?;
    Ok(id.trim().to_owned())
}

/// The commit a branch points to, if there is such a branch.
pub(super) async fn head(repository: &Path, branch: &str) -> Result<Option<String>, ForgeError> {
    let reference = format!("refs/heads/{branch}^{{commit}}");
    let arguments = ["rev-parse", "--verify", "--quiet", "--end-of-options", &reference];
    let output = output(repository, &arguments).await.map_err(|error| ForgeError::Git {
        doing: "look up a branch",
        message: error.to_string(),
    })?;
    let commit = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok((output.status.success() && !commit.is_empty()).then_some(commit))
}

/// A command that inherits only `PATH` and sees neither the user's nor the system's git
/// configuration.
pub(super) fn isolated(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env_clear();
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
        .envs([
            ("HOME", "/nonexistent"),
            ("LC_ALL", "C.UTF-8"),
            ("TZ", "UTC"),
            // A path from a request is a name, not a pattern.
            ("GIT_LITERAL_PATHSPECS", "1"),
            ("GIT_CONFIG_NOSYSTEM", "1"),
            ("GIT_CONFIG_GLOBAL", "/dev/null"),
            ("GIT_TERMINAL_PROMPT", "0"),
        ])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

/// Runs git and returns the first bytes of its standard output, at most `limit`; `true` when there
/// was more. The process is killed at the limit.
pub(super) async fn limited(
    repository: &Path,
    doing: &'static str,
    arguments: &[&str],
    limit: usize,
) -> Result<(Vec<u8>, bool), ForgeError> {
    let failed = |error: std::io::Error| ForgeError::Git { doing, message: error.to_string() };
    let mut command = isolated("git");
    command.arg("--git-dir").arg(repository).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(failed)?;
    let (Some(stdout), Some(mut stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(failed(std::io::Error::other("the child has no pipes")));
    };
    let (mut bytes, mut errors) = (Vec::new(), Vec::new());
    let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
    let mut stdout = stdout.take(most);
    // Both pipes are read at once: git blocks when one of them is full.
    let read = async {
        let read = stdout.read_to_end(&mut bytes).await;
        drop(stdout);
        read
    };
    let (read, _) = tokio::join!(read, stderr.read_to_end(&mut errors));
    read.map_err(failed)?;
    if bytes.len() > limit {
        bytes.truncate(limit);
        return Ok((bytes, true));
    }
    let status = child.wait().await.map_err(failed)?;
    stdout_of(doing, Ok(Output { status, stdout: Vec::new(), stderr: errors }))?;
    Ok((bytes, false))
}

/// Runs git with an identity and a standard input, and returns its standard output.
pub(super) async fn with_input(
    repository: &Path,
    doing: &'static str,
    arguments: &[&str],
    environment: &[(&str, &str)],
    input: &str,
) -> Result<String, ForgeError> {
    let mut command = isolated("git");
    command.arg("--git-dir").arg(repository).args(arguments);
    command.envs(environment.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = async {
        let mut child = command.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A git that refuses its input says why on its standard error.
            let _ = stdin.write_all(input.as_bytes()).await;
        }
        child.wait_with_output().await
    };
    stdout_of(doing, output.await)
}

pub(super) async fn output(repository: &Path, arguments: &[&str]) -> std::io::Result<Output> {
    isolated("git").arg("--git-dir").arg(repository).args(arguments).output().await
}

/// The standard output of a command that succeeded, or git's error message.
pub(super) fn stdout_of(
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
