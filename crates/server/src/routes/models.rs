//! `/v1/model-services`: the model services and where their keys come from. No route returns a key.

use axum::extract::State;
use harvest_proto::api::{ModelService, Page};

use crate::{
    ServerState,
    authorization::Access::Read,
    problem::JsonResult,
    routes::route::{Routes, page, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![model_service_list: Read]
}

/// Lists the model services, and where the key of each comes from.
#[utoipa::path(get, path = "/v1/model-services", tag = "models",
    responses((status = 200, body = Page<ModelService>, description = "The model services")))]
async fn model_service_list(State(state): State<ServerState>) -> JsonResult<Page<ModelService>> {
    Ok(page(state.sessions.model_services().await))
}
