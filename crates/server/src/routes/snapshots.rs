//! `/v1/sessions/{session}/snapshots`: states a session can be restored or forked from.

use axum::{Extension, extract::State, response::Response};
use harvest_proto::{
    SessionId,
    api::{CreateSnapshot, Page, Snapshot},
};

use crate::{
    ServerState,
    authorization::Access::{Change, Read},
    extract::{OptionalBody, Path},
    idempotency::{IdempotencyKey, PlannedIds, Repeat},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, created, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        snapshot_list: Read,
        snapshot_create: Change.idempotent(Repeat::Planned),
    ]
}

/// Lists a session's snapshots, oldest first.
#[utoipa::path(get, path = "/v1/sessions/{session}/snapshots", tag = "turns",
    responses((status = 200, body = Page<Snapshot>, description = "The snapshots")))]
async fn snapshot_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Page<Snapshot>> {
    Ok(page(state.sessions.snapshots(&session).await?))
}

/// Takes a snapshot of a session, which goes on with what it does. A session without a sandbox
/// answers with its newest snapshot. The session can be restored to it, and another one can start
/// from it.
#[utoipa::path(post, path = "/v1/sessions/{session}/snapshots", tag = "turns",
    request_body = Option<CreateSnapshot>,
    responses((status = 201, body = Snapshot, description = "The snapshot")))]
async fn snapshot_create(
    State(state): State<ServerState>,
    key: IdempotencyKey,
    planned: Option<Extension<PlannedIds>>,
    Path(session): Path<SessionId>,
    OptionalBody(body): OptionalBody<CreateSnapshot>,
) -> Result<Response, ApiError> {
    let planned = planned.map(|Extension(planned)| planned.0).unwrap_or_default();
    let sessions = key.scope(&state.sessions);
    let snapshot = sessions.snapshot_create(&session, body, &planned).await?;
    Ok(created(&format!("/v1/sessions/{session}/snapshots"), &snapshot))
}
