//! `/v1/sessions/{session}/exec`: a command in the session's sandbox, its output line by line of JSON.

use axum::{extract::State, response::Response};
use harvest_proto::{
    SessionId,
    api::{ExecLine, ExecRequest, Problem, SocketOut},
};

use crate::{
    ServerState,
    auth::Ending,
    extract::{Body, Path},
    problem::ApiError,
    socket::{self, Upgrade},
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

/// Runs a command that reads what is sent to it while it runs, over a WebSocket. The first frame is text, the
/// command: `{"start":{"argv":["cat"]}}`. Binary frames in are what it reads, `{"end":{}}` ends that; binary
/// frames out are a byte, 1 for stdout and 2 for stderr, and what was written there. The last frame is
/// `{"exited":{…}}` or `{"failed":{…}}`. The command is killed when the socket closes before.
#[utoipa::path(get, path = "/v1/sessions/{session}/exec", tag = "sessions",
    params(("session" = SessionId, Path, description = "The session")),
    responses(
        (status = 101, body = SocketOut, description = "The socket; the last text frame says how it ended"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The session has no machine, and none could be started for this"),
        (status = 426, body = Problem, content_type = "application/problem+json",
            description = "The request is not the beginning of a WebSocket"),
    ))]
pub(crate) async fn exec_open(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Ending(ending): Ending,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let inside = state.sessions.inside(&session).await?;
    Ok(upgrade.on_upgrade(|socket| socket::attend(socket, inside, ending)))
}
