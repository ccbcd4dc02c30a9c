//! The git commands of a sync and of the end of a turn, in a process of the agent's user: what the
//! checkout configures runs with the agent's rights and within a time limit.
//!
//! A rebase is the only operation that a kill could leave half done. A file in git's folder names
//! the branch and its commit before it begins, and is removed when it is over; the next job that
//! finds the file undoes the rebase first.

use std::{fs, path::Path};

use harvest_proto::bridge::Author;
use serde::{Deserialize, Serialize};

use super::{
    checkpoint, leftovers,
    repo::{Repo, RepoError},
    report::{self, Fact, MAX_NAMES, pieces, short},
};
use crate::git::untracked;

/// The message of the commit before a sync.
const SNAPSHOT: &str = "wip: snapshot";

/// The file that names a rebase in progress.
const MARKER: &str = "rebase";

/// What to do in a checkout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::git) enum CarryJob {
    /// Commit all work.
    Commit { author: Author },
    /// Rebase the branch onto this reference.
    Rebase { author: Author, onto: String, began: Option<String> },
    /// Undo a rebase that was interrupted, and remove old checkpoints.
    Recover,
    /// Make a checkpoint of the commits of a reference that another one does not have.
    Keep { reference: String, without: String },
    /// Commit all work on the session's branch, and find out what has to be pushed.
    Save { author: Author, branch: String, base: Option<String>, message: String },
}

/// The rebase in progress.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    branch: String,
    commit: String,
    /// The commit that the branch is moved to.
    base: String,
}

/// Why a job changes nothing.
#[derive(Debug)]
struct Refusal {
    error: String,
    next: String,
}

impl Refusal {
    fn new(error: impl Into<String>, next: impl Into<String>) -> Self {
        Self { error: error.into(), next: next.into() }
    }
}

impl From<RepoError> for Refusal {
    fn from(error: RepoError) -> Self {
        Self::new(error.to_string(), "look at the checkout with `harvest shell SESSION`")
    }
}

/// Does a job and prints its report.
pub(in crate::git) fn run(folder: &Path, job: CarryJob) {
    let mut facts = Vec::new();
    if let Err(Refusal { error, next }) = execute(folder, job, &mut facts) {
        facts.extend(pieces(&error).into_iter().map(Fact::Error));
        facts.push(Fact::Next(short(&next)));
    }
    report::print(&facts);
}

fn execute(folder: &Path, job: CarryJob, facts: &mut Vec<Fact>) -> Result<(), Refusal> {
    match job {
        CarryJob::Commit { author } => {
            let repo = Repo::open(folder, Some(author))?;
            recover(&repo, facts)?;
            checkpoint::remove_old(&repo);
            let branch = workable_branch(&repo)?;
            facts.push(Fact::Branch(branch));
            commit(&repo, SNAPSHOT, facts)?;
            facts.extend(repo.commit_of("HEAD").map(Fact::Before));
            Ok(())
        }
        CarryJob::Rebase { author, onto, began } => {
            rebase(&Repo::open(folder, Some(author))?, &onto, began.as_deref(), facts)
        }
        CarryJob::Recover => {
            let repo = Repo::open(folder, None)?;
            recover(&repo, facts)?;
            checkpoint::remove_old(&repo);
            Ok(())
        }
        CarryJob::Keep { reference, without } => {
            let repo = Repo::open(folder, None)?;
            let commit = repo.commit_of(&reference).filter(|commit| {
                repo.commit_of(&without).is_none_or(|other| !repo.is_ancestor(commit, &other))
            });
            if let Some(commit) = commit {
                let branch = match &*reference {
                    "HEAD" => repo.branch().unwrap_or(reference),
                    name => name.trim_start_matches("refs/heads/").to_owned(),
                };
                let name = checkpoint::create(&repo, &branch, &commit)?;
                facts.push(Fact::Checkpoint(name));
            }
            Ok(())
        }
        CarryJob::Save { author, branch, base, message } => {
            let repo = Repo::open(folder, Some(author))?;
            let current = workable_branch(&repo)?;
            if current != branch {
                let error =
                    format!("branch {} is checked out instead of {branch}", short(&current));
                let next = format!("`git switch {branch}`; only the session's branch is pushed");
                return Err(Refusal::new(error, next));
            }
            commit(&repo, &message, facts)?;
            find_unpushed(&repo, &branch, base.as_deref(), facts);
            Ok(())
        }
    }
}

/// The branch that is checked out, unless the agent is in the middle of something.
fn workable_branch(repo: &Repo) -> Result<String, Refusal> {
    if let Some(operation) = repo.operation() {
        let next = match operation {
            "bisect" => "end it with `git bisect reset`".to_owned(),
            other => format!("end it with `git {other} --continue` or `git {other} --abort`"),
        };
        return Err(Refusal::new(format!("a {operation} is in progress"), next));
    }
    if !repo.names(&["ls-files", "-z", "--unmerged"]).is_empty() {
        let next = "resolve them, then `git add` the files";
        return Err(Refusal::new("there are unresolved conflicts", next));
    }
    repo.branch().ok_or_else(|| {
        let next = "put the commits on a branch: `git switch -c NAME`";
        Refusal::new("no branch is checked out (detached HEAD)", next)
    })
}

/// Commits everything but ignored files and new files that look like leftovers.
fn commit(repo: &Repo, message: &str, facts: &mut Vec<Fact>) -> Result<(), Refusal> {
    // An unreadable file keeps its old content.
    let _some_unreadable = repo.run(&["add", "--update", "--ignore-errors", "--", "."]);
    let mut left_out = Vec::new();
    untracked::add(&repo.top, repo.git(&untracked::LIST), repo.git(&untracked::ADD), |name| {
        if left_out.len() < MAX_NAMES {
            left_out.push(Fact::LeftOut(short(&String::from_utf8_lossy(name))));
        }
    })
    .map_err(RepoError::from)?;
    facts.extend(left_out);
    let changed = repo.names(&["diff", "--cached", "--name-only", "--no-renames", "-z"]);
    if changed.is_empty() {
        return Ok(());
    }
    repo.commit(message)?;
    facts.extend(repo.commit_of("HEAD").map(Fact::Snapshot));
    facts.push(Fact::Files(u32::try_from(changed.len()).unwrap_or(u32::MAX)));
    let ignored = ["ls-files", "-z", "-o", "-i", "--exclude-standard", "--directory"];
    let ignored = repo.names(&ignored).into_iter().take(MAX_NAMES);
    facts.extend(ignored.map(|name| Fact::Ignored(short(&name))));
    Ok(())
}

/// Finds the commit to push, if the remote's branch lacks it.
fn find_unpushed(repo: &Repo, branch: &str, base: Option<&str>, facts: &mut Vec<Fact>) {
    let Some(head) = repo.commit_of("HEAD") else { return };
    let pushed = repo.commit_of(&format!("refs/remotes/origin/{branch}"));
    let base = base.and_then(|base| repo.commit_of(&format!("refs/remotes/origin/{base}")));
    match pushed {
        Some(pushed) if repo.is_ancestor(&head, &pushed) => return,
        Some(_) => {}
        None if base.is_some_and(|base| repo.is_ancestor(&head, &base)) => return,
        None => {}
    }
    facts.push(Fact::Push(head));
}

fn rebase(
    repo: &Repo,
    onto: &str,
    began: Option<&str>,
    facts: &mut Vec<Fact>,
) -> Result<(), Refusal> {
    let name = onto.trim_start_matches("refs/remotes/");
    let again = || "`harvest sync SESSION` tries again".to_owned();
    let base = repo.commit_of(onto);
    let base = base.ok_or_else(|| Refusal::new(format!("{name} does not exist"), again()))?;
    let (Some(head), Some(branch)) = (repo.commit_of("HEAD"), repo.branch()) else {
        return Err(Refusal::new("the branch has no commit", "commit something first"));
    };
    if repo.is_ancestor(&base, &head) {
        facts.extend([Fact::After(head), Fact::Base(base)]);
        return Ok(());
    }
    // A base that was rewritten lacks commits that the branch began at. They are not the session's:
    // only those after them are moved.
    let began = began.filter(|began| {
        repo.commit_of(began).is_some_and(|commit| commit == *began)
            && repo.is_ancestor(began, &head)
            && !repo.is_ancestor(began, &base)
    });
    if began.is_none() && !repo.holds(&["merge-base", &head, &base]) {
        let shallow = repo.line(&["rev-parse", "--is-shallow-repository"]);
        if shallow.as_deref() == Some("true") {
            facts.push(Fact::NeedsHistory);
            return Ok(());
        }
        let error = format!("the branch and {name} have no commit in common");
        return Err(Refusal::new(error, "start a new session on the base"));
    }
    let kept = checkpoint::create(repo, &branch, &head)?;
    facts.push(Fact::Checkpoint(kept));
    let marker = Marker { branch: branch.clone(), commit: head.clone(), base: base.clone() };
    write_marker(repo, &marker)?;
    let mut arguments = vec!["rebase", "--quiet", "--no-verify", "--no-stat"];
    match began {
        Some(began) => arguments.extend(["--onto", &base, began]),
        None => arguments.push(onto),
    }
    let rebased = repo.run(&arguments);
    if rebased.is_ok() && repo.operation().is_none() && repo.branch() == Some(branch) {
        let _removed_by_the_next = fs::remove_file(marker_path(repo));
        facts.extend(repo.commit_of("HEAD").map(Fact::After));
        facts.push(Fact::Base(base));
        return Ok(());
    }
    let conflicts = repo.names(&["diff", "--name-only", "--diff-filter=U", "-z"]);
    let format = ["log", "-1", "--format=%h %s", "REBASE_HEAD"];
    let at = repo.line(&format).filter(|_| !conflicts.is_empty());
    facts.extend(conflicts.iter().take(MAX_NAMES).map(|name| Fact::Conflict(short(name))));
    facts.extend(at.map(|commit| Fact::Commit(short(&commit))));
    undo(repo)?;
    if conflicts.is_empty() {
        let error = rebased.err().map_or("git rebase ended early".to_owned(), |e| e.to_string());
        return Err(Refusal::new(error, again()));
    }
    let next = format!("`git rebase {name}` in the checkout, resolve it, `git rebase --continue`");
    facts.push(Fact::Next(next));
    Ok(())
}

fn marker_path(repo: &Repo) -> std::path::PathBuf {
    repo.own_folder().join(MARKER)
}

// Renamed only when it is complete: half a marker would name no branch.
fn write_marker(repo: &Repo, marker: &Marker) -> Result<(), RepoError> {
    let path = marker_path(repo);
    let part = path.with_extension("part");
    let text = serde_json::to_string(marker).unwrap_or_default();
    fs::write(&part, text).map_err(|error| RepoError::io(&part, &error))?;
    fs::rename(&part, &path).map_err(|error| RepoError::io(&path, &error))
}

fn recover(repo: &Repo, facts: &mut Vec<Fact>) -> Result<(), Refusal> {
    if marker_path(repo).exists() {
        if let Some(Marker { base, .. }) = undo(repo)? {
            leftovers::remove(repo, &base);
        }
        facts.push(Fact::Undone);
    }
    Ok(())
}

/// Puts the branch and its files back to where the marker says, if the rebase is not over.
fn undo(repo: &Repo) -> Result<Option<Marker>, RepoError> {
    let path = marker_path(repo);
    let marker = fs::read_to_string(&path).ok();
    let marker: Option<Marker> = marker.and_then(|text| serde_json::from_str(&text).ok());
    if let Some(Marker { branch, commit, .. }) = &marker {
        // The git that held them was killed: no other one runs in a rebase of Harvest.
        for lock in ["index.lock", "HEAD.lock"] {
            repo.remove_lock(lock);
        }
        let in_progress = repo.operation() == Some("rebase");
        if in_progress && repo.run(&["rebase", "--abort"]).is_err() {
            let _nothing_to_quit = repo.run(&["rebase", "--quit"]);
        }
        let is_back = repo.branch().as_ref() == Some(branch)
            && repo.commit_of("HEAD").as_ref() == Some(commit);
        // Everything was committed before: a forced checkout loses nothing.
        if !is_back && (in_progress || repo.branch().is_none()) {
            repo.run(&["checkout", "--quiet", "--force", "-B", branch, commit])?;
        }
    }
    fs::remove_file(&path).map_err(|error| RepoError::io(&path, &error))?;
    Ok(marker)
}
