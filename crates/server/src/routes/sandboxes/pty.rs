//! `/v1/sandboxes/{sandbox}/pty`: a terminal in a standalone sandbox, over a WebSocket.

use axum::{extract::State, response::Response};
use harvest_proto::{SandboxId, api::SocketOut};

use super::SandboxState;
use crate::{
    auth::RevokedOrShutdown,
    authorization::Access::Change,
    extract::{Path, Query},
    problem::ApiError,
    routes::{
        pty::terminal_request,
        route::{Routes, routes},
    },
    websocket::{self, SocketKind, Upgrade},
};

pub(super) fn routes() -> Routes<SandboxState> {
    routes![
        sandbox_pty_open: Change,
    ]
}

/// Opens a terminal that runs a shell or another command, with the same frames as a session's
/// terminal. Closing the socket hangs up the terminal.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/pty", tag = "sandboxes",
    params(
        ("rows" = Option<u16>, Query, description = "Height of the terminal; 24 by default", minimum = 1, maximum = 4096),
        ("cols" = Option<u16>, Query, description = "Width of the terminal; 80 by default", minimum = 1, maximum = 4096),
        ("term" = Option<String>, Query, description = "The `TERM` variable; `xterm-256color` by default"),
        ("argv" = Option<Vec<String>>, Query, description = "Program and arguments, one parameter each; a shell by default"),
        ("cwd" = Option<String>, Query, description = "Working directory; the image's by default"),
        ("user" = Option<String>, Query, description = "`harvest`, `root` or a number; the image's user by default"),
    ),
    responses((status = 101, body = SocketOut, description = "The terminal; the last text frame reports how it ended")))]
async fn sandbox_pty_open(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Vec<(String, String)>>,
    RevokedOrShutdown(cancel): RevokedOrShutdown,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let request = terminal_request(query)?;
    // Started before the upgrade, so that errors are ordinary problem responses.
    let (running, input) =
        state.sandboxes.standalone_handle(&sandbox).await?.terminal(request).await?;
    Ok(upgrade.on_upgrade(|socket| {
        websocket::relay(socket, running, Some(input), SocketKind::Terminal, cancel)
    }))
}
