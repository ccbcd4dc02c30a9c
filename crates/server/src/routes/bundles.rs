//! `/v1/sessions/{session}/bundle`: the commits of the session's branch.

use axum::{
    extract::State,
    http::{HeaderName, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use harvest_proto::{RepositoryRef, SessionId};
use serde::Deserialize;

use crate::{
    ServerState,
    authorization::Access::Change,
    extract::{Path, Query},
    problem::ApiError,
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        bundle_get: Change,
    ]
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct BundleQuery {
    /// One of the session's repositories: `OWNER/NAME` or `NAME`; required if it has several
    repository: Option<RepositoryRef>,
}

/// Returns the commits of the session's branch that its base lacks, as a git bundle with one
/// reference. They need not have been pushed. The headers `x-harvest-repository` and
/// `x-harvest-branch` name what it contains, and `x-harvest-uncommitted` the number of files with
/// changes that are in no commit. A bundle has at most 64 MiB. For the session's user and admins:
/// it may start a sandbox.
#[utoipa::path(get, path = "/v1/sessions/{session}/bundle", tag = "turns",
    params(BundleQuery),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream",
        description = "The bundle")))]
async fn bundle_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<BundleQuery>,
) -> Result<Response, ApiError> {
    let bundle = state.sessions.bundle(&session, query.repository.as_ref()).await?;
    let headers = [
        (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff".to_owned()),
        (HeaderName::from_static("x-harvest-repository"), bundle.repository.to_string()),
        (HeaderName::from_static("x-harvest-branch"), bundle.branch.to_string()),
        (HeaderName::from_static("x-harvest-uncommitted"), bundle.uncommitted.to_string()),
    ];
    Ok((headers, Bytes::from_owner(bundle.content)).into_response())
}
