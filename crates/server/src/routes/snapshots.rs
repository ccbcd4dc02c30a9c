//! `/v1/sessions/{session}/snapshots`: states a session can be restored or forked from.

use axum::{Json, extract::State};
use harvest_proto::{
    SessionId,
    api::{Page, Snapshot},
};

use crate::{
    ServerState,
    authorization::Access::Read,
    extract::Path,
    problem::ApiError,
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        snapshot_list: Read,
    ]
}

/// Lists a session's snapshots, oldest first.
#[utoipa::path(get, path = "/v1/sessions/{session}/snapshots", tag = "turns",
    params(("session" = SessionId, Path, description = "The session")),
    responses((status = 200, body = Page<Snapshot>, description = "The snapshots")))]
pub(crate) async fn snapshot_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> Result<Json<Page<Snapshot>>, ApiError> {
    let items = state.sessions.snapshots(&session).await?;
    Ok(Json(Page { items, next_cursor: None }))
}
