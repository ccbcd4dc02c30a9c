//! `/v1/model-services`, `/v1/models` and `/v1/mcp-servers`: the services behind the gateway, where
//! their keys come from, and the models. No route returns a key.

use axum::extract::State;
use harvest_proto::{
    SecretOwner, UpstreamName,
    api::{McpService, ModelService, Page, ServiceModels, Token},
};
use serde::Deserialize;

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::Access::Read,
    extract::Query,
    problem::JsonResult,
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![model_service_list: Read, model_list: Read, mcp_server_list: Read]
}

/// Lists the model services, and where the key of each comes from.
#[utoipa::path(get, path = "/v1/model-services", tag = "models",
    responses((status = 200, body = Page<ModelService>, description = "The model services")))]
async fn model_service_list(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
) -> JsonResult<Page<ModelService>> {
    Ok(page(state.sessions.model_services(&owners(&token)).await))
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ModelQuery {
    /// Only this service
    service: Option<UpstreamName>,
}

/// Lists the model services with their models. Asks each service that has its key.
#[utoipa::path(get, path = "/v1/models", tag = "models", params(ModelQuery),
    responses((status = 200, body = Page<ServiceModels>, description = "The services and their models")))]
async fn model_list(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Query(query): Query<ModelQuery>,
) -> JsonResult<Page<ServiceModels>> {
    Ok(page(state.sessions.models(&owners(&token), query.service.as_ref()).await))
}

/// Lists the MCP servers to which the gateway adds a key, and where the key of each comes from.
#[utoipa::path(get, path = "/v1/mcp-servers", tag = "models",
    responses((status = 200, body = Page<McpService>, description = "The MCP servers")))]
async fn mcp_server_list(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
) -> JsonResult<Page<McpService>> {
    Ok(page(state.sessions.mcp_services(&owners(&token)).await))
}

/// Whose secrets every session of the token's user can use.
fn owners(token: &Token) -> [SecretOwner; 2] {
    [SecretOwner::user(&token.user.email), SecretOwner::Global]
}
