//! `/v1/sessions/{session}/turns` and `/diff`: what was carried out, and what it changed.

use axum::{
    Json,
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use harvest_proto::{
    SessionId,
    api::{DiffFiles, MachineChanges, Page, Turn},
};
use harvest_session::DiffRange;
use serde::Deserialize;

use crate::{
    ServerState,
    extract::{Path, Query},
    problem::ApiError,
};

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

/// Shows a turn, with the whole of its prompt.
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

/// What to compare.
#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Comparison {
    /// One turn's own changes.
    #[serde(default)]
    turn: Option<u32>,
    /// From the end of this turn, 0 being the session's beginning.
    #[serde(default)]
    from: Option<u32>,
    /// To the end of this turn; to where the session stands when absent.
    #[serde(default)]
    to: Option<u32>,
}

impl From<Comparison> for DiffRange {
    fn from(Comparison { turn, from, to }: Comparison) -> Self {
        Self { turn, from, to }
    }
}

/// Shows what the session has changed since it began, in one turn, or between two, as `git diff` prints it.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff", tag = "turns",
    params(("session" = SessionId, Path, description = "The session"), Comparison),
    responses((status = 200, body = String, content_type = "text/x-diff", description = "The difference")))]
pub(crate) async fn diff_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> Result<Response, ApiError> {
    let diff = state.sessions.diff_patch(&session, comparison.into()).await?;
    Ok(([(header::CONTENT_TYPE, "text/x-diff; charset=utf-8")], diff).into_response())
}

/// Lists the files of the checkouts that differ, with the lines that came and went.
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

/// Lists every file of the machine that differs, checkout or not.
#[utoipa::path(get, path = "/v1/sessions/{session}/diff/machine", tag = "turns",
    params(("session" = SessionId, Path, description = "The session"), Comparison),
    responses((status = 200, body = MachineChanges, description = "The files, or the first of them")))]
pub(crate) async fn diff_machine(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(comparison): Query<Comparison>,
) -> Result<Json<MachineChanges>, ApiError> {
    Ok(Json(state.sessions.diff_machine(&session, comparison.into()).await?))
}
