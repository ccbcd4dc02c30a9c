//! `/v1/repositories`: registered repositories and their prebuilt state.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::api::{AddRepository, BuildLine, Page, Repository};

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::{
        self,
        Access::{Administer, Create, Read},
    },
    extract::{Body, Path},
    idempotency::Repeat,
    problem::ApiError,
    routes::route::{Routes, routes},
    stream,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        repository_list: Read,
        // With a secret it is for admins: see `check_secret`.
        repository_add: Create.idempotent(Repeat::One),
        repository_get: Read,
        repository_delete: Administer,
        repository_build: Administer,
    ]
}

/// Lists repositories, ordered by name.
#[utoipa::path(get, path = "/v1/repositories", tag = "repositories",
    responses((status = 200, body = Page<Repository>, description = "The repositories")))]
pub(crate) async fn repository_list(
    State(state): State<ServerState>,
) -> Result<Json<Page<Repository>>, ApiError> {
    let items = state.repositories.list().await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Registers a repository.
#[utoipa::path(post, path = "/v1/repositories", tag = "repositories", request_body = AddRepository,
    responses((status = 201, body = Repository, description = "Registered; nothing is built yet")))]
pub(crate) async fn repository_add(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Body(body): Body<AddRepository>,
) -> Result<(StatusCode, Json<Repository>), ApiError> {
    authorization::check_secret(&token, body.secret.as_ref())?;
    authorization::check_repository_url(&token, Some(&body.url))?;
    Ok((StatusCode::CREATED, Json(state.repositories.add(body).await?)))
}

/// Returns a repository.
#[utoipa::path(get, path = "/v1/repositories/{name}", tag = "repositories",
    params(("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = Repository, description = "The repository")))]
pub(crate) async fn repository_get(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<Json<Repository>, ApiError> {
    Ok(Json(state.repositories.get(&name).await?))
}

/// Removes a repository that no session uses, with its builds and its copy on the local forge.
#[utoipa::path(delete, path = "/v1/repositories/{name}", tag = "repositories",
    params(("name" = String, Path, description = "The repository's name")),
    responses((status = 204, description = "Removed")))]
pub(crate) async fn repository_delete(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.repositories.delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Builds the state sessions start from (clone, install, build, check) and streams progress.
#[utoipa::path(post, path = "/v1/repositories/{name}/build", tag = "repositories",
    params(("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = BuildLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `built` or `failed`")))]
pub(crate) async fn repository_build(
    State(state): State<ServerState>,
    Path(name): Path<String>,
) -> Result<Response, ApiError> {
    let lines = state.repositories.build(&name).await?;
    Ok(stream::lines(lines, state.shutdown))
}
