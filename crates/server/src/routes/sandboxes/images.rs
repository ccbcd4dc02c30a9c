//! `/v1/images`: the images sandboxes start from.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use futures_util::StreamExt;
use harvest_proto::api::{CreateImage, Image, ImageLine, ImageUsage, Page};
use harvest_session::sandboxes::ImportImage;
use serde::Deserialize;

use super::SandboxState;
use crate::{
    authorization::Access::{Administer, Read},
    extract::{Body, Path, Query},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, page, routes},
    stream,
};

pub(super) fn routes() -> Routes<SandboxState> {
    routes![
        // `harvest exec` of a member looks for its image.
        image_list: Read,
        image_create: Administer,
        image_get: Read,
        image_import: Administer,
        image_delete: Administer,
        image_usage: Administer,
    ]
}

/// Lists images, ordered by name.
#[utoipa::path(get, path = "/v1/images", tag = "images",
    responses((status = 200, body = Page<Image>, description = "The images")))]
async fn image_list(State(state): State<SandboxState>) -> JsonResult<Page<Image>> {
    Ok(page(state.sandboxes.host()?.image_list().await?))
}

/// Builds an image from a recipe, pulls one, or imports a folder, and streams progress.
#[utoipa::path(post, path = "/v1/images", tag = "images", request_body = CreateImage,
    responses((status = 200, body = ImageLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `made` or `failed`")))]
async fn image_create(
    State(state): State<SandboxState>,
    Body(body): Body<CreateImage>,
) -> Result<Response, ApiError> {
    let lines = state.sandboxes.host()?.image_make(body).await?;
    Ok(stream::lines(lines, state.shutdown))
}

/// Returns an image.
#[utoipa::path(get, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "The image's name or id")),
    responses((status = 200, body = Image, description = "The image")))]
async fn image_get(
    State(state): State<SandboxState>,
    Path(name): Path<String>,
) -> JsonResult<Image> {
    Ok(Json(state.sandboxes.host()?.image_get(&name).await?))
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ImportQuery {
    source: Option<String>,
    max_bytes: Option<u64>,
}

/// Creates an image from a root file system, sent as a tar archive (plain, gzip or zstd), and
/// streams progress.
#[utoipa::path(put, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "The image's name"),
           ("source" = Option<String>, Query, description = "A description of its origin", max_length = 200),
           ("max_bytes" = Option<u64>, Query, description = "Limit of the unpacked size; 64 GiB by default")),
    request_body(content = String, content_type = "application/x-tar", description = "The archive"),
    responses((status = 200, body = ImageLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `made` or `failed`")))]
async fn image_import(
    State(state): State<SandboxState>,
    Path(name): Path<String>,
    Query(query): Query<ImportQuery>,
    body: axum::body::Body,
) -> Result<Response, ApiError> {
    let chunks =
        body.into_data_stream().map(|chunk| chunk.map(Vec::from).map_err(std::io::Error::other));
    let source = query
        .source
        .map(|text| text.chars().filter(|letter| !letter.is_control()).take(200).collect());
    let import = ImportImage { name, source, max_bytes: query.max_bytes };
    let lines = state.sandboxes.host()?.image_import(import, chunks.boxed()).await?;
    Ok(stream::lines(lines, state.shutdown))
}

/// Removes an image; the next garbage collection removes its unused layers.
#[utoipa::path(delete, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "The image's name or id")),
    responses((status = 204, description = "Removed")))]
async fn image_delete(
    State(state): State<SandboxState>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    state.sandboxes.host()?.image_delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Measures an image's layers and lists the users of each.
#[utoipa::path(get, path = "/v1/images/{name}/usage", tag = "images",
    params(("name" = String, Path, description = "The image's name or id")),
    responses((status = 200, body = ImageUsage, description = "Sizes and users")))]
async fn image_usage(
    State(state): State<SandboxState>,
    Path(name): Path<String>,
) -> JsonResult<ImageUsage> {
    Ok(Json(state.sandboxes.host()?.image_usage(&name).await?))
}
