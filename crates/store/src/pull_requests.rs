//! Pull requests as Harvest last saw them, one per session and repository.

use harvest_proto::{
    RepositoryName, SessionId,
    api::{PullRequest, PullRequestState},
};

use crate::{
    DbRow, Store, StoreError,
    row::{self, to_json},
    target::Target,
};

/// A pull request with its session and repository.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredPullRequest {
    pub session: SessionId,
    pub repository: RepositoryName,
    /// URL of the repository, as it is stored.
    pub url: String,
    pub pull_request: PullRequest,
}

impl Store {
    /// The pull requests that are not merged, of sessions and repositories that exist.
    pub async fn pull_requests_unmerged(&self) -> Result<Vec<StoredPullRequest>, StoreError> {
        let query = sqlx::query(
            "SELECT p.session, p.repository, p.pull_request, r.url FROM pull_requests p
             JOIN repositories r ON r.name = p.repository
             WHERE p.state <> $1 ORDER BY p.session, p.repository",
        )
        .bind(PullRequestState::Merged.as_str());
        self.all(query, read).await
    }
}

fn read(row: &DbRow) -> Result<StoredPullRequest, StoreError> {
    Ok(StoredPullRequest {
        session: row::parsed(row, "session")?,
        repository: row::parsed(row, "repository")?,
        url: row::text(row, "url")?,
        pull_request: row::json(row, "pull_request")?,
    })
}

pub(crate) async fn upsert(
    target: &mut Target<'_>,
    repository: RepositoryName,
    pull_request: &PullRequest,
) -> Result<(), StoreError> {
    let query = target
        .query(
            "INSERT INTO pull_requests (session, repository, state, pull_request)
         VALUES ($1, $2, $3, $4) ON CONFLICT (session, repository)
         DO UPDATE SET state = excluded.state, pull_request = excluded.pull_request",
        )
        .bind(String::from(repository))
        .bind(pull_request.state.as_str())
        .bind(to_json(pull_request));
    target.execute(query).await.map(drop)
}
