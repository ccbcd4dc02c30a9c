//! Merges a pull request: a merge commit made by git in the bare repository, then the branch moved
//! to it, then the record.

use harvest_proto::{Timestamp, api::PullRequestState, repository_name::LOCAL_OWNER};

use super::{ForgeError, LocalForge, git, history, pull_requests::PullRecord};

/// Whether two commits can be merged without conflicts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Mergeability {
    Clean {
        /// The tree of the result.
        tree: String,
    },
    Conflict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MergeMethod {
    Merge,
    Squash,
}

/// How to merge.
#[derive(Debug)]
pub(super) struct MergeRequest<'a> {
    pub(super) method: MergeMethod,
    pub(super) title: String,
    pub(super) message: String,
    /// The head commit that the client saw.
    pub(super) expected: Option<&'a str>,
    pub(super) author: &'a str,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum MergeOutcome {
    Merged { sha: String },
    NotOpen,
    Draft,
    Conflict,
    HeadMoved,
    BaseMoved,
}

/// Merges two commits in memory; git writes only objects.
pub(super) async fn mergeability(
    repository: &std::path::Path,
    base: &str,
    head: &str,
) -> Result<Mergeability, ForgeError> {
    let doing = "merge two commits";
    if history::merge_base(repository, base, head).await?.is_none() {
        return Ok(Mergeability::Conflict);
    }
    let arguments = ["merge-tree", "--write-tree", "--no-messages", base, head];
    let output = git::output(repository, &arguments).await;
    if let Ok(output) = &output
        && output.status.code() == Some(1)
    {
        return Ok(Mergeability::Conflict);
    }
    let tree = git::stdout_of(doing, output)?;
    Ok(Mergeability::Clean { tree: tree.trim().to_owned() })
}

impl LocalForge {
    /// Merges an open pull request. The record names the commit before the branch moves, so that
    /// a server killed in between finds the pull request merged.
    pub(super) async fn merge_pull_request(
        &self,
        name: &str,
        number: u64,
        request: MergeRequest<'_>,
    ) -> Result<MergeOutcome, ForgeError> {
        let repository = self.repository_path(name)?;
        let _watch = self.watch_references(name, request.author).await;
        let _guard = self.shared.writing.lock().await;
        let mut record = self.pull_record(name, number).await?;
        if record.pull.state != PullRequestState::Open {
            return Ok(MergeOutcome::NotOpen);
        }
        if record.pull.draft {
            return Ok(MergeOutcome::Draft);
        }
        let head = record.pull.commit.clone();
        if request.expected.is_some_and(|expected| expected != head) {
            return Ok(MergeOutcome::HeadMoved);
        }
        let Some(base) = git::head(&repository, &record.pull.base).await? else {
            return Ok(MergeOutcome::Conflict);
        };
        let Mergeability::Clean { tree } = mergeability(&repository, &base, &head).await? else {
            return Ok(MergeOutcome::Conflict);
        };
        let now = self.shared.clock.now();
        let sha = commit_tree(&repository, &tree, (&base, &head), &request, now).await?;
        record.base_commit.clone_from(&base);
        record.merge_commit = Some(sha.clone());
        record.merged_by = Some(request.author.to_owned());
        self.write_pull_record(name, &record)?;
        let branch = format!("refs/heads/{}", record.pull.base);
        let arguments = ["update-ref", "--end-of-options", &branch, &sha, &base];
        if git::run(&repository, "move the base branch", &arguments).await.is_err() {
            return Ok(MergeOutcome::BaseMoved);
        }
        mark_merged(&mut record, now);
        self.write_pull_record(name, &record)?;
        self.tell_pull_soon(name, "closed", &record, request.author);
        Ok(MergeOutcome::Merged { sha })
    }
}

pub(super) fn mark_merged(record: &mut PullRecord, at: Timestamp) {
    record.pull.state = PullRequestState::Merged;
    (record.merged_at, record.closed_at) = (Some(at), Some(at));
    record.updated_at = at;
}

async fn commit_tree(
    repository: &std::path::Path,
    tree: &str,
    (base, head): (&str, &str),
    request: &MergeRequest<'_>,
    now: Timestamp,
) -> Result<String, ForgeError> {
    let email = format!("{}@forge.harvest.internal", request.author.replace(['[', ']'], ""));
    let date = format!("@{} +0000", now.as_millis().div_euclid(1000));
    let identity = [
        ("GIT_AUTHOR_NAME", request.author),
        ("GIT_AUTHOR_EMAIL", &email),
        ("GIT_AUTHOR_DATE", &date),
        ("GIT_COMMITTER_NAME", request.author),
        ("GIT_COMMITTER_EMAIL", &email),
        ("GIT_COMMITTER_DATE", &date),
    ];
    let mut arguments = vec!["commit-tree", tree, "-p", base];
    if request.method == MergeMethod::Merge {
        arguments.extend(["-p", head]);
    }
    let message = format!("{}\n\n{}", request.title, request.message);
    let doing = "create a merge commit";
    let sha = git::with_input(repository, doing, &arguments, &identity, message.trim_end()).await?;
    Ok(sha.trim().to_owned())
}

/// Title and message of a merge commit, as GitHub writes them.
pub(super) fn merge_texts(record: &PullRecord, method: MergeMethod) -> (String, String) {
    let pull = &record.pull;
    match method {
        MergeMethod::Merge => {
            let branch = format!("{LOCAL_OWNER}/{}", pull.branch);
            (format!("Merge pull request #{} from {branch}", pull.number), pull.title.clone())
        }
        MergeMethod::Squash => (format!("{} (#{})", pull.title, pull.number), pull.body.clone()),
    }
}
