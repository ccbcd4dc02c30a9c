//! `/v1/users`: who uses the server, and what members may use for sandboxes of their own.

use axum::{Json, extract::State};
use harvest_proto::api::{Page, SetUserLimits, User, UserLimits};

use crate::{
    ServerState,
    authorization::Access::Administer,
    extract::{Body, Path},
    problem::JsonResult,
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        user_list: Administer,
        user_limits_set: Administer,
    ]
}

/// Lists users with a token or with limits of their own, ordered by address.
#[utoipa::path(get, path = "/v1/users", tag = "users",
    responses((status = 200, body = Page<User>, description = "The users")))]
async fn user_list(State(state): State<ServerState>) -> JsonResult<Page<User>> {
    Ok(page(state.sandboxes.users().await?))
}

/// Changes what a member may use for standalone sandboxes and one-shot commands. Sandboxes that
/// exist stay as they are.
#[utoipa::path(patch, path = "/v1/users/{email}/limits", tag = "users",
    request_body = SetUserLimits,
    params(("email" = String, Path, description = "The user's e-mail address")),
    responses((status = 200, body = UserLimits, description = "The limits")))]
async fn user_limits_set(
    State(state): State<ServerState>,
    Path(email): Path<String>,
    Body(change): Body<SetUserLimits>,
) -> JsonResult<UserLimits> {
    Ok(Json(state.sandboxes.user_limits_set(&email, change).await?))
}
