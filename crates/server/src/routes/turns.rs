//! `/v1/sessions/{session}/turns` and `/diff`: what was carried out, and what it changed.

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use harvest_proto::{
    SessionId,
    api::{Page, Turn},
};

use crate::{ServerState, extract::Path, problem::ApiError};

/// Lists a session's turns, oldest first.
#[utoipa::path(get, path = "/v1/sessions/{session}/turns", tag = "turns",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Page<Turn>, description = "The turns")))]
pub(crate) async fn turn_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Page<Turn>>, ApiError> {
    let items = state.sessions.turns(&session).await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Shows what the session has changed since it began, as `git diff` prints it.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff", tag = "turns",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = String, content_type = "text/x-diff", description = "The difference")))]
pub(crate) async fn diff_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Response, ApiError> {
    let diff = state.sessions.diff(&session).await?;
    Ok(([(header::CONTENT_TYPE, "text/x-diff; charset=utf-8")], diff).into_response())
}
