//! `/v1/sandboxes` and `/v1/exec`: standalone sandboxes, and commands in new ones.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::{
    SandboxId,
    api::{
        CreateSandbox, CreatedSandbox, ExecLine, ExecRequest, ForkSandbox, ForkedSandbox,
        RestoreSandbox, RestoredSandbox, Sandbox, SandboxList, SandboxSnapshot, SocketOut,
    },
};

use harvest_session::sandboxes::Outcome;
use serde::Serialize;

use super::{Force, SandboxState, requester::RequestedBy};
use crate::{
    auth::RevokedOrShutdown,
    authorization::Access::{Administer, Change, Create, Read},
    command_body::CommandWithInput,
    extract::{Body, OptionalBody, Path, Query},
    idempotency::{Repeat, replayed},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, created, routes},
    stream, validate,
    websocket::{self, Upgrade},
};

pub(super) fn routes() -> Routes<SandboxState> {
    routes![
        // Members see only their own.
        sandbox_list: Read,
        sandbox_create: Create.idempotent(Repeat::Planned),
        sandbox_get: Change,
        sandbox_delete: Change,
        sandbox_exec: Change,
        sandbox_exec_open: Change,
        // The sandbox is ephemeral: the command ends with its client.
        exec_once: Create.cancellable(),
        sandbox_stop: Change,
        sandbox_start: Change,
        // Snapshots stay on the disk and count against no limit; a fork has more than one disk.
        sandbox_snapshot: Administer.idempotent(Repeat::Planned),
        sandbox_fork: Administer.idempotent(Repeat::Planned),
        sandbox_restore: Administer.idempotent(Repeat::Planned),
    ]
}

/// Lists the sandboxes of the host, newest first: all of them for admins, including those of
/// sessions, otherwise the user's own.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes",
    responses((status = 200, body = SandboxList, description = "The sandboxes")))]
async fn sandbox_list(
    State(state): State<SandboxState>,
    RequestedBy(requester): RequestedBy,
) -> JsonResult<SandboxList> {
    Ok(Json(state.sandboxes.list_for(&requester).await?))
}

/// Creates and starts a sandbox, which runs until it is stopped or deleted, even across server
/// restarts.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = Option<CreateSandbox>,
    responses((status = 201, body = CreatedSandbox, description = "The running sandbox")))]
async fn sandbox_create(
    State(state): State<SandboxState>,
    RequestedBy(requester): RequestedBy,
    OptionalBody(body): OptionalBody<CreateSandbox>,
) -> Result<Response, ApiError> {
    validate::sandbox(&body)?;
    let created = state.sandboxes.create(&requester, body).await?;
    Ok(sandbox_created(&created.created.sandbox_id, &created))
}

/// Returns a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    responses((status = 200, body = Sandbox, description = "The sandbox")))]
async fn sandbox_get(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
) -> JsonResult<Sandbox> {
    Ok(Json(state.sandboxes.provider().get(&sandbox).await?))
}

/// Stops a sandbox and deletes its disk.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    params(("force" = Option<bool>, Query, description = "Also delete a sandbox that belongs to a session or has no record")),
    responses((status = 204, description = "Deleted")))]
async fn sandbox_delete(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Force>,
) -> Result<StatusCode, ApiError> {
    state.sandboxes.delete(&sandbox, query.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs a command and streams its output; the last line reports how it ended. The command is killed
/// when the client disconnects.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/exec", tag = "sandboxes",
    request_body(content((ExecRequest = "application/json"), (String = "application/vnd.harvest.exec")),
        description = "The command; as `application/vnd.harvest.exec` one line of JSON followed by \
                       the command's stdin"),
    responses((status = 200, body = ExecLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `exited` or `failed`; ignore empty lines")))]
async fn sandbox_exec(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    command: CommandWithInput,
) -> Result<Response, ApiError> {
    command.validate(false)?;
    let handle = state.sandboxes.standalone_handle(&sandbox).await?;
    command.run(handle, state.shutdown).await
}

/// Runs a command with live input over a WebSocket, with the same frames as in a session.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/exec", tag = "sandboxes",
    responses(
        (status = 101, body = SocketOut, description = "The WebSocket; the last text frame reports how the command ended"),
    ))]
async fn sandbox_exec_open(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    RevokedOrShutdown(cancel): RevokedOrShutdown,
    Upgrade(upgrade): Upgrade,
) -> Result<Response, ApiError> {
    let handle = state.sandboxes.standalone_handle(&sandbox).await?;
    Ok(upgrade.on_upgrade(|socket| websocket::serve_exec(socket, handle, cancel)))
}

/// Runs a command in a new sandbox, which is deleted when the command exits or the client
/// disconnects.
#[utoipa::path(post, path = "/v1/exec", tag = "sandboxes",
    request_body(content((ExecRequest = "application/json"), (String = "application/vnd.harvest.exec")),
        description = "The command and its sandbox; as `application/vnd.harvest.exec` one line of JSON \
                       followed by the command's stdin"),
    responses((status = 200, body = ExecLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the first is `started`, the last `exited` or `failed`; \
                       ignore empty lines")))]
async fn exec_once(
    State(state): State<SandboxState>,
    RequestedBy(requester): RequestedBy,
    command: CommandWithInput,
) -> Result<Response, ApiError> {
    command.validate(true)?;
    let CommandWithInput { command, input } = command;
    let has_input = input.is_some();
    let lines = state.sandboxes.exec_once(&requester, command, input).await?;
    Ok(stream::exec_lines(lines, has_input, state.shutdown))
}

/// 201 Created; marked as replayed when an earlier request with the same key created the sandbox.
fn sandbox_created<T: Serialize>(first: &SandboxId, outcome: &Outcome<T>) -> Response {
    let response = created(&format!("/v1/sandboxes/{first}"), &outcome.created);
    if outcome.replayed { replayed(response) } else { response }
}

/// Stops a sandbox and keeps its disk.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/stop", tag = "sandboxes",
    responses((status = 200, body = Sandbox, description = "The stopped sandbox")))]
async fn sandbox_stop(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
) -> JsonResult<Sandbox> {
    Ok(Json(state.sandboxes.stop(&sandbox).await?))
}

/// Starts a stopped or dead sandbox with its disk.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/start", tag = "sandboxes",
    responses((status = 200, body = Sandbox, description = "The running sandbox")))]
async fn sandbox_start(
    State(state): State<SandboxState>,
    RequestedBy(requester): RequestedBy,
    Path(sandbox): Path<SandboxId>,
) -> JsonResult<Sandbox> {
    Ok(Json(state.sandboxes.start(&requester, &sandbox).await?))
}

/// Takes a snapshot of a sandbox, which keeps running.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/snapshot", tag = "sandboxes",
    responses((status = 201, body = SandboxSnapshot, description = "The snapshot")))]
async fn sandbox_snapshot(
    State(state): State<SandboxState>,
    RequestedBy(requester): RequestedBy,
    Path(sandbox): Path<SandboxId>,
) -> Result<Response, ApiError> {
    let snapshot = state.sandboxes.snapshot(&requester, &sandbox).await?;
    Ok(created(&format!("/v1/snapshots/{}", snapshot.id), &snapshot))
}

/// Starts new sandboxes from the current disk of this one.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/fork", tag = "sandboxes", request_body = Option<ForkSandbox>,
    responses((status = 201, body = ForkedSandbox, description = "The forks; at least one is running")))]
async fn sandbox_fork(
    State(state): State<SandboxState>,
    RequestedBy(requester): RequestedBy,
    Path(sandbox): Path<SandboxId>,
    OptionalBody(body): OptionalBody<ForkSandbox>,
) -> Result<Response, ApiError> {
    let count = validate::fork_count(body.count)?;
    let forked = state.sandboxes.fork(&requester, &sandbox, count).await?;
    Ok(sandbox_created(forked.created.forks.first().unwrap_or(&sandbox), &forked))
}

/// Restores a sandbox to a snapshot; its previous disk is saved as another snapshot.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/restore", tag = "sandboxes", request_body = RestoreSandbox,
    responses((status = 200, body = RestoredSandbox, description = "The restored sandbox")))]
async fn sandbox_restore(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Body(body): Body<RestoreSandbox>,
) -> JsonResult<RestoredSandbox> {
    Ok(Json(state.sandboxes.restore(&sandbox, &body.snapshot_id).await?))
}
