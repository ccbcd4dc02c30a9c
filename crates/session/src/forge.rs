//! The trait for the place where pull requests live; the local forge implements it.

use std::any::Any;

use async_trait::async_trait;
use harvest_forge::{LocalForge, NewPullRequest};
use harvest_proto::{
    BranchName,
    api::{Evidence, PullRequest},
};

/// A pull request to open or to update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullRequestSpec {
    /// Of the repository.
    pub url: String,
    pub title: String,
    pub body: String,
    /// The head branch.
    pub branch: BranchName,
    /// The base branch.
    pub base: BranchName,
}

/// Where pull requests live.
#[async_trait]
pub trait Forge: Send + Sync {
    /// Opens a pull request, or updates the branch's open one. `None` when the repository belongs
    /// to no known forge.
    async fn open_pull_request(
        &self,
        spec: PullRequestSpec,
    ) -> Result<Option<PullRequest>, ForgeFailure>;

    /// Shows the result of the check on a pull request.
    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), ForgeFailure>;

    /// Whether this URL points to a repository of this server's own forge.
    fn is_own(&self, _url: &str) -> bool {
        false
    }

    /// A URL to store: the forge's own URLs may change with the server's address.
    fn stable_url(&self, url: &str) -> String {
        url.to_owned()
    }

    /// The current form of a stored URL.
    fn current_url(&self, url: &str) -> String {
        url.to_owned()
    }

    /// Blocks the registration of repositories until the guard is dropped; fails during one.
    fn try_lock(&self) -> Result<Box<dyn Any + Send>, ForgeFailure> {
        Ok(Box::new(()))
    }

    /// Removes a repository from the forge; returns whether it belonged to it. Idempotent.
    async fn remove_repository(&self, _url: &str) -> Result<bool, ForgeFailure> {
        Ok(false)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the forge failed")]
pub struct ForgeFailure(#[source] pub Box<dyn std::error::Error + Send + Sync>);

#[async_trait]
impl Forge for LocalForge {
    async fn open_pull_request(
        &self,
        spec: PullRequestSpec,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        let Some(name) = self.repository_name(&spec.url) else { return Ok(None) };
        let PullRequestSpec { title, body, branch, base, .. } = spec;
        let pull =
            self.open_pull_request(name.name(), NewPullRequest { title, body, branch, base }).await;
        pull.map(Some).map_err(|error| ForgeFailure(Box::new(error)))
    }

    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), ForgeFailure> {
        let Some(name) = self.repository_name(url) else { return Ok(()) };
        Self::set_evidence(self, name.name(), number, evidence)
            .await
            .map(drop)
            .map_err(|error| ForgeFailure(Box::new(error)))
    }

    fn is_own(&self, url: &str) -> bool {
        self.repository_name(url).is_some()
    }

    fn stable_url(&self, url: &str) -> String {
        Self::stable_url(self, url)
    }

    fn current_url(&self, url: &str) -> String {
        Self::current_url(self, url)
    }

    fn try_lock(&self) -> Result<Box<dyn Any + Send>, ForgeFailure> {
        match Self::try_lock(self) {
            Ok(Some(lock)) => Ok(Box::new(lock)),
            Ok(None) => Err(ForgeFailure("a repository is being registered".into())),
            Err(error) => Err(ForgeFailure(Box::new(error))),
        }
    }

    async fn remove_repository(&self, url: &str) -> Result<bool, ForgeFailure> {
        let Some(name) = self.repository_name(url) else { return Ok(false) };
        let forge = self.clone();
        let removed = tokio::task::spawn_blocking(move || forge.remove(name.name())).await;
        let removed = removed.map_err(|panicked| ForgeFailure(Box::new(panicked)))?;
        removed.map(|()| true).map_err(|error| ForgeFailure(Box::new(error)))
    }
}
