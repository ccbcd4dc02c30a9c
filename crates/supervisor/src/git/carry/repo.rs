//! Git commands in a checkout, as its agent's user, with settings that the checkout's own
//! configuration cannot change.

use std::{
    io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use harvest_proto::bridge::Author;

use crate::git::{git_name, queries::is_object_id, trees::JobError};

/// Settings of a checkout that would change what a command does: sign, stash, move or reorder.
const SETTINGS: [&str; 8] = [
    "commit.gpgSign=false",
    "rebase.autoStash=false",
    "rebase.autoSquash=false",
    "rebase.updateRefs=false",
    "rebase.rebaseMerges=false",
    "rebase.backend=merge",
    "core.splitIndex=false",
    "advice.mergeConflict=false",
];

/// What git says last is why it failed.
const ERROR_LINES: usize = 4;

/// Harvest's own files, in git's folder of the checkout.
const OWN_FOLDER: &str = "harvest";

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct RepoError(String);

impl RepoError {
    pub(super) fn io(path: &Path, error: &io::Error) -> Self {
        Self(format!("cannot write {}: {error}", path.display()))
    }
}

impl From<JobError> for RepoError {
    fn from(error: JobError) -> Self {
        Self(error.to_string())
    }
}

/// A checkout.
pub(super) struct Repo {
    /// The top folder of the working tree.
    pub(super) top: PathBuf,
    git_dir: PathBuf,
    /// Committer, and author of new commits.
    author: Option<Author>,
}

impl Repo {
    pub(super) fn open(folder: &Path, author: Option<Author>) -> Result<Self, RepoError> {
        let at = Self { top: folder.to_owned(), git_dir: folder.to_owned(), author };
        let found = at.run(&["rev-parse", "--show-toplevel", "--absolute-git-dir"])?;
        let text = String::from_utf8_lossy(&found).into_owned();
        match text.lines().collect::<Vec<_>>()[..] {
            // A broken checkout would lead git to a repository around it.
            [top, _] if Path::new(top).canonicalize().ok() != folder.canonicalize().ok() => {
                Err(RepoError(format!("{} is part of the repository {top}", folder.display())))
            }
            [top, git_dir] => Ok(Self { top: top.into(), git_dir: git_dir.into(), ..at }),
            _ => Err(RepoError(format!("git printed no folder: {text}"))),
        }
    }

    /// The folder of Harvest's own files.
    pub(super) fn own_folder(&self) -> PathBuf {
        self.git_dir.join(OWN_FOLDER)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.git_dir.join(name).exists()
    }

    /// Removes a lock of a git that was killed.
    pub(super) fn remove_lock(&self, name: &str) {
        let _usually_missing = std::fs::remove_file(self.git_dir.join(name));
    }

    pub(super) fn git(&self, arguments: &[&str]) -> Command {
        let mut git = Command::new("git");
        git.args(SETTINGS.iter().flat_map(|setting| ["-c", setting]));
        git.args(arguments).current_dir(&self.top).stdin(Stdio::null());
        // Without an editor git does not wait for anyone.
        git.env("GIT_EDITOR", "true").env("GIT_SEQUENCE_EDITOR", "true");
        if let Some(author) = &self.author {
            let name = git_name(author);
            git.env("GIT_COMMITTER_NAME", name).env("GIT_COMMITTER_EMAIL", &author.email);
        }
        git
    }

    /// The output of a command that succeeds, or what git said at last.
    pub(super) fn run(&self, arguments: &[&str]) -> Result<Vec<u8>, RepoError> {
        Self::finish(self.git(arguments), arguments)
    }

    /// Commits the index in the name of the author.
    pub(super) fn commit(&self, message: &str) -> Result<(), RepoError> {
        let arguments = ["commit", "--quiet", "-m", message, "--no-verify"];
        let mut git = self.git(&arguments);
        if let Some(author) = &self.author {
            git.env("GIT_AUTHOR_NAME", git_name(author)).env("GIT_AUTHOR_EMAIL", &author.email);
        }
        Self::finish(git, &arguments).map(drop)
    }

    fn finish(mut git: Command, arguments: &[&str]) -> Result<Vec<u8>, RepoError> {
        let name = arguments.first().copied().unwrap_or_default();
        let output = git.output();
        let output = output.map_err(|error| RepoError(format!("cannot run git: {error}")))?;
        if output.status.success() {
            return Ok(output.stdout);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let last = &lines[lines.len().saturating_sub(ERROR_LINES)..];
        Err(RepoError(format!("git {name}: {}", last.join("; "))))
    }

    /// Whether a command succeeds.
    pub(super) fn holds(&self, arguments: &[&str]) -> bool {
        self.run(arguments).is_ok()
    }

    /// The only line that a command prints.
    pub(super) fn line(&self, arguments: &[&str]) -> Option<String> {
        let output = self.run(arguments).ok()?;
        let line = String::from_utf8_lossy(&output).trim_end().to_owned();
        (!line.is_empty()).then_some(line)
    }

    /// Names ended by NUL.
    pub(super) fn names(&self, arguments: &[&str]) -> Vec<String> {
        let output = self.run(arguments).unwrap_or_default();
        let names = output.split(|byte| *byte == 0).filter(|name| !name.is_empty());
        names.map(|name| String::from_utf8_lossy(name).into_owned()).collect()
    }

    /// The branch that is checked out; nothing at a detached HEAD.
    pub(super) fn branch(&self) -> Option<String> {
        self.line(&["symbolic-ref", "--quiet", "--short", "HEAD"])
    }

    pub(super) fn commit_of(&self, reference: &str) -> Option<String> {
        let commit = format!("{reference}^{{commit}}");
        let commit = self.line(&["rev-parse", "--quiet", "--verify", &commit]);
        commit.filter(|commit| is_object_id(commit))
    }

    pub(super) fn is_ancestor(&self, older: &str, newer: &str) -> bool {
        self.holds(&["merge-base", "--is-ancestor", older, newer])
    }

    /// The operation that a person or the agent has begun and not ended.
    pub(super) fn operation(&self) -> Option<&'static str> {
        const FILES: [(&str, &str); 6] = [
            ("rebase-merge", "rebase"),
            ("rebase-apply", "rebase"),
            ("MERGE_HEAD", "merge"),
            ("CHERRY_PICK_HEAD", "cherry-pick"),
            ("REVERT_HEAD", "revert"),
            ("BISECT_LOG", "bisect"),
        ];
        FILES.iter().find(|(file, _)| self.has(file)).map(|(_, operation)| *operation)
    }
}
