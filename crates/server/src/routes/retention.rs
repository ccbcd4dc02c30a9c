//! `/v1/retention`: what sessions hold on the disk, and what the rules have go.

use axum::{Json, extract::State};
use harvest_proto::{
    SessionId, SnapshotId,
    api::{PinSnapshot, Retained, Snapshot},
};

use crate::{
    ServerState,
    extract::{Body, Path},
    problem::ApiError,
};

/// Shows what sessions hold on the disk and what the rules would have go now.
#[utoipa::path(get, path = "/v1/retention", tag = "disks",
    responses((status = 200, body = Retained, description = "Nothing goes by looking")))]
pub(crate) async fn retention_get(
    State(state): State<ServerState>,
) -> Result<Json<Retained>, ApiError> {
    Ok(Json(state.sessions.retention().await?))
}

/// Has go what the rules say, now rather than in a while.
#[utoipa::path(post, path = "/v1/retention", tag = "disks",
    responses((status = 200, body = Retained, description = "What was held, and what of it went")))]
pub(crate) async fn retention_keep(
    State(state): State<ServerState>,
) -> Result<Json<Retained>, ApiError> {
    Ok(Json(state.sessions.retain().await?))
}

/// Keeps a snapshot of a session whatever the rules say, or no longer.
#[utoipa::path(put, path = "/v1/sessions/{session}/snapshots/{snapshot}", tag = "turns",
    request_body = PinSnapshot,
    params(("session" = SessionId, Path, description = "The session"),
           ("snapshot" = SnapshotId, Path, description = "The snapshot")),
    responses((status = 200, body = Snapshot, description = "The snapshot")))]
pub(crate) async fn snapshot_pin(
    State(state): State<ServerState>,
    Path((session, snapshot)): Path<(SessionId, SnapshotId)>,
    Body(body): Body<PinSnapshot>,
) -> Result<Json<Snapshot>, ApiError> {
    Ok(Json(state.sessions.snapshot_pin(&session, &snapshot, body.pinned).await?))
}
