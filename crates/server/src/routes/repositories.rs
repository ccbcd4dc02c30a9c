//! `/v1/repositories`: what sessions work on, and the prebuilt state they start from.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::api::{AddRepository, BuildLine, Page, Repository};

use crate::{
    ServerState,
    auth::Holder,
    extract::{Body, Path},
    policy,
    problem::ApiError,
    stream,
};

/// Lists repositories by name.
#[utoipa::path(get, path = "/v1/repositories", tag = "repositories",
    responses((status = 200, body = Page<Repository>, description = "The repositories")))]
pub(crate) async fn repository_list(
    State(state): State<ServerState>,
) -> Result<Json<Page<Repository>>, ApiError> {
    let items = state.sessions.repositories().await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Registers a repository.
#[utoipa::path(post, path = "/v1/repositories", tag = "repositories", request_body = AddRepository,
    params(("Idempotency-Key" = Option<String>, Header, description = "The same key creates only once",
            min_length = 1, max_length = 128)),
    responses((status = 201, body = Repository, description = "Registered; nothing is built yet")))]
pub(crate) async fn repository_add(
    State(state): State<ServerState>,
    Holder(token): Holder,
    Body(body): Body<AddRepository>,
) -> Result<(StatusCode, Json<Repository>), ApiError> {
    policy::names_secret(&token, body.secret.as_ref())?;
    policy::names_host(&token, Some(&body.url))?;
    Ok((StatusCode::CREATED, Json(state.sessions.repository_add(body).await?)))
}

/// Shows a repository as it stands.
#[utoipa::path(get, path = "/v1/repositories/{name}", tag = "repositories",
    params(("name" = String, Path, description = "What it is called")),
    responses((status = 200, body = Repository, description = "The repository")))]
pub(crate) async fn repository_get(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<Json<Repository>, ApiError> {
    Ok(Json(state.sessions.repository(&name).await?))
}

/// Forgets a repository that no session uses, with its builds and what the local forge holds of it.
#[utoipa::path(delete, path = "/v1/repositories/{name}", tag = "repositories",
    params(("name" = String, Path, description = "What it is called")),
    responses((status = 204, description = "Gone")))]
pub(crate) async fn repository_delete(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.sessions.repository_delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Builds the state sessions start from: clone, install, build, check. The answer streams progress.
#[utoipa::path(post, path = "/v1/repositories/{name}/build", tag = "repositories",
    params(("name" = String, Path, description = "What it is called")),
    responses((status = 200, body = BuildLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `built` or `failed`")))]
pub(crate) async fn repository_build(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let lines = state.sessions.repository_build(&name).await?;
    Ok(stream::lines(lines, state.shutdown))
}
