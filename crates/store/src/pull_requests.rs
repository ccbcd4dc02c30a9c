//! Pull requests as Harvest last saw them, one per session and repository.

use harvest_proto::{RepositoryName, api::PullRequest};

use crate::{StoreError, row::to_json, target::Target};

pub(crate) async fn upsert(
    target: &mut Target<'_>,
    repository: RepositoryName,
    pull_request: &PullRequest,
) -> Result<(), StoreError> {
    let query = target
        .query(
            "INSERT INTO pull_requests (session, repository, pull_request) VALUES ($1, $2, $3)
         ON CONFLICT (session, repository) DO UPDATE SET pull_request = excluded.pull_request",
        )
        .bind(String::from(repository))
        .bind(to_json(pull_request));
    target.execute(query).await.map(drop)
}
