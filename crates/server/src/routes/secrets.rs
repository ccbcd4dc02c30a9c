//! `/v1/secrets`: write, list by name, remove. No route returns a value.

use axum::{extract::State, http::StatusCode};
use harvest_proto::api::{Page, SetSecret};

use crate::{
    ServerState,
    authorization::Access::Administer,
    extract::{Body, Path},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, page, routes},
    validate,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        secret_list: Administer,
        secret_set: Administer,
        secret_delete: Administer,
    ]
}

/// Lists the names of secrets.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets",
    responses((status = 200, body = Page<String>, description = "The names")))]
async fn secret_list(State(state): State<ServerState>) -> JsonResult<Page<String>> {
    Ok(page(state.accounts.secret_list().await?))
}

/// Stores a secret, replacing one with the same name.
#[utoipa::path(put, path = "/v1/secrets/{name}", tag = "secrets", request_body = SetSecret,
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Stored")))]
async fn secret_set(
    State(state): State<ServerState>,
    Path(name): Path<String>,
    Body(body): Body<SetSecret>,
) -> Result<StatusCode, ApiError> {
    validate::secret(body.value.expose())?;
    state.accounts.secret_set(&name, body.value).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Removes a secret.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "secrets",
    params(("name" = String, Path, description = "The secret's name", pattern = "^[A-Z][A-Z0-9_]{0,127}$")),
    responses((status = 204, description = "Removed")))]
async fn secret_delete(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.accounts.secret_delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}
