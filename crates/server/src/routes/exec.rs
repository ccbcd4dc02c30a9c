//! `/v1/sessions/{session}/exec`: a command in the session's sandbox, its output line by line of JSON.

use axum::{extract::State, response::Response};
use harvest_proto::{
    SessionId,
    api::{ExecLine, ExecRequest},
};

use crate::{
    ServerState,
    extract::{Body, Path},
    problem::ApiError,
    stream, valid,
};

/// Runs a command; the answer streams its output and ends with how it ended.
#[utoipa::path(post, path = "/v1/sessions/{session}/exec", tag = "sessions", request_body = ExecRequest,
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = ExecLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `exited` or `failed`")))]
pub(crate) async fn exec_run(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Body(body): Body<ExecRequest>,
) -> Result<Response, ApiError> {
    valid::exec(&body)?;
    let lines = state.sessions.exec(&session, body).await?;
    Ok(stream::lines(lines, state.shutdown))
}
