//! `/v1/sessions/{session}/blobs/{blob}`: the whole of what an event holds only the ends of.

use axum::{
    extract::State,
    http::header,
    response::{IntoResponse, Response},
};
use harvest_proto::{BlobId, SessionId};

use crate::{ServerState, extract::Path, problem::ApiError};

/// Reads a blob that an event names: a tool's output, or its input as JSON.
#[utoipa::path(get, path = "/v1/sessions/{session}/blobs/{blob}", tag = "events",
    params(("session" = SessionId, Path, description = "The session"),
           ("blob" = BlobId, Path, description = "The blob, as the event names it")),
    responses((status = 200, body = String, content_type = "text/plain", description = "All of it")))]
pub(crate) async fn blob_get(
    State(state): State<ServerState>,
    Path((session, blob)): Path<(SessionId, BlobId)>,
) -> Result<Response, ApiError> {
    let text = state.sessions.blob(&session, &blob).await?;
    // Whatever a hostile repository printed is text, also to a browser.
    let headers = [
        (header::CONTENT_TYPE, "text/plain; charset=utf-8"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, text).into_response())
}
