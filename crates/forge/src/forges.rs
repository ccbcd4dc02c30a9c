//! All forges of a server: the local one and GitHub. Each call goes to the one that has the
//! repository.

use std::{any::Any, sync::Arc};

use async_trait::async_trait;
use harvest_proto::{
    BranchName, Secret,
    api::{Evidence, PullRequest},
};

use crate::{
    CheckStatus, Forge, ForgeFailure, GitHub, LocalForge, Operation, PullRequestChange,
    PullRequestSpec, ReadAnswer, ReadRoute, RemoteRepository, Webhook, WebhookError,
    WebhookHeaders,
};

/// The forges of a server. Cheap to clone.
#[derive(Clone)]
pub struct Forges {
    local: LocalForge,
    github: Arc<GitHub>,
}

impl Forges {
    #[must_use]
    pub fn new(local: LocalForge, github: GitHub) -> Self {
        Self { local, github: Arc::new(github) }
    }

    fn find(&self, url: &str) -> Option<&dyn Forge> {
        let all: [&dyn Forge; 2] = [&self.local, &*self.github];
        all.into_iter().find(|forge| forge.owns(url))
    }

    fn at(&self, url: &str) -> Result<&dyn Forge, ForgeFailure> {
        self.find(url).ok_or_else(|| ForgeFailure::NoApi { url: url.to_owned() })
    }
}

#[async_trait]
impl Forge for Forges {
    fn owns(&self, url: &str) -> bool {
        self.find(url).is_some()
    }

    async fn credential(
        &self,
        url: &str,
        operation: Operation,
    ) -> Result<Option<Secret<String>>, ForgeFailure> {
        match self.find(url) {
            Some(forge) => forge.credential(url, operation).await,
            None => Ok(None),
        }
    }

    fn forget_credential(&self, url: &str, refused: &Secret<String>) {
        if let Some(forge) = self.find(url) {
            forge.forget_credential(url, refused);
        }
    }

    fn tip(&self, url: &str, branch: Option<&BranchName>) -> Option<Option<String>> {
        self.find(url)?.tip(url, branch)
    }

    async fn find_pull_request(
        &self,
        repository: &RemoteRepository,
        branch: &BranchName,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        self.at(&repository.url)?.find_pull_request(repository, branch).await
    }

    async fn pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        self.at(&repository.url)?.pull_request(repository, number).await
    }

    async fn open_pull_request(
        &self,
        repository: &RemoteRepository,
        spec: PullRequestSpec,
    ) -> Result<PullRequest, ForgeFailure> {
        self.at(&repository.url)?.open_pull_request(repository, spec).await
    }

    async fn update_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
        change: PullRequestChange,
    ) -> Result<PullRequest, ForgeFailure> {
        self.at(&repository.url)?.update_pull_request(repository, number, change).await
    }

    async fn set_draft(
        &self,
        repository: &RemoteRepository,
        number: u64,
        draft: bool,
    ) -> Result<PullRequest, ForgeFailure> {
        self.at(&repository.url)?.set_draft(repository, number, draft).await
    }

    async fn merge_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        self.at(&repository.url)?.merge_pull_request(repository, number).await
    }

    async fn set_status(
        &self,
        repository: &RemoteRepository,
        commit: &str,
        status: CheckStatus,
    ) -> Result<(), ForgeFailure> {
        self.at(&repository.url)?.set_status(repository, commit, status).await
    }

    async fn comment(
        &self,
        repository: &RemoteRepository,
        number: u64,
        body: &str,
    ) -> Result<String, ForgeFailure> {
        self.at(&repository.url)?.comment(repository, number, body).await
    }

    async fn read(
        &self,
        repository: &RemoteRepository,
        route: &ReadRoute,
    ) -> Result<ReadAnswer, ForgeFailure> {
        self.at(&repository.url)?.read(repository, route).await
    }

    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), ForgeFailure> {
        self.at(url)?.set_evidence(url, number, evidence).await
    }

    // The local forge tells this server nothing that it does not know.
    fn read_webhook(
        &self,
        headers: WebhookHeaders<'_>,
        body: &[u8],
    ) -> Result<Webhook, WebhookError> {
        self.github.read_webhook(headers, body)
    }

    fn names_at(&self) -> &str {
        self.github.names_at()
    }

    fn is_local(&self, url: &str) -> bool {
        self.local.is_local(url)
    }

    fn stable_url(&self, url: &str) -> String {
        Forge::stable_url(&self.local, url)
    }

    fn current_url(&self, url: &str) -> String {
        Forge::current_url(&self.local, url)
    }

    fn try_lock(&self) -> Result<Box<dyn Any + Send>, ForgeFailure> {
        Forge::try_lock(&self.local)
    }

    async fn remove_repository(&self, url: &str) -> Result<bool, ForgeFailure> {
        self.local.remove_repository(url).await
    }
}
