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
    problem::{ApiError, JsonResult},
    routes::route::{Routes, page, routes},
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
    responses((status = 200, body = Page<Turn>, description = "The turns")))]
async fn turn_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Page<Turn>> {
    Ok(page(state.sessions.turns(&session).await?))
}

/// Returns a turn with its full prompt.
#[utoipa::path(get, path = "/v1/sessions/{session}/turns/{turn}", tag = "turns",
    params(("turn" = u32, Path, description = "The turn's number, from 1")),
    responses((status = 200, body = Turn, description = "The turn")))]
async fn turn_get(
    State(state): State<ServerState>,
    Path((session, turn)): Path<(SessionId, u32)>,
) -> JsonResult<Turn> {
    Ok(Json(state.sessions.turn(&session, turn).await?))
}

/// The turns to compare.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Comparison {
    /// Only the changes of this turn.
    turn: Option<u32>,
    /// From the end of this turn; 0 is the start of the session.
    from: Option<u32>,
    /// Until this turn has ended; by default the current state.
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
    params(Comparison),
    responses((status = 200, body = String, content_type = "text/x-diff", description = "The diff")))]
async fn diff_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> Result<Response, ApiError> {
    let diff = state.sessions.diff_patch(&session, comparison.into()).await?;
    Ok(([(header::CONTENT_TYPE, "text/x-diff; charset=utf-8")], diff).into_response())
}

/// Lists the changed files of the checkouts with the numbers of added and removed lines.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff/files", tag = "turns",
    params(Comparison),
    responses((status = 200, body = DiffFiles, description = "The files")))]
async fn diff_files(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> JsonResult<DiffFiles> {
    Ok(Json(state.sessions.diff_stat(&session, comparison.into()).await?))
}

/// Lists all changed files of the sandbox, also outside the checkouts.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff/sandbox", tag = "turns",
    params(Comparison),
    responses((status = 200, body = FileChanges, description = "The changed files, possibly truncated")))]
async fn diff_sandbox(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> JsonResult<FileChanges> {
    Ok(Json(state.sessions.diff_disk(&session, comparison.into()).await?))
}
