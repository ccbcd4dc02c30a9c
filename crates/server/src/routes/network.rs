//! `/v1/network` and the network rules of sessions and repositories: the names that sandboxes may
//! connect to.

use axum::{Json, extract::State};
use harvest_proto::{NetworkPolicy, SessionId, api::NetworkRules};
use harvest_session::BUILD_POLICY;

use crate::{
    ServerState,
    authorization::Access::Read,
    extract::Path,
    problem::JsonResult,
    routes::{
        repositories::named,
        route::{Routes, routes},
    },
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        network_get: Read,
        session_network: Read,
        repository_network: Read,
    ]
}

/// Returns the names that sessions with the default network policy may connect to.
#[utoipa::path(get, path = "/v1/network", tag = "network",
    responses((status = 200, body = NetworkRules, description = "The rules of new sessions")))]
async fn network_get(State(state): State<ServerState>) -> JsonResult<NetworkRules> {
    Ok(Json(state.repositories.network_rules(NetworkPolicy::default()).await))
}

/// Returns the names that a session may connect to.
#[utoipa::path(get, path = "/v1/sessions/{session}/network", tag = "network",
    responses((status = 200, body = NetworkRules, description = "The session's rules")))]
async fn session_network(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<NetworkRules> {
    let policy = state.sessions.get(&session).await?.network;
    Ok(Json(state.repositories.network_rules(policy).await))
}

/// Returns the names that builds of a repository may connect to.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/network", tag = "network",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = NetworkRules, description = "The rules of its builds")))]
async fn repository_network(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> JsonResult<NetworkRules> {
    state.repositories.get(&named(&owner, &name)?).await?;
    Ok(Json(state.repositories.network_rules(BUILD_POLICY).await))
}
