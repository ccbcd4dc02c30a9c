//! The trait of forges: the places where pull requests live. The local forge and GitHub implement
//! it, and `Forges` sends each call to the one that has the repository.

use std::any::Any;

use async_trait::async_trait;
use harvest_proto::{
    BranchName, Secret,
    api::{Evidence, PullRequest},
};

use crate::{ReadAnswer, ReadRoute, Webhook, WebhookError, WebhookHeaders, failure::ForgeFailure};

/// Where users' repositories are without a setting.
pub(crate) const GITHUB: &str = "https://github.com";

/// A repository at a forge, and the token to use it with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteRepository {
    /// URL of the git remote.
    pub url: String,
    /// The author's own token; without one the forge uses its own credential.
    pub token: Option<Secret<String>>,
}

/// What a credential is for. Each operation gets no more permissions than it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Fetch,
    Push,
    PullRequests,
    /// To turn a pull request into a draft, and back.
    Drafts,
    Statuses,
    /// Reading runs of workflows.
    Actions,
    /// Reading runs of checks.
    Checks,
}

/// A pull request to open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullRequestSpec {
    pub title: String,
    pub body: String,
    /// The head branch.
    pub branch: BranchName,
    /// The base branch.
    pub base: BranchName,
    pub draft: bool,
}

/// New texts of a pull request; `None` keeps the present one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullRequestChange {
    pub title: Option<String>,
    pub body: Option<String>,
}

/// The state of a check of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckState {
    Pending,
    Success,
    Failure,
    /// The check itself could not run.
    Error,
}

impl CheckState {
    /// The word of GitHub's API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Success => "success",
            Self::Failure => "failure",
            Self::Error => "error",
        }
    }
}

/// A commit status to set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckStatus {
    pub state: CheckState,
    /// The name of the check: a later status of the same name replaces this one.
    pub context: String,
    pub description: String,
}

/// A place where pull requests live.
#[async_trait]
pub trait Forge: Send + Sync {
    /// Whether the repository at this URL lives here.
    fn owns(&self, url: &str) -> bool;

    /// A credential of the forge's own for one operation on one repository; `None` when the forge
    /// has none, and repositories are used with their own tokens.
    async fn credential(
        &self,
        url: &str,
        operation: Operation,
    ) -> Result<Option<Secret<String>>, ForgeFailure>;

    /// Drops a credential that a remote refused before its time, so that the next one is new.
    fn forget_credential(&self, _url: &str, _refused: &Secret<String>) {}

    /// The open pull request of a head branch.
    async fn find_pull_request(
        &self,
        repository: &RemoteRepository,
        branch: &BranchName,
    ) -> Result<Option<PullRequest>, ForgeFailure>;

    /// A pull request by its number.
    async fn pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure>;

    /// Opens a pull request, or returns the open one of the same head branch unchanged.
    async fn open_pull_request(
        &self,
        repository: &RemoteRepository,
        spec: PullRequestSpec,
    ) -> Result<PullRequest, ForgeFailure>;

    /// Changes title and body.
    async fn update_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
        change: PullRequestChange,
    ) -> Result<PullRequest, ForgeFailure>;

    /// Turns an open pull request into a draft, or marks it as ready for review.
    async fn set_draft(
        &self,
        repository: &RemoteRepository,
        number: u64,
        draft: bool,
    ) -> Result<PullRequest, ForgeFailure>;

    /// Merges an open pull request. Only the local forge does: at GitHub, people merge.
    async fn merge_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure>;

    /// Sets a status of a commit.
    async fn set_status(
        &self,
        repository: &RemoteRepository,
        commit: &str,
        status: CheckStatus,
    ) -> Result<(), ForgeFailure>;

    /// Adds a comment to a pull request and returns the URL of its page.
    async fn comment(
        &self,
        repository: &RemoteRepository,
        number: u64,
        body: &str,
    ) -> Result<String, ForgeFailure>;

    /// Reads a part of a repository in the form of GitHub's REST API.
    async fn read(
        &self,
        repository: &RemoteRepository,
        route: &ReadRoute,
    ) -> Result<ReadAnswer, ForgeFailure>;

    /// Shows the result of the check on the forge's own page of a pull request, if it has one.
    async fn set_evidence(
        &self,
        _url: &str,
        _number: u64,
        _evidence: Evidence,
    ) -> Result<(), ForgeFailure> {
        Ok(())
    }

    /// Reads a webhook that this forge has signed.
    fn read_webhook(
        &self,
        _headers: WebhookHeaders<'_>,
        _body: &[u8],
    ) -> Result<Webhook, WebhookError> {
        Err(WebhookError::NotSetUp)
    }

    /// Whether this URL points to a repository of this server's own forge.
    fn is_local(&self, _url: &str) -> bool {
        false
    }

    /// The commit of a branch, or of the default branch, of a repository of its own; `Some(None)`
    /// when that has no such branch, and `None` when the remote has to be asked. Starts no process.
    fn tip(&self, _url: &str, _branch: Option<&BranchName>) -> Option<Option<String>> {
        None
    }

    /// A URL to store: the local forge's own URLs may change with the server's address.
    fn stable_url(&self, url: &str) -> String {
        url.to_owned()
    }

    /// The current form of a stored URL.
    fn current_url(&self, url: &str) -> String {
        url.to_owned()
    }

    /// The base URL of the repositories that users name by `OWNER/NAME` alone.
    fn names_at(&self) -> &str {
        GITHUB
    }

    /// Blocks the registration of local repositories until the guard is dropped; fails during one.
    fn try_lock(&self) -> Result<Box<dyn Any + Send>, ForgeFailure> {
        Ok(Box::new(()))
    }

    /// Removes a repository from the local forge; returns whether it belonged to it. Idempotent.
    async fn remove_repository(&self, _url: &str) -> Result<bool, ForgeFailure> {
        Ok(false)
    }
}
