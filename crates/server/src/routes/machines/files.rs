//! `/v1/sandboxes/{sandbox}/files`: files and folders in a sandbox that no session has.

use axum::{
    Json,
    body::Body,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::Response,
};
use harvest_proto::{
    SandboxId,
    api::Page,
    bridge::{FileKind, FileStat},
};

use super::Desk;
use crate::{
    extract::{Path, Query},
    problem::ApiError,
    routes::files::{Delete, Get, Head, Put, described, read, write_or_drain},
};

/// Whose new files are: an image need not have any other user.
const USER: &str = "root";

/// Reads a file, or lists a folder by name. A path begins at the sandbox's root; links are followed inside.
/// `x-harvest-kind` says which of the two came.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(
        ("sandbox" = SandboxId, Path, description = "The sandbox"),
        ("path" = String, Query, description = "The file or folder"),
        ("cursor" = Option<String>, Query, description = "Where a list goes on: its `next_cursor`"),
        ("limit" = Option<u32>, Query, description = "How many entries, 1 to 1000; 200 when absent"),
    ),
    responses((status = 200, description = "The file's bytes, or what the folder holds",
        content((Vec<u8> = "application/octet-stream"), (Page<FileStat> = "application/json")))))]
pub(crate) async fn sandbox_file_get(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Get>,
) -> Result<Response, ApiError> {
    query.check()?;
    read(desk.commands.inside(&sandbox).await?, query).await
}

/// Describes a file, folder or link in headers, as for a session. A link is not followed.
#[utoipa::path(head, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(
        ("sandbox" = SandboxId, Path, description = "The sandbox"),
        ("path" = String, Query, description = "The file, folder or link"),
    ),
    responses((status = 200, description = "It is there")))]
pub(crate) async fn sandbox_file_stat(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Head>,
) -> Result<HeaderMap, ApiError> {
    let path = query.checked()?;
    Ok(described(&desk.commands.inside(&sandbox).await?.file_stat(path).await?))
}

/// Writes a file, or makes a folder or a link, as for a session.
#[utoipa::path(put, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(
        ("sandbox" = SandboxId, Path, description = "The sandbox"),
        ("path" = String, Query, description = "What is to be there; its folder is"),
        ("mode" = Option<String>, Query, description = "Permission bits, octal; 644, for a folder 755, when absent"),
        ("user" = Option<String>, Query, description = "Whose it is: `root`, the default, another or a number"),
        ("kind" = Option<FileKind>, Query, description = "`file`, the default, `folder` or `link`"),
        ("target" = Option<String>, Query, description = "Where a link points"),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "The file's bytes"),
    responses((status = 200, body = FileStat, description = "What is there now")))]
pub(crate) async fn sandbox_file_put(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Put>,
    body: Body,
) -> Result<Json<FileStat>, ApiError> {
    let inside = async { Ok(desk.commands.inside(&sandbox).await?) };
    write_or_drain(inside, query.by(USER), body).await
}

/// Removes a file or a link; with `recursive` a folder as well, with all that is in it.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(
        ("sandbox" = SandboxId, Path, description = "The sandbox"),
        ("path" = String, Query, description = "What is to go"),
        ("recursive" = Option<bool>, Query, description = "Also a folder with all that is in it"),
    ),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn sandbox_file_delete(
    State(desk): State<Desk>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<Delete>,
) -> Result<StatusCode, ApiError> {
    let (path, recursive) = query.checked()?;
    desk.commands.inside(&sandbox).await?.file_remove(path, recursive).await?;
    Ok(StatusCode::NO_CONTENT)
}
