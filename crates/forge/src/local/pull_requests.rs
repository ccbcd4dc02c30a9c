//! Records of pull requests: at most one open for each branch, numbered from 1 in each repository.
//! Their commits are always looked up in git.

use std::{
    fs,
    path::{Path, PathBuf},
};

use harvest_proto::{
    BranchName, Timestamp,
    api::{Evidence, PullRequest, PullRequestState},
    repository_name::LOCAL_OWNER,
};
use serde::{Deserialize, Serialize};

use super::{
    ForgeError, LocalForge, git, history,
    merge::mark_merged,
    storage::{file_error, read_json, write_json},
};

// Enough for a web page; the commits themselves are a `git fetch` away.
const MAX_STAT_BYTES: usize = 64 * 1024;

/// A pull request to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NewPullRequest {
    pub(super) title: String,
    pub(super) body: String,
    /// The branch with the changes.
    pub(super) branch: BranchName,
    /// The branch to merge into.
    pub(super) base: BranchName,
}

/// A pull request as the forge stores it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct PullRecord {
    #[serde(flatten)]
    pub(super) pull: PullRequest,
    pub(super) author: String,
    pub(super) created_at: Timestamp,
    pub(super) updated_at: Timestamp,
    pub(super) closed_at: Option<Timestamp>,
    pub(super) merged_at: Option<Timestamp>,
    pub(super) merged_by: Option<String>,
    /// The commit that merges it, written before the base branch moves to it.
    pub(super) merge_commit: Option<String>,
    /// The base branch's commit when the pull request was opened or merged.
    pub(super) base_commit: String,
}

/// Who opens a pull request and how.
#[derive(Debug, Clone, Copy)]
pub(super) struct Opening<'a> {
    pub(super) author: &'a str,
    pub(super) draft: bool,
}

/// Changes to a pull request; `None` keeps a value.
#[derive(Debug, Default)]
pub(super) struct PullChange {
    pub(super) title: Option<String>,
    pub(super) body: Option<String>,
    pub(super) base: Option<BranchName>,
    pub(super) open: Option<bool>,
    pub(super) draft: Option<bool>,
}

impl LocalForge {
    /// Opens a pull request for a branch without an open one.
    pub(super) async fn open_pull_record(
        &self,
        name: &str,
        new: NewPullRequest,
        opening: Opening<'_>,
    ) -> Result<PullRecord, ForgeError> {
        let repository = self.repository_path(name)?;
        let commit = branch_head(&repository, name, &new.branch).await?;
        let base_commit = branch_head(&repository, name, &new.base).await?;
        if is_ancestor(&repository, &commit, &base_commit).await? {
            return Err(ForgeError::NoNewCommits { branch: new.branch, base: new.base });
        }
        let _guard = self.shared.writing.lock().await;
        let all = self.pull_records(name).await?;
        let next = all.last().map_or(1, |last| last.pull.number + 1);
        let is_open = |old: &PullRecord| {
            old.pull.state == PullRequestState::Open && old.pull.branch == new.branch
        };
        if all.iter().any(is_open) {
            return Err(ForgeError::PullRequestExists { branch: new.branch });
        }
        let now = self.shared.clock.now();
        let record = PullRecord {
            pull: PullRequest {
                number: next,
                url: self.pull_request_url(name, next),
                title: new.title,
                body: new.body,
                state: PullRequestState::Open,
                draft: opening.draft,
                branch: new.branch,
                base: new.base,
                evidence: None,
                commit,
            },
            author: opening.author.to_owned(),
            created_at: now,
            updated_at: now,
            closed_at: None,
            merged_at: None,
            merged_by: None,
            merge_commit: None,
            base_commit,
        };
        self.write_pull_record(name, &record)?;
        self.tell_pull_soon(name, "opened", &record, opening.author);
        Ok(record)
    }

    /// Changes an existing pull request.
    pub(super) async fn change_pull_record(
        &self,
        name: &str,
        number: u64,
        change: PullChange,
        login: &str,
    ) -> Result<PullRecord, ForgeError> {
        let repository = self.repository_path(name)?;
        let _guard = self.shared.writing.lock().await;
        let mut record = self.pull_record(name, number).await?;
        if let Some(base) = change.base {
            record.base_commit = branch_head(&repository, name, &base).await?;
            record.pull.base = base;
        }
        record.pull.title = change.title.unwrap_or(record.pull.title);
        record.pull.body = change.body.unwrap_or(record.pull.body);
        let now = self.shared.clock.now();
        let mut action = "edited";
        if let Some(draft) = change.draft.filter(|draft| *draft != record.pull.draft) {
            action = if draft { "converted_to_draft" } else { "ready_for_review" };
            record.pull.draft = draft;
        }
        match (change.open, record.pull.state) {
            (Some(false), PullRequestState::Open) => {
                action = "closed";
                record.pull.state = PullRequestState::Closed;
                record.closed_at = Some(now);
            }
            (Some(true), PullRequestState::Closed) => {
                let branch = record.pull.branch.clone();
                let is_other =
                    |other: &PullRecord| other.pull.branch == branch && other.pull.number != number;
                let mut others = self.pull_records(name).await?.into_iter().filter(is_other);
                if others.any(|other| other.pull.state == PullRequestState::Open) {
                    return Err(ForgeError::PullRequestExists { branch });
                }
                record.pull.commit = branch_head(&repository, name, &branch).await?;
                action = "reopened";
                record.pull.state = PullRequestState::Open;
                record.closed_at = None;
            }
            _ => {}
        }
        record.updated_at = now;
        self.write_pull_record(name, &record)?;
        self.tell_pull_soon(name, action, &record, login);
        Ok(record)
    }

    /// # Errors
    /// When there is no pull request with this number, or it cannot be read.
    pub async fn pull_request(&self, name: &str, number: u64) -> Result<PullRequest, ForgeError> {
        Ok(self.pull_record(name, number).await?.pull)
    }

    pub(super) async fn pull_record(
        &self,
        name: &str,
        number: u64,
    ) -> Result<PullRecord, ForgeError> {
        let folder = self.existing_folder(name)?;
        let record = read_json(&record_path(&folder, number))?;
        let missing = || ForgeError::NoPullRequest { name: name.to_owned(), number };
        self.refresh(name, &folder, record.ok_or_else(missing)?).await
    }

    /// All pull requests of a repository, oldest first.
    ///
    /// # Errors
    /// When there is no such repository or a record cannot be read.
    pub async fn pull_requests(&self, name: &str) -> Result<Vec<PullRequest>, ForgeError> {
        Ok(self.pull_records(name).await?.into_iter().map(|record| record.pull).collect())
    }

    pub(super) async fn pull_records(&self, name: &str) -> Result<Vec<PullRecord>, ForgeError> {
        let folder = self.existing_folder(name)?;
        let mut all = Vec::new();
        for path in record_paths(&folder)? {
            if let Some(record) = read_json(&path)? {
                all.push(self.refresh(name, &folder, record).await?);
            }
        }
        Ok(all)
    }

    /// How many records are open. Reads no git, so a merge with plain git is not seen.
    pub(super) fn open_pull_requests(&self, name: &str) -> Result<usize, ForgeError> {
        let mut open = 0;
        for path in record_paths(&self.existing_folder(name)?)? {
            let record: Option<PullRecord> = read_json(&path)?;
            open += usize::from(record.is_some_and(|one| one.pull.state == PullRequestState::Open));
        }
        Ok(open)
    }

    /// Attaches the result of the check that the platform ran on the pull request's commit.
    ///
    /// # Errors
    /// When there is no pull request with this number, or the disk fails.
    pub async fn set_evidence(
        &self,
        name: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<PullRequest, ForgeError> {
        let _guard = self.shared.writing.lock().await;
        let mut record = self.pull_record(name, number).await?;
        record.pull.evidence = Some(evidence);
        self.write_pull_record(name, &record)?;
        Ok(record.pull)
    }

    /// The changes of the pull request as `git diff --stat` prints them.
    ///
    /// # Errors
    /// When git fails.
    pub async fn diff_stat(
        &self,
        name: &str,
        pull_request: &PullRequest,
    ) -> Result<String, ForgeError> {
        let repository = self.repository_path(name)?;
        // Three dots compare with the merge base, so that a merged pull request has a diff too.
        let range = format!("refs/heads/{}...{}", pull_request.base, pull_request.commit);
        let arguments = [
            "diff",
            "--stat=100",
            "--no-color",
            "--no-ext-diff",
            "--no-textconv",
            "--end-of-options",
            &range,
            "--",
        ];
        let mut stat = git::run(&repository, "compare two commits", &arguments).await?;
        if stat.len() > MAX_STAT_BYTES {
            stat.truncate(stat.floor_char_boundary(MAX_STAT_BYTES));
            stat.push_str("…\n");
        }
        Ok(stat)
    }

    fn pull_request_url(&self, name: &str, number: u64) -> String {
        format!("{}/{LOCAL_OWNER}/{name}/pr/{number}", self.shared.public)
    }

    /// Writes a record; the caller holds the writing lock.
    pub(super) fn write_pull_record(
        &self,
        name: &str,
        record: &PullRecord,
    ) -> Result<(), ForgeError> {
        let folder = self.existing_folder(name)?;
        write_json(&record_path(&folder, record.pull.number), record)
    }

    // Updates a record from git: the server's address may have changed, the branch may have moved,
    // and the commit may have been merged with plain git, or by a server that was killed.
    async fn refresh(
        &self,
        name: &str,
        folder: &Path,
        mut record: PullRecord,
    ) -> Result<PullRecord, ForgeError> {
        record.pull.url = self.pull_request_url(name, record.pull.number);
        if record.pull.state != PullRequestState::Open {
            return Ok(record);
        }
        let repository = folder.join("repository.git");
        if let Some(base) = git::head(&repository, &record.pull.base).await? {
            let own_merge = record.merge_commit.clone();
            for merge in own_merge.into_iter().chain([record.pull.commit.clone()]) {
                if is_ancestor(&repository, &merge, &base).await? {
                    let date = history::commit(&repository, &merge).await?.committer.date;
                    let at = date.parse().unwrap_or(record.updated_at);
                    mark_merged(&mut record, at);
                    record.merge_commit = Some(merge);
                    return Ok(record);
                }
            }
        }
        if let Some(head) = git::head(&repository, &record.pull.branch).await? {
            record.pull.evidence = record.pull.evidence.filter(|one| one.commit == head);
            record.pull.commit = head;
        }
        Ok(record)
    }
}

async fn branch_head(
    repository: &Path,
    name: &str,
    branch: &BranchName,
) -> Result<String, ForgeError> {
    let missing = || ForgeError::NoBranch { name: name.to_owned(), branch: branch.clone() };
    git::head(repository, branch).await?.ok_or_else(missing)
}

async fn is_ancestor(repository: &Path, older: &str, newer: &str) -> Result<bool, ForgeError> {
    git::is_true(repository, "compare two commits", &["merge-base", "--is-ancestor", older, newer])
        .await
}

fn record_path(folder: &Path, number: u64) -> PathBuf {
    folder.join("pr").join(format!("{number}.json"))
}

/// The files of all records, in the order of their numbers.
fn record_paths(folder: &Path) -> Result<Vec<PathBuf>, ForgeError> {
    let records = folder.join("pr");
    let entries = fs::read_dir(&records).map_err(file_error("list", &records))?;
    let number =
        |entry: fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok();
    let mut numbers: Vec<u64> = entries.filter_map(Result::ok).filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers.into_iter().map(|number| record_path(folder, number)).collect())
}
