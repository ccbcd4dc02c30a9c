//! The record of pull requests: one open at a time for each branch, numbered 1, 2, 3… in each repository.
//! What they say about commits is asked of git, never taken on trust.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use harvest_proto::api::{Evidence, Pull};

use super::{Forge, ForgeError, file_error, git, write_whole};

// A page shows so much of it; the commits themselves are one `git fetch` away.
const MAX_STAT_BYTES: usize = 64 * 1024;

/// A pull request to be opened, or what an open one is to say from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewPull {
    /// What it is called.
    pub title: String,
    /// What it says.
    pub body: String,
    /// The branch it proposes.
    pub branch: String,
    /// The branch it is for.
    pub base: String,
}

impl Forge {
    /// Opens a pull request for the branch, or brings the open one up to date: its words and its commit.
    /// Evidence about another commit is dropped.
    ///
    /// # Errors
    /// When a branch is missing, has nothing new, or the disk or git fails.
    pub async fn pull_open(&self, name: &str, new: NewPull) -> Result<Pull, ForgeError> {
        let place = self.existing(name)?;
        let repository = place.join("repository.git");
        let commit = branch_head(&repository, name, &new.branch).await?;
        let base_commit = branch_head(&repository, name, &new.base).await?;
        if is_ancestor(&repository, &commit, &base_commit).await? {
            return Err(ForgeError::NothingToPull { branch: new.branch, base: new.base });
        }
        let _alone = self.shared.writing.lock().await;
        let mut pulls = self.read_all(name).await?;
        let open = pulls.iter_mut().find(|pull| pull.state == "open" && pull.branch == new.branch);
        let previous = open.map(|pull| (pull.number, pull.evidence.take()));
        let (number, evidence) =
            previous.unwrap_or_else(|| (pulls.last().map_or(1, |last| last.number + 1), None));
        let pull = Pull {
            number,
            url: self.pull_url(name, number),
            title: new.title,
            body: new.body,
            state: "open".to_owned(),
            branch: new.branch,
            base: new.base,
            evidence: evidence.filter(|evidence| evidence.commit == commit),
            commit,
        };
        write(&place, &pull)?;
        Ok(pull)
    }

    /// One pull request.
    ///
    /// # Errors
    /// When there is none of this number, or it cannot be read.
    pub async fn pull(&self, name: &str, number: u64) -> Result<Pull, ForgeError> {
        let place = self.existing(name)?;
        let pull = read(&place, name, number)?;
        self.as_it_stands(name, &place, pull).await
    }

    /// All pull requests of a repository, in the order they were opened.
    ///
    /// # Errors
    /// When there is no such repository or a record cannot be read.
    pub async fn pulls(&self, name: &str) -> Result<Vec<Pull>, ForgeError> {
        self.read_all(name).await
    }

    /// Records what the platform saw when it checked the pull request's commit.
    ///
    /// # Errors
    /// When there is none of this number, or the disk fails.
    pub async fn set_evidence(
        &self,
        name: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<Pull, ForgeError> {
        let place = self.existing(name)?;
        let _alone = self.shared.writing.lock().await;
        let mut pull = self.as_it_stands(name, &place, read(&place, name, number)?).await?;
        pull.evidence = Some(evidence);
        write(&place, &pull)?;
        Ok(pull)
    }

    /// Closes a pull request without merging it; a merged one stays merged.
    ///
    /// # Errors
    /// When there is none of this number, or the disk fails.
    pub async fn pull_close(&self, name: &str, number: u64) -> Result<Pull, ForgeError> {
        let place = self.existing(name)?;
        let _alone = self.shared.writing.lock().await;
        let mut pull = self.as_it_stands(name, &place, read(&place, name, number)?).await?;
        if pull.state == "open" {
            pull.state = "closed".to_owned();
            write(&place, &pull)?;
        }
        Ok(pull)
    }

    /// Which files the pull request changes and by how much, as `git diff --stat` shows it.
    ///
    /// # Errors
    /// When git fails.
    pub async fn diff_stat(&self, name: &str, pull: &Pull) -> Result<String, ForgeError> {
        let repository = self.repository(name)?;
        // A merged one is compared with what the base was when it branched off, too: three dots.
        let range = format!("refs/heads/{}...{}", pull.base, pull.commit);
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

    fn pull_url(&self, name: &str, number: u64) -> String {
        format!("{}/{name}/pulls/{number}", self.shared.public)
    }

    async fn read_all(&self, name: &str) -> Result<Vec<Pull>, ForgeError> {
        let place = self.existing(name)?;
        let folder = place.join("pulls");
        let entries = fs::read_dir(&folder).map_err(file_error("list", &folder))?;
        let number =
            |entry: fs::DirEntry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok();
        let mut numbers: Vec<u64> = entries.filter_map(Result::ok).filter_map(number).collect();
        numbers.sort_unstable();
        let mut pulls = Vec::with_capacity(numbers.len());
        for number in numbers {
            pulls.push(self.as_it_stands(name, &place, read(&place, name, number)?).await?);
        }
        Ok(pulls)
    }

    // The server's address may have changed since, and somebody may have merged the commit with git.
    async fn as_it_stands(
        &self,
        name: &str,
        place: &Path,
        mut pull: Pull,
    ) -> Result<Pull, ForgeError> {
        pull.url = self.pull_url(name, pull.number);
        if pull.state == "open" {
            let repository = place.join("repository.git");
            if let Some(base) = git::head(&repository, &pull.base).await?
                && is_ancestor(&repository, &pull.commit, &base).await?
            {
                pull.state = "merged".to_owned();
            }
        }
        Ok(pull)
    }
}

async fn branch_head(repository: &Path, name: &str, branch: &str) -> Result<String, ForgeError> {
    let missing = || ForgeError::NoBranch { name: name.to_owned(), branch: branch.to_owned() };
    // What git would read as an option or an expression is no branch.
    let plain = |c: char| c.is_alphanumeric() || "-_./+#@=".contains(c);
    if branch.starts_with('-')
        || branch.contains("..")
        || branch.contains("@{")
        || !branch.chars().all(plain)
    {
        return Err(missing());
    }
    git::head(repository, branch).await?.ok_or_else(missing)
}

async fn is_ancestor(repository: &Path, older: &str, newer: &str) -> Result<bool, ForgeError> {
    git::says_yes(repository, "compare two commits", &["merge-base", "--is-ancestor", older, newer])
        .await
}

fn record(place: &Path, number: u64) -> PathBuf {
    place.join("pulls").join(format!("{number}.json"))
}

fn read(place: &Path, name: &str, number: u64) -> Result<Pull, ForgeError> {
    let path = record(place, number);
    match fs::read(&path) {
        Ok(bytes) => {
            serde_json::from_slice(&bytes).map_err(|error| file_error("read", &path)(error.into()))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(ForgeError::NoPull { name: name.to_owned(), number })
        }
        Err(error) => Err(file_error("read", &path)(error)),
    }
}

fn write(place: &Path, pull: &Pull) -> Result<(), ForgeError> {
    let bytes =
        serde_json::to_vec_pretty(pull).expect("a pull request is plain strings and numbers");
    write_whole(&record(place, pull.number), &bytes)
}
