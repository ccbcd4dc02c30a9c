//! `/v1/sessions/{session}/blobs/{blob}`: long tool inputs and outputs, which events hold
//! truncated.

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use harvest_proto::{BlobId, SessionId};

use crate::{
    ServerState,
    authorization::Access::Read,
    extract::Path,
    problem::ApiError,
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        blob_get: Read,
    ]
}

/// Returns the full output of a tool, or its input as JSON, which an event refers to.
#[utoipa::path(get, path = "/v1/sessions/{session}/blobs/{blob}", tag = "events",
    params(("blob" = BlobId, Path, description = "The blob id in the event")),
    responses((status = 200, body = String, content_type = "text/plain", description = "The full text")))]
async fn blob_get(
    State(state): State<ServerState>,
    Path((session, blob)): Path<(SessionId, BlobId)>,
) -> Result<Response, ApiError> {
    let text = state.sessions.blob(&session, &blob).await?;
    // The content is untrusted: a browser must not interpret it as HTML.
    let headers = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, text).into_response())
}
