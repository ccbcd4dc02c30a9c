//! `/v1/sessions/{session}/turns` and `/diff`: the turns of a session and their changes.

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use harvest_proto::{
    SessionId,
    api::{DiffFiles, FileChanges, Page, Turn},
};
use harvest_session::DiffRange;
use serde::Deserialize;

use crate::{
    ServerState,
    authorization::Access::Read,
    extract::{Path, Query},
    problem::ApiError,
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        turn_list: Read,
        turn_get: Read,
        diff_get: Read,
        diff_files: Read,
        diff_sandbox: Read,
    ]
}

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

/// Returns a turn with its full prompt.
#[utoipa::path(get, path = "/v1/sessions/{session}/turns/{turn}", tag = "turns",
    params(("session" = SessionId, Path, description = "The session"),
           ("turn" = u32, Path, description = "The turn's number, from 1")),
    responses((status = 200, body = Turn, description = "The turn")))]
pub(crate) async fn turn_get(
    State(state): State<ServerState>,
    Path((session, turn)): Path<(SessionId, u32)>,
) -> Result<Json<Turn>, ApiError> {
    Ok(Json(state.sessions.turn(&session, turn).await?))
}

/// The turns to compare.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Comparison {
    /// Only the changes of this turn.
    #[serde(default)]
    turn: Option<u32>,
    /// From the end of this turn; 0 is the start of the session.
    #[serde(default)]
    from: Option<u32>,
    /// Until this turn has ended; by default the current state.
    #[serde(default)]
    to: Option<u32>,
}

impl From<Comparison> for DiffRange {
    fn from(Comparison { turn, from, to }: Comparison) -> Self {
        Self { turn, from, to }
    }
}

/// Returns the changes since the start of the session, of one turn, or between two turns, in the
/// format of `git diff`.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff", tag = "turns",
    params(("session" = SessionId, Path, description = "The session"), Comparison),
    responses((status = 200, body = String, content_type = "text/x-diff", description = "The diff")))]
pub(crate) async fn diff_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> Result<Response, ApiError> {
    let diff = state.sessions.diff_patch(&session, comparison.into()).await?;
    Ok(([(header::CONTENT_TYPE, "text/x-diff; charset=utf-8")], diff).into_response())
}

/// Lists the changed files of the checkouts with the numbers of added and removed lines.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff/files", tag = "turns",
    params(("session" = SessionId, Path, description = "The session"), Comparison),
    responses((status = 200, body = DiffFiles, description = "The files")))]
pub(crate) async fn diff_files(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> Result<Json<DiffFiles>, ApiError> {
    Ok(Json(state.sessions.diff_stat(&session, comparison.into()).await?))
}

/// Lists all changed files of the sandbox, also outside the checkouts.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff/sandbox", tag = "turns",
    params(("session" = SessionId, Path, description = "The session"), Comparison),
    responses((status = 200, body = FileChanges, description = "The changed files, possibly truncated")))]
pub(crate) async fn diff_sandbox(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> Result<Json<FileChanges>, ApiError> {
    Ok(Json(state.sessions.diff_disk(&session, comparison.into()).await?))
}
