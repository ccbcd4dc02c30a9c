//! `/v1/warm`: sandboxes that are started before their session.

use axum::{Json, extract::State};
use harvest_proto::api::{Page, PoolSandbox, Problem, WarmRepository, WarmingSandbox};

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::Access::{Create, Read},
    extract::Body,
    problem::JsonResult,
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        warm_list: Read,
        // Repeated, it reserves the same sandbox again.
        warm_start: Create,
    ]
}

/// Lists the sandboxes that wait for a session, oldest first.
#[utoipa::path(get, path = "/v1/warm", tag = "sandboxes",
    responses((status = 200, body = Page<PoolSandbox>, description = "The sandboxes")))]
async fn warm_list(State(state): State<ServerState>) -> JsonResult<Page<PoolSandbox>> {
    Ok(page(state.sessions.pool()))
}

/// Reserves a waiting sandbox for the user's next session on a repository, or starts one. Returns
/// at once. Without a session it is given up after five minutes.
#[utoipa::path(post, path = "/v1/warm", tag = "sandboxes", request_body = WarmRepository,
    responses((status = 200, body = WarmingSandbox, description = "The sandbox"),
        (status = 404, body = Problem, content_type = "application/problem+json",
            description = "No repository has this name"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The repository has no build, or there is no room for a sandbox")))]
async fn warm_start(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Body(body): Body<WarmRepository>,
) -> JsonResult<WarmingSandbox> {
    Ok(Json(state.sessions.warm(body, &token.user.email).await?))
}
