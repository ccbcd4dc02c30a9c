//! `/v1/repositories`: registered repositories and their prebuilt state.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use harvest_proto::{
    RepositoryName, RepositoryRef, SnapshotId,
    api::{
        AddRepository, BuildLine, BuildLog, BuildRepository, BuildSummary, Page, Problem,
        Repository, UpdateRepository,
    },
};

use crate::{
    ServerState,
    auth::Authenticated,
    authorization::{
        self,
        Access::{Administer, Create, Read},
    },
    extract::{Body, OptionalBody, Path, Query},
    idempotency::Repeat,
    problem::{ApiError, JsonResult},
    routes::route::{Routes, created, page, routes},
    stream,
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        repository_list: Read,
        // With a secret it is for admins: see `check_secret`.
        repository_add: Create.idempotent(Repeat::One),
        repository_get: Read,
        repository_update: Administer,
        repository_delete: Administer,
        repository_build: Create,
        build_list: Read,
        build_get: Read,
    ]
}

/// The query of the repository list.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RepositoryQuery {
    name: Option<RepositoryRef>,
}

/// Lists repositories, ordered by name.
#[utoipa::path(get, path = "/v1/repositories", tag = "repositories",
    params(("name" = Option<String>, Query,
        description = "Only this repository: `OWNER/NAME`, or `NAME` if only one has it")),
    responses((status = 200, body = Page<Repository>, description = "The repositories"),
        (status = 404, body = Problem, content_type = "application/problem+json",
            description = "No repository has this name"),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "More than one repository has this name")))]
async fn repository_list(
    State(state): State<ServerState>,
    Query(query): Query<RepositoryQuery>,
) -> JsonResult<Page<Repository>> {
    let repositories = &state.repositories;
    Ok(page(match query.name {
        Some(name) => vec![repositories.get(&repositories.resolve(&name).await?).await?],
        None => repositories.list().await?,
    }))
}

/// Registers a repository.
#[utoipa::path(post, path = "/v1/repositories", tag = "repositories", request_body = AddRepository,
    responses((status = 201, body = Repository, description = "Registered; nothing is built yet")))]
async fn repository_add(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Body(body): Body<AddRepository>,
) -> Result<Response, ApiError> {
    authorization::check_secret(&token, body.secret.as_ref())?;
    let repository = state.repositories.add(body, &token.user).await?;
    Ok(created(&format!("/v1/repositories/{}", repository.name), &repository))
}

/// Returns a repository.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = Repository, description = "The repository")))]
async fn repository_get(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> JsonResult<Repository> {
    Ok(Json(state.repositories.get(&named(&owner, &name)?).await?))
}

/// Changes the base, secret or image of a repository.
#[utoipa::path(patch, path = "/v1/repositories/{owner}/{name}", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    request_body = UpdateRepository,
    responses((status = 200, body = Repository, description = "The changed repository")))]
async fn repository_update(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path((owner, name)): Path<(String, String)>,
    Body(body): Body<UpdateRepository>,
) -> JsonResult<Repository> {
    Ok(Json(state.repositories.update(&named(&owner, &name)?, body, &token.user).await?))
}

/// Removes a repository that no session uses, with its builds and its copy on the local forge.
#[utoipa::path(delete, path = "/v1/repositories/{owner}/{name}", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 204, description = "Removed")))]
async fn repository_delete(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    state.repositories.delete(&named(&owner, &name)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Builds the state sessions start from (clone, install, build, check) and streams progress.
#[utoipa::path(post, path = "/v1/repositories/{owner}/{name}/build", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    request_body = Option<BuildRepository>,
    responses((status = 200, body = BuildLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `built` or `failed`")))]
async fn repository_build(
    State(state): State<ServerState>,
    Authenticated(token): Authenticated,
    Path((owner, name)): Path<(String, String)>,
    OptionalBody(order): OptionalBody<BuildRepository>,
) -> Result<Response, ApiError> {
    let lines = state.repositories.build(&named(&owner, &name)?, order, &token.user).await?;
    Ok(stream::lines(lines, state.shutdown))
}

/// Lists the builds of a repository that are kept, newest first.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/builds", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = Page<BuildSummary>, description = "The builds")))]
async fn build_list(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> JsonResult<Page<BuildSummary>> {
    Ok(page(state.repositories.builds(&named(&owner, &name)?).await?))
}

/// Returns a build with its log.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/builds/{build}", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name"),
           ("build" = SnapshotId, Path, description = "The build's snapshot")),
    responses((status = 200, body = BuildLog, description = "The build")))]
async fn build_get(
    State(state): State<ServerState>,
    Path((owner, name, build)): Path<(String, String, SnapshotId)>,
) -> JsonResult<BuildLog> {
    Ok(Json(state.repositories.build_log(&named(&owner, &name)?, &build).await?))
}

/// A name that cannot exist is not found, like any other unknown name.
pub(super) fn named(owner: &str, name: &str) -> Result<RepositoryName, ApiError> {
    RepositoryName::new(owner, name).map_err(|invalid| {
        ApiError::new(StatusCode::NOT_FOUND, "not_found", invalid.to_string())
            .hint("`harvest repo ls` lists repositories")
    })
}
