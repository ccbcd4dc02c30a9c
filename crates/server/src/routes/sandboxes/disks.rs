//! `/v1/volumes`, `/v1/snapshots`, `/v1/df`, `/v1/gc`, `/v1/doctor`: disks of the host, and its
//! checks.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::{
    SnapshotId,
    api::{
        CollectGarbage, CreateVolume, DiskUsage, Finding, GarbageReport, Page, StoredSnapshot,
        Volume,
    },
};

use super::{Force, SandboxState};
use crate::{
    authorization::Access::Administer,
    extract::{Body, OptionalBody, Path, Query},
    idempotency::Repeat,
    problem::{ApiError, JsonResult},
    routes::route::{Routes, created, page, routes},
};

pub(super) fn routes() -> Routes<SandboxState> {
    routes![
        volume_list: Administer,
        volume_create: Administer.idempotent(Repeat::Planned),
        volume_delete: Administer,
        stored_snapshot_list: Administer,
        stored_snapshot_delete: Administer,
        disk_usage: Administer,
        collect_garbage: Administer,
        doctor: Administer,
    ]
}

/// Lists volumes, ordered by name.
#[utoipa::path(get, path = "/v1/volumes", tag = "disks",
    responses((status = 200, body = Page<Volume>, description = "The volumes")))]
async fn volume_list(State(state): State<SandboxState>) -> JsonResult<Page<Volume>> {
    Ok(page(state.sandboxes.host()?.volume_list().await?))
}

/// Creates a volume: storage that outlives sandboxes. Its size is reserved on the disk at once.
#[utoipa::path(post, path = "/v1/volumes", tag = "disks", request_body = CreateVolume,
    responses((status = 201, body = Volume, description = "The volume")))]
async fn volume_create(
    State(state): State<SandboxState>,
    Body(body): Body<CreateVolume>,
) -> Result<Response, ApiError> {
    let volume = state.sandboxes.host()?.volume_create(body).await?;
    Ok(created(&format!("/v1/volumes/{}", volume.name), &volume))
}

/// Deletes a volume with its content.
#[utoipa::path(delete, path = "/v1/volumes/{name}", tag = "disks",
    params(("name" = String, Path, description = "The volume's name")),
    responses((status = 204, description = "Deleted")))]
async fn volume_delete(
    State(state): State<SandboxState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.sandboxes.host()?.volume_delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists all snapshots of the host, including those of sessions, newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "disks",
    responses((status = 200, body = Page<StoredSnapshot>, description = "The snapshots")))]
async fn stored_snapshot_list(
    State(state): State<SandboxState>,
) -> JsonResult<Page<StoredSnapshot>> {
    Ok(page(state.sandboxes.snapshots()?.list().await?))
}

/// Removes a snapshot; disk space is freed by the next garbage collection.
#[utoipa::path(delete, path = "/v1/snapshots/{snapshot}", tag = "disks",
    params(("force" = Option<bool>, Query, description = "Also remove a snapshot that a session may need")),
    responses((status = 204, description = "Removed")))]
async fn stored_snapshot_delete(
    State(state): State<SandboxState>,
    Path(snapshot): Path<SnapshotId>,
    Query(query): Query<Force>,
) -> Result<StatusCode, ApiError> {
    state.sandboxes.snapshot_delete(&snapshot, query.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Reports disk usage.
#[utoipa::path(get, path = "/v1/df", tag = "disks",
    responses((status = 200, body = DiskUsage, description = "The usage")))]
async fn disk_usage(State(state): State<SandboxState>) -> JsonResult<DiskUsage> {
    Ok(Json(state.sandboxes.host()?.disk_usage().await?))
}

/// Removes unused layers and other garbage.
#[utoipa::path(post, path = "/v1/gc", tag = "disks", request_body = Option<CollectGarbage>,
    responses((status = 200, body = GarbageReport, description = "What was removed, or with `dry_run` would be")))]
async fn collect_garbage(
    State(state): State<SandboxState>,
    OptionalBody(body): OptionalBody<CollectGarbage>,
) -> JsonResult<GarbageReport> {
    Ok(Json(state.sandboxes.host()?.collect(body.dry_run).await?))
}

/// Checks whether the host can run sandboxes.
#[utoipa::path(get, path = "/v1/doctor", tag = "disks",
    responses((status = 200, body = Page<Finding>, description = "The results of the checks")))]
async fn doctor(State(state): State<SandboxState>) -> JsonResult<Page<Finding>> {
    Ok(page(state.sandboxes.host()?.findings().await?))
}
