//! `/v1/volumes`, `/v1/snapshots`, `/v1/df`, `/v1/gc`, `/v1/doctor`: what the host keeps, and what it lacks.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{
    SnapshotId,
    api::{
        Page,
        machines::{Collect, Collected, CreateVolume, DiskUsage, Finding, MachineSnapshot, Volume},
    },
};

use super::{Desk, Insist};
use crate::{
    extract::{Body, OptionalBody, Path, Query},
    problem::ApiError,
};

/// Lists volumes, by name.
#[utoipa::path(get, path = "/v1/volumes", tag = "disks",
    responses((status = 200, body = Page<Volume>, description = "The volumes")))]
pub(crate) async fn volume_list(State(desk): State<Desk>) -> Result<Json<Page<Volume>>, ApiError> {
    let items = desk.machines().volume_list().await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Makes a volume: a place that outlives sandboxes. Its room is taken on the disk at once.
#[utoipa::path(post, path = "/v1/volumes", tag = "disks", request_body = CreateVolume,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = Volume, description = "The volume")))]
pub(crate) async fn volume_create(
    State(desk): State<Desk>,
    Body(body): Body<CreateVolume>,
) -> Result<(StatusCode, Json<Volume>), ApiError> {
    Ok((StatusCode::CREATED, Json(desk.machines().volume_create(body).await?)))
}

/// Throws a volume away with everything in it.
#[utoipa::path(delete, path = "/v1/volumes/{name}", tag = "disks",
    params(("name" = String, Path, description = "Its name")),
    responses((status = 204, description = "Gone")))]
pub(crate) async fn volume_delete(
    State(desk): State<Desk>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    desk.machines().volume_delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists every snapshot of the host, newest first: one's own and those of sessions.
#[utoipa::path(get, path = "/v1/snapshots", tag = "disks",
    responses((status = 200, body = Page<MachineSnapshot>, description = "The snapshots")))]
pub(crate) async fn machine_snapshot_list(
    State(desk): State<Desk>,
) -> Result<Json<Page<MachineSnapshot>>, ApiError> {
    let items = desk.machines().snapshot_list().await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Forgets a snapshot; what only it held goes with the next collection.
#[utoipa::path(delete, path = "/v1/snapshots/{snapshot}", tag = "disks",
    params(("snapshot" = SnapshotId, Path, description = "The snapshot"),
           ("force" = Option<bool>, Query, description = "Also one that a session may go on from")),
    responses((status = 204, description = "Forgotten")))]
pub(crate) async fn machine_snapshot_delete(
    State(desk): State<Desk>,
    Path(snapshot): Path<SnapshotId>,
    Query(insist): Query<Insist>,
) -> Result<StatusCode, ApiError> {
    desk.machines().snapshot_delete(&snapshot, insist.force).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Says what takes how much room.
#[utoipa::path(get, path = "/v1/df", tag = "disks",
    responses((status = 200, body = DiskUsage, description = "What takes how much")))]
pub(crate) async fn disk_usage(State(desk): State<Desk>) -> Result<Json<DiskUsage>, ApiError> {
    Ok(Json(desk.machines().disk_usage().await?))
}

/// Removes what nothing uses any more.
#[utoipa::path(post, path = "/v1/gc", tag = "disks", request_body = Option<Collect>,
    responses((status = 200, body = Collected, description = "What went, or would go")))]
pub(crate) async fn collect(
    State(desk): State<Desk>,
    OptionalBody(body): OptionalBody<Collect>,
) -> Result<Json<Collected>, ApiError> {
    Ok(Json(desk.machines().collect(body.dry_run).await?))
}

/// Tries what sandboxes need of the host.
#[utoipa::path(get, path = "/v1/doctor", tag = "disks",
    responses((status = 200, body = Page<Finding>, description = "What the host has and lacks")))]
pub(crate) async fn doctor(State(desk): State<Desk>) -> Result<Json<Page<Finding>>, ApiError> {
    let items = desk.machines().findings().await?;
    Ok(Json(Page { items, next_cursor: None }))
}
