//! The parts of GitHub's objects that Harvest reads.

use harvest_proto::{
    BranchName,
    api::{PullRequest, PullRequestState},
};
use serde::Deserialize;

use super::settings::{RepositoryPath, Site};
use crate::ForgeFailure;

#[derive(Debug, Deserialize)]
pub(super) struct Pull {
    number: u64,
    /// Its id in the GraphQL API.
    node_id: Option<String>,
    html_url: String,
    #[serde(default)]
    title: String,
    body: Option<String>,
    state: String,
    #[serde(default)]
    draft: bool,
    // Lists have only the time, single pull requests both.
    merged_at: Option<String>,
    #[serde(default)]
    merged: bool,
    head: Side,
    base: Side,
}

#[derive(Debug, Deserialize)]
struct Side {
    r#ref: String,
    sha: String,
    /// Absent when the fork was deleted.
    repo: Option<HeadRepository>,
}

#[derive(Debug, Deserialize)]
struct HeadRepository {
    full_name: String,
}

impl Pull {
    /// Whether it is open and its head is this branch of this repository, not of a fork.
    pub(super) fn is_open_head(&self, path: &RepositoryPath, branch: &BranchName) -> bool {
        let of = |repo: &HeadRepository| repo.full_name.eq_ignore_ascii_case(&path.to_string());
        self.state == "open"
            && self.head.r#ref == **branch
            && self.head.repo.as_ref().is_some_and(of)
    }

    pub(super) fn node_id(&self) -> Option<&str> {
        self.node_id.as_deref()
    }

    /// `None` when a branch has a name that git would refuse.
    pub(super) fn into_pull_request(
        self,
        site: &Site,
        path: &RepositoryPath,
    ) -> Option<PullRequest> {
        let state = match (self.state.as_str(), self.merged || self.merged_at.is_some()) {
            (_, true) => PullRequestState::Merged,
            ("open", false) => PullRequestState::Open,
            _ => PullRequestState::Closed,
        };
        Some(PullRequest {
            number: self.number,
            url: site.page(path, self.number, &self.html_url),
            title: self.title,
            body: self.body.unwrap_or_default(),
            state,
            draft: self.draft,
            branch: self.head.r#ref.parse().ok()?,
            base: self.base.r#ref.parse().ok()?,
            commit: self.head.sha,
            evidence: None,
        })
    }

    pub(super) fn checked(
        self,
        site: &Site,
        path: &RepositoryPath,
    ) -> Result<PullRequest, ForgeFailure> {
        let invalid = || ForgeFailure::other(format!("a branch of {path} has an invalid name"));
        self.into_pull_request(site, path).ok_or_else(invalid)
    }
}
