//! `/v1/sandboxes` and `/v1/exec`: sandboxes that no session has, and commands in them.

use axum::{
    Json,
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
};
use harvest_proto::{
    SandboxId,
    api::{
        ExecLine,
        machines::{
            CreateSandbox, CreatedSandbox, ExecOnce, ForkSandbox, ForkedSandbox, RestoreSandbox,
            RestoredSandbox, RunCommand, Sandbox, SandboxList, SandboxSnapshot,
        },
    },
};

use harvest_session::machines::Outcome;
use serde::Serialize;

use super::{Desk, Insist, asker::By};
use crate::{
    extract::{Body, OptionalBody, Path, Query},
    idempotency::replayed,
    problem::ApiError,
    stdin::Fed,
    stream, valid,
};

/// Lists every sandbox of the host, newest first; those of sessions too.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes",
    responses((status = 200, body = SandboxList, description = "The sandboxes")))]
pub(crate) async fn sandbox_list(State(desk): State<Desk>) -> Result<Json<SandboxList>, ApiError> {
    Ok(Json(desk.machines().sandbox_list().await?))
}

/// Starts a sandbox that stays until it is deleted, also when the server ends.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = Option<CreateSandbox>,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = CreatedSandbox, description = "It runs")))]
pub(crate) async fn sandbox_create(
    State(desk): State<Desk>,
    By(asker): By,
    OptionalBody(body): OptionalBody<CreateSandbox>,
) -> Result<Response, ApiError> {
    valid::sandbox(&body)?;
    Ok(created(desk.commands.create(&asker, body).await?))
}

/// Shows a sandbox as it stands.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    params(("sandbox" = SandboxId, Path, description = "The sandbox")),
    responses((status = 200, body = Sandbox, description = "The sandbox")))]
pub(crate) async fn sandbox_get(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
) -> Result<Json<Sandbox>, ApiError> {
    Ok(Json(desk.machines().sandbox_get(&sandbox).await?))
}

/// Ends a sandbox and throws its disk away.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}", tag = "sandboxes",
    params(("sandbox" = SandboxId, Path, description = "The sandbox"),
           ("force" = Option<bool>, Query, description = "Also one of a session, or of which nothing is known")),
    responses((status = 204, description = "Gone")))]
pub(crate) async fn sandbox_delete(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Query(insist): Query<Insist>,
) -> Result<StatusCode, ApiError> {
    desk.commands.delete(&sandbox, insist.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Runs a command; the answer streams its output and ends with how it ended. The command is killed when the
/// client goes away.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/exec", tag = "sandboxes",
    params(("sandbox" = SandboxId, Path, description = "The sandbox")),
    request_body(content((RunCommand = "application/json"), (String = "application/vnd.harvest.exec")),
        description = "The command; as `application/vnd.harvest.exec` it is one line of JSON, and what follows is \
                       what the command reads, as it comes"),
    responses((status = 200, body = ExecLine, content_type = "application/x-ndjson",
        description = "One JSON object per line, empty ones apart; the last is `exited` or `failed`")))]
pub(crate) async fn sandbox_exec(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Fed { command, input }: Fed<RunCommand>,
) -> Result<Response, ApiError> {
    valid::run(&command)?;
    let is_fed = input.is_some();
    let lines = desk.commands.exec(&sandbox, command, input).await?;
    Ok(answer(lines, is_fed, desk))
}

/// Runs a command in a fresh sandbox that is gone when the command has ended, or the client has gone away.
#[utoipa::path(post, path = "/v1/exec", tag = "sandboxes",
    request_body(content((ExecOnce = "application/json"), (String = "application/vnd.harvest.exec")),
        description = "The command and its sandbox; as `application/vnd.harvest.exec` it is one line of JSON, and \
                       what follows is what the command reads, as it comes"),
    responses((status = 200, body = ExecLine, content_type = "application/x-ndjson",
        description = "One JSON object per line, empty ones apart; the first is `started`, the last `exited` or \
                       `failed`")))]
pub(crate) async fn exec_once(
    State(desk): State<Desk>,
    By(asker): By,
    Fed { command, input }: Fed<ExecOnce>,
) -> Result<Response, ApiError> {
    let (sandbox, run) = command.clone().parts();
    valid::sandbox(&sandbox)?;
    valid::run(&run)?;
    let is_fed = input.is_some();
    let lines = desk.commands.exec_once(&asker, command, input).await?;
    Ok(answer(lines, is_fed, desk))
}

/// What was made, just now or for an earlier request with the same key.
fn created<T: Serialize>(Outcome { made, again }: Outcome<T>) -> Response {
    let response = (StatusCode::CREATED, Json(made)).into_response();
    if again { replayed(response) } else { response }
}

fn answer(
    lines: impl futures_util::Stream<Item = ExecLine> + Send + Unpin + 'static,
    is_fed: bool,
    desk: Desk,
) -> Response {
    match is_fed {
        true => stream::lines_felt(lines, desk.shutdown),
        false => stream::lines(lines, desk.shutdown),
    }
}

/// Ends what runs in a sandbox and keeps its disk.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/stop", tag = "sandboxes",
    params(("sandbox" = SandboxId, Path, description = "The sandbox")),
    responses((status = 200, body = Sandbox, description = "The sandbox, which does not run")))]
pub(crate) async fn sandbox_stop(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
) -> Result<Json<Sandbox>, ApiError> {
    Ok(Json(desk.commands.stop(&sandbox).await?))
}

/// Starts a stopped or dead sandbox again with the disk it left.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/start", tag = "sandboxes",
    params(("sandbox" = SandboxId, Path, description = "The sandbox")),
    responses((status = 200, body = Sandbox, description = "The sandbox, which runs")))]
pub(crate) async fn sandbox_start(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
) -> Result<Json<Sandbox>, ApiError> {
    Ok(Json(desk.commands.start(&sandbox).await?))
}

/// Keeps the disk of a sandbox, which goes on.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/snapshot", tag = "sandboxes",
    params(("sandbox" = SandboxId, Path, description = "The sandbox"),
           ("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = SandboxSnapshot, description = "On disk")))]
pub(crate) async fn sandbox_snapshot(
    State(desk): State<Desk>,
    By(asker): By,
    Path(sandbox): Path<SandboxId>,
) -> Result<(StatusCode, Json<SandboxSnapshot>), ApiError> {
    Ok((StatusCode::CREATED, Json(desk.commands.snapshot(&asker, &sandbox).await?)))
}

/// Starts others from a sandbox's disk as it is now.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/fork", tag = "sandboxes", request_body = Option<ForkSandbox>,
    params(("sandbox" = SandboxId, Path, description = "The sandbox"),
           ("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = ForkedSandbox, description = "At least one of them runs")))]
pub(crate) async fn sandbox_fork(
    State(desk): State<Desk>,
    By(asker): By,
    Path(sandbox): Path<SandboxId>,
    OptionalBody(body): OptionalBody<ForkSandbox>,
) -> Result<Response, ApiError> {
    let count = valid::forks(body.count)?;
    Ok(created(desk.commands.fork(&asker, &sandbox, count).await?))
}

/// Puts a sandbox back to a snapshot; what was on its disk is kept as another one.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/restore", tag = "sandboxes", request_body = RestoreSandbox,
    params(("sandbox" = SandboxId, Path, description = "The sandbox"),
           ("Idempotency-Key" = Option<String>, Header, description = "The same key restores only once",
            min_length = 1, max_length = 128)),
    responses((status = 200, body = RestoredSandbox, description = "It runs again")))]
pub(crate) async fn sandbox_restore(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Body(body): Body<RestoreSandbox>,
) -> Result<Json<RestoredSandbox>, ApiError> {
    Ok(Json(desk.commands.restore(&sandbox, &body.snapshot).await?))
}
