//! `/v1/sandboxes/{sandbox}/pty`: a terminal in a sandbox that no session has, over a WebSocket.

use axum::{extract::State, response::Response};
use harvest_proto::{
    SandboxId,
    api::{Problem, SocketOut},
};

use super::Desk;
use crate::{
    auth::Ending,
    extract::{Path, Query},
    problem::ApiError,
    routes::pty::order,
    socket::{self, Kind, Upgrade},
};

/// Opens a terminal with a shell, or with another command, on it; the frames are those of a session's terminal.
/// The terminal hangs up when the socket closes.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/pty", tag = "sandboxes",
    params(
        ("sandbox" = SandboxId, Path, description = "The sandbox"),
        ("rows" = Option<u16>, Query, description = "The terminal's height; 24 when absent", minimum = 1, maximum = 4096),
        ("cols" = Option<u16>, Query, description = "Its width; 80 when absent", minimum = 1, maximum = 4096),
        ("term" = Option<String>, Query, description = "The command's `TERM`; `xterm-256color` when absent"),
        ("argv" = Option<Vec<String>>, Query, description = "Program and arguments, one each; a shell when absent"),
        ("cwd" = Option<String>, Query, description = "Working folder; the image's when absent"),
        ("user" = Option<String>, Query, description = "`harvest`, `root` or a number; the image's when absent"),
    ),
    responses((status = 101, body = SocketOut, description = "The terminal; the last text frame says how it ended"),
        (status = 426, body = Problem, content_type = "application/problem+json",
            description = "The request is no upgrade to a WebSocket")))]
pub(crate) async fn sandbox_pty_open(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Vec<(String, String)>>,
    Ending(ending): Ending,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let order = order(query)?;
    // Before the upgrade: what goes wrong up to here is a problem like any other.
    let (running, input) = desk.commands.inside(&sandbox).await?.terminal(order).await?;
    Ok(upgrade
        .on_upgrade(|socket| socket::carry(socket, running, Some(input), Kind::Terminal, ending)))
}
