//! `/v1/retention`: disk usage of sessions and the retention rules; also pinning of snapshots.

use axum::{Json, extract::State};
use harvest_proto::{
    SessionId, SnapshotId,
    api::{PinSnapshot, RetentionReport, Snapshot},
};

use crate::{
    ServerState,
    authorization::Access::{Administer, Change, Read},
    extract::{Body, Path},
    problem::JsonResult,
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        retention_get: Read,
        retention_apply: Administer,
        snapshot_pin: Change,
    ]
}

/// Reports the disk usage of sessions and what the retention rules would remove now.
#[utoipa::path(get, path = "/v1/retention", tag = "disks",
    responses((status = 200, body = RetentionReport, description = "The report; nothing is removed")))]
async fn retention_get(State(state): State<ServerState>) -> JsonResult<RetentionReport> {
    Ok(Json(state.sessions.retention().await?))
}

/// Applies the retention rules now.
#[utoipa::path(post, path = "/v1/retention", tag = "disks",
    responses((status = 200, body = RetentionReport, description = "The usage, and what was removed")))]
async fn retention_apply(State(state): State<ServerState>) -> JsonResult<RetentionReport> {
    Ok(Json(state.sessions.enforce_retention().await?))
}

/// Pins a snapshot, which exempts it from retention, or unpins it.
#[utoipa::path(put, path = "/v1/sessions/{session}/snapshots/{snapshot}", tag = "turns",
    request_body = PinSnapshot,
    responses((status = 200, body = Snapshot, description = "The snapshot")))]
async fn snapshot_pin(
    State(state): State<ServerState>,
    Path((session, snapshot)): Path<(SessionId, SnapshotId)>,
    Body(body): Body<PinSnapshot>,
) -> JsonResult<Snapshot> {
    Ok(Json(state.sessions.snapshot_pin(&session, &snapshot, body.pinned).await?))
}
