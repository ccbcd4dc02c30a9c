//! The local forge as one of the forges: the trait on top of its records.

use std::any::Any;

use async_trait::async_trait;
use harvest_proto::{
    BranchName, RepositoryName, Secret,
    api::{Evidence, PullRequest, PullRequestState},
    repository_name::LOCAL_OWNER,
};

use super::{
    ForgeError, LocalForge,
    merge::{MergeMethod, MergeOutcome, MergeRequest, merge_texts},
    pull_requests::{NewPullRequest, Opening, PullChange},
    rest,
    statuses::{CommitState, NewStatus},
};
use crate::{
    CheckState, CheckStatus, Forge, ForgeFailure, Operation, PullRequestChange, PullRequestSpec,
    ReadAnswer, ReadRoute, RemoteRepository,
};

impl From<ForgeError> for ForgeFailure {
    fn from(error: ForgeError) -> Self {
        match error {
            ForgeError::NoPullRequest { number, .. } => Self::NoPullRequest { number },
            other => Self::other(other),
        }
    }
}

impl From<CheckState> for CommitState {
    fn from(state: CheckState) -> Self {
        match state {
            CheckState::Pending => Self::Pending,
            CheckState::Success => Self::Success,
            CheckState::Failure => Self::Failure,
            CheckState::Error => Self::Error,
        }
    }
}

impl LocalForge {
    fn own_name(&self, url: &str) -> Result<RepositoryName, ForgeFailure> {
        self.repository_name(url).ok_or_else(|| ForgeFailure::NoApi { url: url.to_owned() })
    }
}

#[async_trait]
impl Forge for LocalForge {
    fn owns(&self, url: &str) -> bool {
        self.repository_name(url).is_some()
    }

    fn tip(&self, url: &str, branch: Option<&BranchName>) -> Option<Option<String>> {
        let name = self.repository_name(url)?;
        // What cannot be read is asked over HTTP, which has a better error.
        Self::tip(self, name.name(), branch).ok()
    }

    // Each repository is registered with its own token as a secret.
    async fn credential(
        &self,
        _url: &str,
        _operation: Operation,
    ) -> Result<Option<Secret<String>>, ForgeFailure> {
        Ok(None)
    }

    async fn find_pull_request(
        &self,
        repository: &RemoteRepository,
        branch: &BranchName,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let all = self.pull_requests(name.name()).await?;
        let fits =
            |pull: &PullRequest| pull.branch == *branch && pull.state == PullRequestState::Open;
        Ok(all.into_iter().find(fits))
    }

    async fn pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        Ok(Self::pull_request(self, name.name(), number).await?)
    }

    async fn open_pull_request(
        &self,
        repository: &RemoteRepository,
        spec: PullRequestSpec,
    ) -> Result<PullRequest, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let PullRequestSpec { title, body, branch, base, draft } = spec;
        let new = NewPullRequest { title, body, branch: branch.clone(), base };
        let opening = Opening { author: LOCAL_OWNER, draft };
        match self.open_pull_record(name.name(), new, opening).await {
            Ok(record) => Ok(record.pull),
            Err(ForgeError::PullRequestExists { .. }) => {
                let found = self.find_pull_request(repository, &branch).await?;
                found.ok_or_else(|| ForgeFailure::other("the pull request was just closed"))
            }
            Err(error @ (ForgeError::NoBranch { .. } | ForgeError::NoNewCommits { .. })) => {
                let (repository, message) = (name.to_string(), error.to_string());
                let doing = "open a pull request in";
                Err(ForgeFailure::Rejected { repository, doing, message })
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn update_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
        change: PullRequestChange,
    ) -> Result<PullRequest, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let PullRequestChange { title, body } = change;
        let change = PullChange { title, body, ..PullChange::default() };
        Ok(self.change_pull_record(name.name(), number, change, LOCAL_OWNER).await?.pull)
    }

    async fn set_draft(
        &self,
        repository: &RemoteRepository,
        number: u64,
        draft: bool,
    ) -> Result<PullRequest, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let change = PullChange { draft: Some(draft), ..PullChange::default() };
        Ok(self.change_pull_record(name.name(), number, change, LOCAL_OWNER).await?.pull)
    }

    async fn merge_pull_request(
        &self,
        repository: &RemoteRepository,
        number: u64,
    ) -> Result<PullRequest, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let record = self.pull_record(name.name(), number).await?;
        let (title, message) = merge_texts(&record, MergeMethod::Merge);
        let (expected, author) = (Some(record.pull.commit.as_str()), LOCAL_OWNER);
        let method = MergeMethod::Merge;
        let request = MergeRequest { method, title, message, expected, author };
        let refused = |reason| Err(ForgeFailure::NotMergeable { number, reason });
        match Self::merge_pull_request(self, name.name(), number, request).await? {
            MergeOutcome::Merged { .. } => Ok(Self::pull_request(self, name.name(), number).await?),
            MergeOutcome::NotOpen => refused("it is not open"),
            MergeOutcome::Draft => Err(ForgeFailure::Draft { number }),
            MergeOutcome::Conflict => refused("it conflicts with its base branch"),
            MergeOutcome::HeadMoved | MergeOutcome::BaseMoved => {
                refused("a branch was pushed to meanwhile")
            }
        }
    }

    async fn set_status(
        &self,
        repository: &RemoteRepository,
        commit: &str,
        status: CheckStatus,
    ) -> Result<(), ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let new = NewStatus {
            state: status.state.into(),
            context: status.context,
            description: Some(status.description),
            target_url: None,
            author: LOCAL_OWNER.to_owned(),
        };
        let added = self.add_status(name.name(), commit, new).await?;
        added.map(drop).ok_or_else(|| ForgeFailure::other("the commit has too many statuses"))
    }

    async fn comment(
        &self,
        repository: &RemoteRepository,
        number: u64,
        body: &str,
    ) -> Result<String, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        let pull = Self::pull_request(self, name.name(), number).await?;
        let (body, author) = (body.to_owned(), LOCAL_OWNER);
        let comment = self.add_comment(name.name(), pull.number, author, body).await?;
        Ok(rest::comment_page(self, name.name(), &comment))
    }

    async fn read(
        &self,
        repository: &RemoteRepository,
        route: &ReadRoute,
    ) -> Result<ReadAnswer, ForgeFailure> {
        let name = self.own_name(&repository.url)?;
        rest::read(self, name.name(), route).await
    }

    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), ForgeFailure> {
        let name = self.own_name(url)?;
        Ok(Self::set_evidence(self, name.name(), number, evidence).await.map(drop)?)
    }

    fn is_local(&self, url: &str) -> bool {
        self.repository_name(url).is_some()
    }

    fn stable_url(&self, url: &str) -> String {
        Self::stable_url(self, url)
    }

    fn current_url(&self, url: &str) -> String {
        Self::current_url(self, url)
    }

    fn try_lock(&self) -> Result<Box<dyn Any + Send>, ForgeFailure> {
        match Self::try_lock(self)? {
            Some(lock) => Ok(Box::new(lock)),
            None => Err(ForgeFailure::other("a repository is being registered")),
        }
    }

    async fn remove_repository(&self, url: &str) -> Result<bool, ForgeFailure> {
        let Some(name) = self.repository_name(url) else { return Ok(false) };
        let forge = self.clone();
        let removed = tokio::task::spawn_blocking(move || forge.remove(name.name())).await;
        removed.map_err(ForgeFailure::other)??;
        Ok(true)
    }
}
