//! What a session's programs read and write at the forge of one of its repositories, with the
//! credentials of the session's author, of the repository or of the server.

use std::time::Instant;

use harvest_forge::{ForgeFailure, ReadAnswer, ReadRoute, RemoteRepository};
use harvest_proto::{BranchName, Hint as _, RepositoryName, SessionId, api::PullRequest};
use harvest_store::{SessionRecord, StoreError};

use super::{
    Repositories,
    evidence::PushedCommit,
    forge_calls::TooManyCalls,
    pull_request_body,
    pull_requests::{OpenError, PullRequestText, known_base, open, remote_of},
};
use crate::{error::SessionError, error_chain::error_chain};

/// Why a forge was not read or written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForgeReadError {
    #[error("{}", describe(.0))]
    Forge(ForgeFailure),
    #[error("{0}")]
    Refused(String),
    #[error(transparent)]
    TooMany(#[from] TooManyCalls),
    #[error(transparent)]
    Session(SessionError),
}

impl From<ForgeFailure> for ForgeReadError {
    fn from(failure: ForgeFailure) -> Self {
        Self::Forge(failure)
    }
}

impl From<StoreError> for ForgeReadError {
    fn from(error: StoreError) -> Self {
        Self::Session(error.into())
    }
}

impl ForgeReadError {
    /// The status of GitHub's API that comes nearest.
    pub(crate) const fn status(&self) -> u16 {
        match self {
            Self::Forge(ForgeFailure::RateLimited { .. }) | Self::TooMany(_) => 429,
            Self::Forge(failure) if failure.is_brief() => 502,
            Self::Forge(ForgeFailure::NoRepository { .. } | ForgeFailure::NoApi { .. }) => 404,
            Self::Session(_) => 503,
            _ => 403,
        }
    }
}

/// A failure with what helps, which users do outside of the sandbox.
fn describe(failure: &ForgeFailure) -> String {
    let what = error_chain(failure);
    match failure.hint() {
        Some(hint) => format!("{what}; on the machine of the server: {hint}"),
        None => what,
    }
}

impl Repositories {
    /// Reads a part of a repository at its forge.
    pub(crate) async fn forge_read(
        &self,
        record: &SessionRecord,
        name: &RepositoryName,
        route: &ReadRoute,
    ) -> Result<ReadAnswer, ForgeReadError> {
        let remote = self.remote_at_forge(record, name).await?;
        Ok(self.shared.forge.read(&remote, route).await?)
    }

    /// Comments on the open pull request of the session's own branch, and returns the comment's
    /// URL. One of a fork whose branch has the same name is not the session's.
    pub(crate) async fn forge_comment(
        &self,
        record: &SessionRecord,
        name: &RepositoryName,
        number: u64,
        body: &str,
    ) -> Result<String, ForgeReadError> {
        let remote = self.remote_at_forge(record, name).await?;
        let branch = &record.session.branch;
        let own = self.shared.forge.find_pull_request(&remote, branch).await?;
        if own.as_ref().is_none_or(|own| own.number != number) {
            let which = match own {
                Some(own) => format!("that is {}", own.number),
                None => "it has none now".to_owned(),
            };
            return Err(ForgeReadError::Refused(format!(
                "this session comments on the open pull request of its branch `{branch}` alone; \
                 {which}"
            )));
        }
        let body = pull_request_body::without_markers(body);
        Ok(self.shared.forge.comment(&remote, number, &body).await?)
    }

    /// Opens the pull request of the session's branch, or returns the open one with these texts.
    pub(crate) async fn open_pull_request_at(
        &self,
        session: &SessionId,
        name: &RepositoryName,
        base: &str,
        text: PullRequestText,
        draft: bool,
    ) -> Result<PullRequest, ForgeReadError> {
        let shared = &self.shared;
        let record = shared.store.session_get(session).await?;
        let checkout = record.checkouts.iter().find(|one| one.repository == *name);
        let checkout =
            checkout.ok_or_else(|| SessionError::missing(format!("checkout of {name}")))?;
        let repository = shared.store.repository_get(name).await?;
        let wanted: BranchName = base
            .parse()
            .map_err(|_| ForgeReadError::Refused(format!("`{base}` is not a valid branch")))?;
        if let Some(own) = known_base(checkout, &repository).filter(|own| *own != wanted) {
            let message =
                format!("this session began at `{own}`, which is the base; leave out `--base`");
            return Err(ForgeReadError::Refused(message));
        }
        shared.forge_calls.take(session, name, Instant::now())?;
        let text = PullRequestText { base: Some(wanted), ..text };
        let Some(commit) = checkout.pushed_commit.as_deref() else {
            let message = "there is nothing to open; commit your work and run `git push` first";
            return Err(ForgeReadError::Refused(message.to_owned()));
        };
        let work = PushedCommit { record: &record, checkout, repository: &repository, commit };
        let pull = open(shared, work, &text, Some(draft)).await.map_err(|error| match error {
            OpenError::Forge(failure) => ForgeReadError::Forge(failure),
            OpenError::Store(error) => error.into(),
        })?;
        Ok(PullRequest { url: self.current_url(&pull.url), ..pull })
    }

    async fn remote_at_forge(
        &self,
        record: &SessionRecord,
        name: &RepositoryName,
    ) -> Result<RemoteRepository, ForgeReadError> {
        let repository = self.shared.store.repository_get(name).await?;
        self.shared.forge_calls.take(&record.session.id, name, Instant::now())?;
        let remote = remote_of(&self.shared, record, &repository).await;
        match self.shared.forge.owns(&remote.url) {
            true => Ok(remote),
            false => Err(ForgeFailure::NoApi { url: remote.url }.into()),
        }
    }
}
