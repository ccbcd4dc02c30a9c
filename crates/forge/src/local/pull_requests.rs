//! Records of pull requests: at most one open for each branch, numbered from 1 in each repository.
//! Their commits are always looked up in git.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use harvest_proto::{
    BranchName,
    api::{Evidence, PullRequest, PullRequestState},
    repository_name::LOCAL_OWNER,
};

use super::{ForgeError, LocalForge, file_error, git, write_atomically};

// Enough for a web page; the commits themselves are a `git fetch` away.
const MAX_STAT_BYTES: usize = 64 * 1024;

/// A pull request to open, or the new content of the branch's open one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPullRequest {
    pub title: String,
    pub body: String,
    /// The branch with the changes.
    pub branch: BranchName,
    /// The branch to merge into.
    pub base: BranchName,
}

impl LocalForge {
    /// Opens a pull request for the branch, or updates title, body and commit of the open one.
    /// Evidence about another commit is dropped.
    ///
    /// # Errors
    /// When a branch is missing or has no new commits, or the disk or git fails.
    pub async fn open_pull_request(
        &self,
        name: &str,
        new: NewPullRequest,
    ) -> Result<PullRequest, ForgeError> {
        let folder = self.existing_folder(name)?;
        let repository = folder.join("repository.git");
        let commit = branch_head(&repository, name, &new.branch).await?;
        let base_commit = branch_head(&repository, name, &new.base).await?;
        if is_ancestor(&repository, &commit, &base_commit).await? {
            return Err(ForgeError::NoNewCommits { branch: new.branch, base: new.base });
        }
        let _guard = self.shared.writing.lock().await;
        let mut all = self.pull_requests(name).await?;
        let open = all
            .iter_mut()
            .find(|old| old.state == PullRequestState::Open && old.branch == new.branch);
        let previous = open.map(|old| (old.number, old.evidence.take()));
        let (number, evidence) =
            previous.unwrap_or_else(|| (all.last().map_or(1, |last| last.number + 1), None));
        let pull_request = PullRequest {
            number,
            url: self.pull_request_url(name, number),
            title: new.title,
            body: new.body,
            state: PullRequestState::Open,
            branch: new.branch,
            base: new.base,
            evidence: evidence.filter(|evidence| evidence.commit == commit),
            commit,
        };
        write(&folder, &pull_request)?;
        Ok(pull_request)
    }

    /// # Errors
    /// When there is no pull request with this number, or it cannot be read.
    pub async fn pull_request(&self, name: &str, number: u64) -> Result<PullRequest, ForgeError> {
        let folder = self.existing_folder(name)?;
        let record = read(&folder, name, number)?;
        self.refresh(name, &folder, record).await
    }

    /// All pull requests of a repository, oldest first.
    ///
    /// # Errors
    /// When there is no such repository or a record cannot be read.
    pub async fn pull_requests(&self, name: &str) -> Result<Vec<PullRequest>, ForgeError> {
        let folder = self.existing_folder(name)?;
        let records = folder.join("pr");
        let entries = fs::read_dir(&records).map_err(file_error("list", &records))?;
        let number =
            |entry: fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok();
        let mut numbers: Vec<u64> = entries.filter_map(Result::ok).filter_map(number).collect();
        numbers.sort_unstable();
        let mut all = Vec::with_capacity(numbers.len());
        for number in numbers {
            all.push(self.refresh(name, &folder, read(&folder, name, number)?).await?);
        }
        Ok(all)
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
        let folder = self.existing_folder(name)?;
        let _guard = self.shared.writing.lock().await;
        let mut pull_request = self.refresh(name, &folder, read(&folder, name, number)?).await?;
        pull_request.evidence = Some(evidence);
        write(&folder, &pull_request)?;
        Ok(pull_request)
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

    // Updates a record: the server's address may have changed, and the commit may have been merged
    // with plain git.
    async fn refresh(
        &self,
        name: &str,
        folder: &Path,
        mut record: PullRequest,
    ) -> Result<PullRequest, ForgeError> {
        record.url = self.pull_request_url(name, record.number);
        if record.state == PullRequestState::Open {
            let repository = folder.join("repository.git");
            if let Some(base) = git::head(&repository, &record.base).await?
                && is_ancestor(&repository, &record.commit, &base).await?
            {
                record.state = PullRequestState::Merged;
            }
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

fn read(folder: &Path, name: &str, number: u64) -> Result<PullRequest, ForgeError> {
    let path = record_path(folder, number);
    match fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| file_error("read", &path)(error.into()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ForgeError::NoPullRequest { name: name.to_owned(), number })
        }
        Err(error) => Err(file_error("read", &path)(error)),
    }
}

fn write(folder: &Path, record: &PullRequest) -> Result<(), ForgeError> {
    let bytes =
        serde_json::to_vec_pretty(record).expect("a pull request is plain strings and numbers");
    write_atomically(&record_path(folder, record.number), &bytes)
}
