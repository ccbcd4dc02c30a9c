//! `/v1/repositories/{owner}/{name}/memory`: what the agents of a repository's sessions remembered.

use axum::{Json, extract::State, http::StatusCode};
use harvest_proto::api::MemoryGraph;

use crate::{
    ServerState,
    authorization::Access::{Administer, Read},
    extract::{Body, Path},
    problem::{ApiError, JsonResult},
    routes::{
        repositories::named,
        route::{Routes, routes},
    },
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        memory_get: Read,
        memory_put: Administer,
        memory_delete: Administer,
    ]
}

/// Returns the memory of a repository.
#[utoipa::path(get, path = "/v1/repositories/{owner}/{name}/memory", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 200, body = MemoryGraph, description = "The knowledge graph")))]
async fn memory_get(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> JsonResult<MemoryGraph> {
    Ok(Json(state.repositories.memory(&named(&owner, &name)?).await?))
}

/// Replaces the memory of a repository. Entities of the same name are merged.
#[utoipa::path(put, path = "/v1/repositories/{owner}/{name}/memory", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    request_body = MemoryGraph,
    responses((status = 200, body = MemoryGraph, description = "The knowledge graph as stored")))]
async fn memory_put(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
    Body(graph): Body<MemoryGraph>,
) -> JsonResult<MemoryGraph> {
    Ok(Json(state.repositories.memory_replace(&named(&owner, &name)?, graph).await?))
}

/// Deletes the memory of a repository.
#[utoipa::path(delete, path = "/v1/repositories/{owner}/{name}/memory", tag = "repositories",
    params(("owner" = String, Path, description = "The repository's owner"),
           ("name" = String, Path, description = "The repository's name")),
    responses((status = 204, description = "Deleted")))]
async fn memory_delete(
    State(state): State<ServerState>,
    Path((owner, name)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    state.repositories.memory_clear(&named(&owner, &name)?).await?;
    Ok(StatusCode::NO_CONTENT)
}
