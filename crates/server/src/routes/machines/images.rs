//! `/v1/images`: what sandboxes start from.

use axum::{Json, extract::State, http::StatusCode, response::Response};
use futures_util::StreamExt;
use harvest_proto::api::{
    Page,
    machines::{Image, ImageLine, ImageUsage, MakeImage},
};
use harvest_session::machines::ImportImage;
use serde::Deserialize;

use super::Desk;
use crate::{
    extract::{Body, Path, Query},
    problem::ApiError,
    stream,
};

/// Lists images, by name.
#[utoipa::path(get, path = "/v1/images", tag = "images",
    responses((status = 200, body = Page<Image>, description = "The images")))]
pub(crate) async fn image_list(State(desk): State<Desk>) -> Result<Json<Page<Image>>, ApiError> {
    let items = desk.machines().image_list().await?;
    Ok(Json(Page { items, next_cursor: None }))
}

/// Builds an image of a recipe, pulls one, or makes one of a folder; the answer streams progress.
#[utoipa::path(post, path = "/v1/images", tag = "images", request_body = MakeImage,
    responses((status = 200, body = ImageLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `made` or `failed`")))]
pub(crate) async fn image_make(
    State(desk): State<Desk>,
    Body(body): Body<MakeImage>,
) -> Result<Response, ApiError> {
    let lines = desk.machines().image_make(body).await?;
    Ok(stream::lines(lines, desk.shutdown))
}

/// Shows an image.
#[utoipa::path(get, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "Its name or id")),
    responses((status = 200, body = Image, description = "The image")))]
pub(crate) async fn image_get(
    State(desk): State<Desk>,
    Path(name): Path<String>,
) -> Result<Json<Image>, ApiError> {
    Ok(Json(desk.machines().image_get(&name).await?))
}

/// What is sent along with an archive.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Unpacked {
    #[serde(default)]
    source: Option<String>,
    #[serde(default)]
    max_bytes: Option<u64>,
}

/// Makes an image of an archive with a root file system: a tar, plain or compressed with gzip or zstd, as the
/// body. The answer streams progress.
#[utoipa::path(put, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "What to call it"),
           ("source" = Option<String>, Query, description = "Where it comes from, in words", max_length = 200),
           ("max_bytes" = Option<u64>, Query, description = "The most it may become unpacked; 64 GiB when absent")),
    request_body(content = String, content_type = "application/x-tar", description = "The archive"),
    responses((status = 200, body = ImageLine, content_type = "application/x-ndjson",
        description = "One JSON object per line; the last is `made` or `failed`")))]
pub(crate) async fn image_import(
    State(desk): State<Desk>,
    Path(name): Path<String>,
    Query(unpacked): Query<Unpacked>,
    body: axum::body::Body,
) -> Result<Response, ApiError> {
    let pieces =
        body.into_data_stream().map(|piece| piece.map(Vec::from).map_err(std::io::Error::other));
    let source = unpacked
        .source
        .map(|words| words.chars().filter(|letter| !letter.is_control()).take(200).collect());
    let order = ImportImage { name, source, max_bytes: unpacked.max_bytes };
    let lines = desk.machines().image_import(order, pieces.boxed()).await?;
    Ok(stream::lines(lines, desk.shutdown))
}

/// Forgets an image; its layers go with the next collection, if nothing uses them.
#[utoipa::path(delete, path = "/v1/images/{name}", tag = "images",
    params(("name" = String, Path, description = "Its name or id")),
    responses((status = 204, description = "Forgotten")))]
pub(crate) async fn image_delete(
    State(desk): State<Desk>,
    Path(name): Path<String>,
) -> Result<StatusCode, ApiError> {
    desk.machines().image_delete(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Measures an image's layers and says who stands on them.
#[utoipa::path(get, path = "/v1/images/{name}/usage", tag = "images",
    params(("name" = String, Path, description = "Its name or id")),
    responses((status = 200, body = ImageUsage, description = "Sizes and users")))]
pub(crate) async fn image_usage(
    State(desk): State<Desk>,
    Path(name): Path<String>,
) -> Result<Json<ImageUsage>, ApiError> {
    Ok(Json(desk.machines().image_usage(&name).await?))
}
