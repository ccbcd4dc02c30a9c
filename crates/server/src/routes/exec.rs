//! `/v1/sessions/{session}/exec`: runs commands in the session's sandbox.

use axum::{extract::State, response::Response};
use harvest_proto::{
    SessionId,
    api::{ExecLine, ExecRequest, Problem, SocketOut},
};

use crate::{
    ServerState,
    auth::RevokedOrShutdown,
    authorization::Access::Change,
    command_body::CommandWithInput,
    extract::Path,
    problem::ApiError,
    routes::route::{Routes, routes},
    websocket::{self, Upgrade},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        // Access to the sandbox may resume the session, and reveals more than the session's events.
        exec_run: Change,
        exec_open: Change,
    ]
}

/// Runs a command and streams its output; the last line reports how it ended.
#[utoipa::path(post, path = "/v1/sessions/{session}/exec", tag = "sessions",
    request_body(content((ExecRequest = "application/json"), (String = "application/vnd.harvest.exec")),
        description = "The command; as `application/vnd.harvest.exec` one line of JSON followed by \
                       the command's stdin"),
    responses((status = 200, body = ExecLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `exited` or `failed`; ignore empty lines")))]
async fn exec_run(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    command: CommandWithInput,
) -> Result<Response, ApiError> {
    command.validate(false)?;
    let sandbox = state.sessions.sandbox_handle(&session).await?;
    command.run(sandbox, state.shutdown).await
}

/// Runs a command with live input over a WebSocket. The first frame is text and holds the command:
/// `{"start":{"argv":["cat"]}}`. Binary frames to the server are its stdin, and `{"end":{}}` closes
/// it. Binary frames from the server start with a byte, 1 for stdout and 2 for stderr. The last
/// frame is `{"exited":{…}}` or `{"failed":{…}}`. Closing the socket kills the command.
#[utoipa::path(get, path = "/v1/sessions/{session}/exec", tag = "sessions",
    responses(
        (status = 101, body = SocketOut, description = "The WebSocket; the last text frame reports how the command ended"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The session has no sandbox, and none could be started"),
    ))]
async fn exec_open(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    RevokedOrShutdown(cancel): RevokedOrShutdown,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let sandbox = state.sessions.sandbox_handle(&session).await?;
    Ok(upgrade.on_upgrade(|socket| websocket::serve_exec(socket, sandbox, cancel)))
}
