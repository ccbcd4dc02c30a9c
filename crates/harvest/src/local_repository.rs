//! A git repository of the user that gets commits of a session. Only objects and one branch are
//! written: git runs without hooks, and no command reads or changes index, work tree or HEAD.

use std::{
    path::{Path, PathBuf},
    process::{Output, Stdio},
};

use anyhow::{Context, Result, bail};
use tokio::{io::AsyncWriteExt as _, process::Command};

use crate::{client::ByteStream, printer::Advice, sanitize::sanitize_line};

// As many as a session's bundle may have, unpacked several times over.
const MAX_PACK_BYTES: usize = 256 << 20;
const NO_COMMIT: &str = "0000000000000000000000000000000000000000";

pub(crate) struct LocalRepository {
    pub(crate) folder: PathBuf,
}

impl LocalRepository {
    pub(crate) async fn open(folder: &Path) -> Result<Self> {
        let folder = folder
            .canonicalize()
            .with_context(|| format!("cannot find the folder {}", folder.display()))?;
        let repository = Self { folder };
        match repository.line(&["rev-parse", "--show-object-format"]).await {
            Ok(format) if format == "sha1" => Ok(repository),
            Ok(format) => {
                bail!("the repository in {} has {format} ids", repository.folder.display())
            }
            Err(error) => {
                let what = format!("{} is not a git repository", repository.folder.display());
                let hint = "`--into FOLDER` names another folder; `git clone` makes one";
                Err(error.context(Advice::new(what, hint)))
            }
        }
    }

    /// The first of these commits that the repository lacks.
    pub(crate) async fn missing(&self, commits: &[String]) -> Result<Option<String>> {
        for commit in commits {
            let object = format!("{commit}^{{commit}}");
            if !self.run(&["cat-file", "-e", &object]).await?.status.success() {
                return Ok(Some(commit.clone()));
            }
        }
        Ok(None)
    }

    /// The commit of a branch, if it exists.
    pub(crate) async fn branch(&self, name: &str) -> Result<Option<String>> {
        let reference = format!("refs/heads/{name}");
        let output = self.run(&["rev-parse", "--verify", "--quiet", &reference]).await?;
        Ok(output.status.success().then(|| first_line(&output.stdout)))
    }

    /// The folder in which a branch is checked out.
    pub(crate) async fn checked_out_in(&self, branch: &str) -> Result<Option<String>> {
        let output = self.succeed(&["worktree", "list", "--porcelain"]).await?;
        let wanted = format!("branch refs/heads/{branch}");
        let mut folder = None;
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            if let Some(path) = line.strip_prefix("worktree ") {
                folder = Some(path.to_owned());
            } else if line == wanted {
                return Ok(folder);
            }
        }
        Ok(None)
    }

    pub(crate) async fn is_ancestor(&self, older: &str, newer: &str) -> Result<bool> {
        Ok(self.run(&["merge-base", "--is-ancestor", older, newer]).await?.status.success())
    }

    /// The number of commits that are new since these.
    pub(crate) async fn count(&self, commit: &str, since: &[String]) -> Result<u64> {
        let excluded: Vec<String> = since.iter().map(|id| format!("^{id}")).collect();
        let mut arguments = vec!["rev-list", "--count", commit];
        arguments.extend(excluded.iter().map(String::as_str));
        self.line(&arguments).await?.parse().context("git counted no commits")
    }

    /// Adds the objects of a pack. Git refuses malformed ones, and those with missing links.
    pub(crate) async fn add_pack(&self, first: &[u8], rest: &mut ByteStream) -> Result<()> {
        use futures_util::StreamExt as _;
        let limit = format!("--max-input-size={MAX_PACK_BYTES}");
        let mut command = self.git(&["index-pack", "--stdin", "--fix-thin", "--strict", &limit]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot run git")?;
        let mut input = child.stdin.take().context("git has no input")?;
        let feed = async {
            // Git that refuses its input says why on its standard error.
            let mut written = input.write_all(first).await;
            while let Some(piece) = rest.next().await {
                let piece = piece.context("the download broke off")?;
                if written.is_ok() {
                    written = input.write_all(&piece).await;
                }
            }
            drop(input);
            anyhow::Ok(())
        };
        // Both at once: git blocks when its output is full.
        let (fed, output) = tokio::join!(feed, child.wait_with_output());
        let output = output.context("cannot run git")?;
        fed?;
        match output.status.success() {
            true => Ok(()),
            false => bail!("git refused the session's objects: {}", message(&output)),
        }
    }

    /// Creates a branch, or moves it from the commit that it was at.
    pub(crate) async fn set_branch(
        &self,
        name: &str,
        commit: &str,
        before: Option<&str>,
    ) -> Result<()> {
        let (reference, before) = (format!("refs/heads/{name}"), before.unwrap_or(NO_COMMIT));
        let why = "harvest pull";
        self.succeed(&["update-ref", "-m", why, &reference, commit, before]).await.map(drop)
    }

    async fn line(&self, arguments: &[&str]) -> Result<String> {
        Ok(first_line(&self.succeed(arguments).await?.stdout))
    }

    async fn succeed(&self, arguments: &[&str]) -> Result<Output> {
        let output = self.run(arguments).await?;
        match output.status.success() {
            true => Ok(output),
            false => bail!("git {} failed: {}", arguments[0], message(&output)),
        }
    }

    async fn run(&self, arguments: &[&str]) -> Result<Output> {
        let mut command = self.git(arguments);
        command.stdin(Stdio::null()).output().await.context("cannot run git")
    }

    fn git(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("git");
        for setting in ["core.hooksPath=/dev/null", "core.fsmonitor=false", "gc.auto=0"] {
            command.args(["-c", setting]);
        }
        command.arg("-C").arg(&self.folder).args(arguments).kill_on_drop(true);
        // Variables of a hook or an alias that calls this program would name another repository.
        for variable in
            ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_NAMESPACE"]
        {
            command.env_remove(variable);
        }
        command.envs([
            ("LC_ALL", "C.UTF-8"),
            ("GIT_TERMINAL_PROMPT", "0"),
            ("GIT_NO_LAZY_FETCH", "1"),
            ("GIT_NO_REPLACE_OBJECTS", "1"),
            ("GIT_OPTIONAL_LOCKS", "0"),
        ]);
        command
    }
}

fn first_line(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).lines().next().unwrap_or_default().to_owned()
}

fn message(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    sanitize_line(&last.chars().take(300).collect::<String>())
}
