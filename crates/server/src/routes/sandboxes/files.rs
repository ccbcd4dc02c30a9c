//! `/v1/sandboxes/{sandbox}/files`: files and folders in a standalone sandbox.

use axum::{
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

use super::SandboxState;
use crate::{
    authorization::Access::Change,
    extract::{Path, Query},
    problem::{ApiError, JsonResult},
    routes::{
        files::{DeleteQuery, GetQuery, PutQuery, StatQuery, read, stat_headers, write_or_drain},
        route::{Routes, routes},
    },
};

pub(super) fn routes() -> Routes<SandboxState> {
    routes![
        sandbox_file_get: Change,
        sandbox_file_stat: Change,
        sandbox_file_put: Change,
        sandbox_file_delete: Change,
    ]
}

/// Reads a file, or lists a folder ordered by name. The path is relative to the sandbox's root;
/// links are followed inside the sandbox. The header `x-harvest-kind` is `file` or `folder`.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(GetQuery),
    responses((status = 200, description = "The file's bytes, or the folder's entries",
        content((Vec<u8> = "application/octet-stream"), (Page<FileStat> = "application/json")))))]
async fn sandbox_file_get(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<GetQuery>,
) -> Result<Response, ApiError> {
    query.check()?;
    read(state.sandboxes.standalone_handle(&sandbox).await?, query).await
}

/// Returns the metadata of a file, folder or link in headers, as for a session. Links are not
/// followed.
#[utoipa::path(head, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(StatQuery),
    responses((status = 200, description = "The metadata")))]
async fn sandbox_file_stat(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<StatQuery>,
) -> Result<HeaderMap, ApiError> {
    let (path, user) = query.checked()?;
    let sandbox = state.sandboxes.standalone_handle(&sandbox).await?;
    Ok(stat_headers(&sandbox.file_stat(path, user).await?))
}

/// Writes a file, or creates a folder or a link, as for a session.
#[utoipa::path(put, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(
        ("path" = String, Query, description = "The path; its parent folder must exist"),
        ("mode" = Option<String>, Query, description = "Permission bits, octal; 644 by default, 755 for a folder"),
        ("user" = Option<String>, Query, description = "Acts with the access of this user, who owns new files: `root` (default), another user or a number"),
        ("kind" = Option<FileKind>, Query, description = "`file` (default), `folder` or `link`"),
        ("target" = Option<String>, Query, description = "The target of a link"),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "The file's bytes"),
    responses((status = 200, body = FileStat, description = "The metadata of the new file")))]
async fn sandbox_file_put(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<PutQuery>,
    body: Body,
) -> JsonResult<FileStat> {
    let handle = async { Ok(state.sandboxes.standalone_handle(&sandbox).await?) };
    write_or_drain(handle, query, body).await
}

/// Removes a file or a link, or with `recursive` a folder and its content.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/files", tag = "sandboxes",
    params(DeleteQuery),
    responses((status = 204, description = "Removed")))]
async fn sandbox_file_delete(
    State(state): State<SandboxState>,
    Path(sandbox): Path<SandboxId>,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, ApiError> {
    let (path, recursive) = query.checked()?;
    let sandbox = state.sandboxes.standalone_handle(&sandbox).await?;
    sandbox.file_remove(path, query.user.clone(), recursive).await?;
    Ok(StatusCode::NO_CONTENT)
}
