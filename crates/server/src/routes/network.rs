//! `/v1/network` and the network rules of sessions and repositories: what sandboxes may connect to.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::{
    SessionId,
    api::{NetworkLogEntry, NetworkRule, NetworkRules, Page, SetNetworkRule},
};
use harvest_session::RuleOwner;

use crate::{
    ServerState,
    authorization::Access::{Administer, Change, Read},
    extract::{Body, Path},
    problem::{ApiError, JsonResult},
    routes::{
        repositories::named,
        route::{Routes, page, routes},
    },
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        network_get: Read,
        network_rule_set: Administer,
        network_rule_delete: Administer,
        session_network: Read,
        session_network_log: Read,
        session_rule_set: Change,
        session_rule_delete: Change,
        repository_network: Read,
        repository_rule_set: Administer,
        repository_rule_delete: Administer,
    ]
}

/// Returns what new sessions may connect to.
#[utoipa::path(get, path = "/v1/network", tag = "network",
    responses((status = 200, body = NetworkRules, description = "The rules of new sessions")))]
async fn network_get(State(state): State<ServerState>) -> JsonResult<NetworkRules> {
    Ok(Json(state.repositories.network().await?))
}

/// Adds a rule for all sessions and builds, or ports to an earlier one for the name.
#[utoipa::path(put, path = "/v1/network/rules/{host}", tag = "network", request_body = SetNetworkRule,
    params(("host" = String, Path, description = "A host name, or `*.example.org`")),
    responses((status = 200, body = NetworkRule, description = "The rule")))]
async fn network_rule_set(
    State(state): State<ServerState>,
    Path(host): Path<String>,
    Body(rule): Body<SetNetworkRule>,
) -> JsonResult<NetworkRule> {
    set(&state, RuleOwner::Everywhere, &host, &rule).await
}

/// Removes a rule for all sessions and builds.
#[utoipa::path(delete, path = "/v1/network/rules/{host}", tag = "network",
    params(("host" = String, Path, description = "A host name, or `*.example.org`")),
    responses((status = 204, description = "Removed")))]
async fn network_rule_delete(
    State(state): State<ServerState>,
    Path(host): Path<String>,
) -> Result<StatusCode, ApiError> {
    remove(&state, RuleOwner::Everywhere, &host).await
}

/// Returns what a session may connect to.
#[utoipa::path(get, path = "/v1/sessions/{session}/network", tag = "network",
    responses((status = 200, body = NetworkRules, description = "The session's rules")))]
async fn session_network(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<NetworkRules> {
    Ok(Json(state.repositories.session_network(&session).await?))
}

/// Returns the connections of a session and those that were refused, by turn and name.
#[utoipa::path(get, path = "/v1/sessions/{session}/network/log", tag = "network",
    responses((status = 200, body = Page<NetworkLogEntry>, description = "The network log")))]
async fn session_network_log(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Page<NetworkLogEntry>> {
    Ok(page(state.repositories.network_log(&session).await?))
}

/// Adds a rule for a session, or ports to an earlier one for the name. A running session follows it
/// at once; a rule that denies also cuts open connections.
#[utoipa::path(put, path = "/v1/sessions/{session}/network/rules/{host}", tag = "network",
    request_body = SetNetworkRule,
    params(("host" = String, Path, description = "A host name, or `*.example.org`")),
    responses((status = 200, body = NetworkRule, description = "The rule")))]
async fn session_rule_set(
    State(state): State<ServerState>,
    Path((session, host)): Path<(SessionId, String)>,
    Body(rule): Body<SetNetworkRule>,
) -> JsonResult<NetworkRule> {
    set(&state, RuleOwner::Session(session), &host, &rule).await
}

/// Removes a rule of a session.
#[utoipa::path(delete, path = "/v1/sessions/{session}/network/rules/{host}", tag = "network",
    params(("host" = String, Path, description = "A host name, or `*.example.org`")),
    responses((status = 204, description = "Removed")))]
async fn session_rule_delete(
    State(state): State<ServerState>,
    Path((session, host)): Path<(SessionId, String)>,
) -> Result<StatusCode, ApiError> {
    remove(&state, RuleOwner::Session(session), &host).await
}

/// Returns what builds of a repository may connect to.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/network", tag = "network",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = NetworkRules, description = "The rules of its builds")))]
async fn repository_network(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> JsonResult<NetworkRules> {
    Ok(Json(state.repositories.repository_network(&named(&owner, &name)?).await?))
}

/// Adds a rule for a repository's sessions and builds, or ports to an earlier one for the name.
#[utoipa::path(put, path = "/v1/repositories/{owner}/{name}/network/rules/{host}", tag = "network",
    request_body = SetNetworkRule,
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name"),
           ("host" = String, Path, description = "A host name, or `*.example.org`")),
    responses((status = 200, body = NetworkRule, description = "The rule")))]
async fn repository_rule_set(
    State(state): State<ServerState>,
    Path((owner, name, host)): Path<(String, String, String)>,
    Body(rule): Body<SetNetworkRule>,
) -> JsonResult<NetworkRule> {
    set(&state, RuleOwner::Repository(named(&owner, &name)?), &host, &rule).await
}

/// Removes a rule of a repository.
#[utoipa::path(delete, path = "/v1/repositories/{owner}/{name}/network/rules/{host}", tag = "network",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name"),
           ("host" = String, Path, description = "A host name, or `*.example.org`")),
    responses((status = 204, description = "Removed")))]
async fn repository_rule_delete(
    State(state): State<ServerState>,
    Path((owner, name, host)): Path<(String, String, String)>,
) -> Result<StatusCode, ApiError> {
    remove(&state, RuleOwner::Repository(named(&owner, &name)?), &host).await
}

async fn set(
    state: &ServerState,
    owner: RuleOwner,
    host: &str,
    rule: &SetNetworkRule,
) -> JsonResult<NetworkRule> {
    Ok(Json(state.repositories.network_rule_set(&owner, host, rule).await?))
}

async fn remove(state: &ServerState, owner: RuleOwner, host: &str) -> Result<StatusCode, ApiError> {
    state.repositories.network_rule_remove(&owner, host).await?;
    Ok(StatusCode::NO_CONTENT)
}
