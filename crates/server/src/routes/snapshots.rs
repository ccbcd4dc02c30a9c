//! `/v1/sessions/{session}/snapshots`: states a session can be restored or forked from.

use axum::extract::State;
use harvest_proto::{
    SessionId,
    api::{Page, Snapshot},
};

use crate::{
    ServerState,
    authorization::Access::Read,
    extract::Path,
    problem::JsonResult,
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        snapshot_list: Read,
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
