//! `/v1/sessions/{session}/pull`: what a session proposes, and what the platform itself saw of it.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{SessionId, api::Pull};

use crate::{ServerState, extract::Path, problem::ApiError};

/// Shows the session's pull request with its evidence.
#[utoipa::path(get, path = "/v1/sessions/{session}/pull", tag = "pulls",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Pull, description = "The pull request")))]
pub(crate) async fn pull_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Pull>, ApiError> {
    let pull = state.sessions.get(&session).await?.pull;
    pull.map(Json).ok_or_else(|| {
        ApiError::new(
            StatusCode::NOT_FOUND,
            "no_pull",
            format!("{session} has no pull request yet"),
        )
        .hint("one is opened when the session pushes its branch")
    })
}
