//! Is it there, is it ready, what can it do: the routes without a token.

use axum::{Json, extract::State, http::StatusCode};
use serde_json::{Value, json};

use crate::{ServerState, problem::ApiError};

/// Says that the process answers.
#[utoipa::path(get, path = "/healthz", tag = "health",
    responses((status = 200, body = Value, description = "It does")))]
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({ "ok": true, "version": env!("CARGO_PKG_VERSION") }))
}

/// Says that sessions can be created: the store answers and nothing is shutting down.
#[utoipa::path(get, path = "/readyz", tag = "health",
    responses((status = 200, body = Value, description = "Ready")))]
pub(crate) async fn readyz(State(state): State<ServerState>) -> Result<Json<Value>, ApiError> {
    if state.shutdown.is_cancelled() {
        let detail = "the server is shutting down";
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", detail));
    }
    state.sessions.list(None, 1).await?;
    Ok(Json(json!({ "ready": true })))
}

/// Describes every route.
#[utoipa::path(get, path = "/v1/openapi.json", tag = "health",
    responses((status = 200, body = Value, description = "This document, OpenAPI 3.1")))]
pub(crate) async fn openapi() -> Json<utoipa::openapi::OpenApi> {
    Json(crate::openapi::document())
}
