//! `/v1/sessions/{session}/pr`: the session's pull request.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{SessionId, api::PullRequest};

use crate::{
    ServerState,
    authorization::Access::Read,
    extract::Path,
    problem::{ApiError, JsonResult},
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        pull_request_get: Read,
    ]
}

/// Returns the session's pull request with its evidence.
#[utoipa::path(get, path = "/v1/sessions/{session}/pr", tag = "pull requests",
    responses((status = 200, body = PullRequest, description = "The pull request")))]
async fn pull_request_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<PullRequest> {
    let found = state.sessions.get(&session).await?;
    let pull_request = found.repositories.into_iter().find_map(|one| one.pr);
    pull_request.map(Json).ok_or_else(|| {
        let detail = format!("session {session} has no pull request yet");
        ApiError::new(StatusCode::NOT_FOUND, "no_pr", detail).hint(
            "it is opened when the session pushes: `harvest send SESSION \"commit and push\"`",
        )
    })
}
