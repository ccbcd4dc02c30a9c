//! `/v1/sessions/{session}/pull`: the session's pull request.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{SessionId, api::PullRequest};

use crate::{ServerState, extract::Path, problem::ApiError};

/// Returns the session's pull request with its evidence.
#[utoipa::path(get, path = "/v1/sessions/{session}/pull", tag = "pulls",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = PullRequest, description = "The pull request")))]
pub(crate) async fn pull_request_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<PullRequest>, ApiError> {
    let pull_request = state.sessions.get(&session).await?.pull;
    pull_request.map(Json).ok_or_else(|| {
        let detail = format!("session {session} has no pull request yet");
        ApiError::new(StatusCode::NOT_FOUND, "no_pull_request", detail)
            .hint("it is opened when the session pushes its branch")
    })
}
