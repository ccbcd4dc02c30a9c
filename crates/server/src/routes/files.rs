//! `/v1/sessions/{session}/files`: files and folders in the session's sandbox, and the code shared
//! with the file routes of standalone sandboxes. Files are streamed, never held in memory.

use axum::{
    Json,
    body::{Body, BodyDataStream, Bytes},
    extract::State,
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::{StreamExt, stream};
use harvest_proto::{
    SessionId,
    api::{Page, Problem},
    bridge::{FileKind, FileStat},
};
use harvest_session::sandboxes::{FileDownload, PathContent, SandboxHandle};
use serde::Deserialize;
use tokio::{
    sync::mpsc::{self, error::SendTimeoutError},
    time::{Duration, timeout},
};

use crate::{
    ServerState,
    authorization::Access::Change,
    extract::{Path, Query, limit},
    problem::{ApiError, JsonResult},
    routes::route::{Routes, routes},
};

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        // Access to the sandbox may resume the session, and reveals more than the session's events.
        file_get: Change,
        file_stat: Change,
        file_put: Change,
        file_delete: Change,
    ]
}

// After an early error the rest of the body is read up to these limits: a client that is still
// sending would otherwise not receive the response.
const MAX_DRAINED_BYTES: usize = 16 * 1024 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

// A transfer that makes no progress for this long is aborted.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct GetQuery {
    /// The file or folder
    path: String,
    /// `next_cursor` of the previous page
    cursor: Option<String>,
    /// Entries per page, 1 to 1000; 200 by default
    limit: Option<u32>,
    /// Act with this user's access; by default `harvest`, in a standalone sandbox `root`
    user: Option<String>,
}

/// Reads a file, or lists a folder ordered by name. The path is absolute or relative to the primary
/// checkout; links are followed inside the sandbox. The header `x-harvest-kind` is `file` or
/// `folder`.
#[utoipa::path(get, path = "/v1/sessions/{session}/files", tag = "files",
    params(GetQuery),
    responses(
        (status = 200, description = "The file's bytes, or the folder's entries",
            content((Vec<u8> = "application/octet-stream"), (Page<FileStat> = "application/json"))),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The session has no sandbox, and none could be started"),
    ))]
async fn file_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<GetQuery>,
) -> Result<Response, ApiError> {
    query.check()?;
    read(state.sessions.sandbox_handle(&session).await?, query).await
}

impl GetQuery {
    /// Called before a paused session is resumed for the request.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        valid_path(&self.path)?;
        limit(self.limit, 200, 1000).map(drop)
    }
}

/// Responds with a file's bytes or a folder's entries.
pub(crate) async fn read(sandbox: SandboxHandle, query: GetQuery) -> Result<Response, ApiError> {
    let path = valid_path(&query.path)?;
    let max = limit(query.limit, 200, 1000)? as usize;
    let after = query.cursor.as_deref().unwrap_or_default();
    match sandbox.file_get(path, query.user, after).await? {
        PathContent::File(stat, download) => {
            let content_type =
                (header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
            Ok((stat_headers(&stat), [content_type], Body::from_stream(stream_file(download)))
                .into_response())
        }
        PathContent::Folder(mut items, mut more) => {
            more |= items.len() > max;
            items.truncate(max);
            let next_cursor = items.last().filter(|_| more).map(|last| last.name.clone());
            let kind =
                [(HeaderName::from_static("x-harvest-kind"), HeaderValue::from_static("folder"))];
            Ok((kind, Json(Page { items, next_cursor })).into_response())
        }
    }
}

/// Streams a file. Ends with an error, so that the response is recognisably incomplete, when
/// reading fails or the client stalls.
fn stream_file(
    mut download: FileDownload,
) -> impl futures_util::Stream<Item = Result<Bytes, axum::BoxError>> {
    let (chunks, receiver) = mpsc::channel::<Result<Bytes, axum::BoxError>>(1);
    tokio::spawn(async move {
        loop {
            let chunk = match download.next().await {
                Ok(Some(chunk)) => Ok(Bytes::from(chunk)),
                Ok(None) => return,
                Err(error) => Err(error.into()),
            };
            let failed = chunk.is_err();
            // After a stall the download is dropped, so that the sandbox may freeze or pause.
            if let Err(SendTimeoutError::Timeout(_)) =
                chunks.send_timeout(chunk, STALL_TIMEOUT).await
            {
                drop(download);
                let _ = chunks.send(Err("the client did not read for too long".into())).await;
                return;
            }
            if failed || chunks.is_closed() {
                return;
            }
        }
    });
    stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|chunk| (chunk, receiver))
    })
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct StatQuery {
    /// The file, folder or link
    path: String,
    /// Act with this user's access; by default `harvest`, in a standalone sandbox `root`
    user: Option<String>,
}

/// Returns the metadata of a file, folder or link in headers: `x-harvest-kind`, `-size`, `-mode`,
/// `-uid`, `-modified` and, for a link, `-target` (percent-encoded). Links are not followed.
#[utoipa::path(head, path = "/v1/sessions/{session}/files", tag = "files",
    params(StatQuery),
    responses((status = 200, description = "The metadata")))]
async fn file_stat(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<StatQuery>,
) -> Result<HeaderMap, ApiError> {
    let (path, user) = query.checked()?;
    Ok(stat_headers(&state.sessions.sandbox_handle(&session).await?.file_stat(path, user).await?))
}

impl StatQuery {
    /// The path and the user, checked before a paused session is resumed for the request.
    pub(crate) fn checked(&self) -> Result<(&str, Option<String>), ApiError> {
        Ok((valid_path(&self.path)?, self.user.clone()))
    }
}

pub(crate) fn stat_headers(stat: &FileStat) -> HeaderMap {
    let kind = match stat.kind {
        FileKind::File => "file",
        FileKind::Folder => "folder",
        FileKind::Link => "link",
        FileKind::Other | FileKind::NotUtf8 => "other",
    };
    let fields = [
        ("x-harvest-kind", Some(kind.to_owned())),
        ("x-harvest-size", Some(stat.size.to_string())),
        ("x-harvest-mode", Some(format!("{:04o}", stat.mode))),
        ("x-harvest-uid", Some(stat.uid.to_string())),
        ("x-harvest-modified", Some(stat.modified.to_string())),
        ("x-harvest-target", stat.target.as_deref().map(percent_encode)),
    ];
    let field = |(name, value): (&'static str, Option<String>)| {
        Some((HeaderName::from_static(name), HeaderValue::from_str(&value?).ok()?))
    };
    fields.into_iter().filter_map(field).collect()
}

/// Percent-encodes a string for a header.
pub(crate) fn percent_encode(text: &str) -> String {
    let unreserved = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    text.bytes().fold(String::new(), |out, byte| match unreserved(byte) {
        true => out + &char::from(byte).to_string(),
        false => out + &format!("%{byte:02X}"),
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PutQuery {
    path: String,
    mode: Option<String>,
    user: Option<String>,
    kind: Option<FileKind>,
    target: Option<String>,
}

/// Writes a file, or creates a folder or a link. A file is written atomically and replaces an
/// existing one; an existing folder is left unchanged.
#[utoipa::path(put, path = "/v1/sessions/{session}/files", tag = "files",
    params(
        ("path" = String, Query, description = "The path; its parent folder must exist"),
        ("mode" = Option<String>, Query, description = "Permission bits, octal; 644 by default, 755 for a folder"),
        ("user" = Option<String>, Query, description = "Acts with the access of this user, who owns new files: `harvest` (default), `root` or a number"),
        ("kind" = Option<FileKind>, Query, description = "`file` (default), `folder` or `link`"),
        ("target" = Option<String>, Query, description = "The target of a link"),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "The file's bytes"),
    responses((status = 200, body = FileStat, description = "The metadata of the new file")))]
async fn file_put(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<PutQuery>,
    body: Body,
) -> JsonResult<FileStat> {
    let sandbox = async { Ok(state.sessions.sandbox_handle(&session).await?) };
    write_or_drain(sandbox, query, body).await
}

/// Writes the body; after an error, drains it so that the client can read the response.
pub(crate) async fn write_or_drain(
    sandbox: impl Future<Output = Result<SandboxHandle, ApiError>>,
    query: PutQuery,
    body: Body,
) -> JsonResult<FileStat> {
    let mut body = body.into_data_stream();
    let written = async { write(&sandbox.await?, query, &mut body).await };
    match written.await {
        Ok(stat) => Ok(Json(stat)),
        Err(error) => {
            drain(&mut body).await;
            Err(error)
        }
    }
}

async fn write(
    sandbox: &SandboxHandle,
    query: PutQuery,
    body: &mut BodyDataStream,
) -> Result<FileStat, ApiError> {
    let path = valid_path(&query.path)?;
    let kind = query.kind.unwrap_or(FileKind::File);
    let bits = mode(query.mode.as_deref(), if kind == FileKind::Folder { 0o755 } else { 0o644 })?;
    match (kind, query.target) {
        (FileKind::File, None) => {
            let mut writing = sandbox.file_put(path, bits, query.user.clone())?;
            while let Some(chunk) = next_chunk(body).await? {
                let incomplete = |_| ApiError::invalid("invalid_body", "the body is incomplete");
                writing
                    .write(&chunk.map_err(incomplete)?)
                    .await
                    .map_err(harvest_session::SessionError::from)?;
            }
            writing.finish().await.map_err(harvest_session::SessionError::from)?;
        }
        (FileKind::Folder, None) => sandbox.folder_put(path, bits, query.user.clone()).await?,
        (FileKind::Link, Some(target)) if !target.is_empty() => {
            let target = valid_path(&target)?.to_owned();
            sandbox.link_put(path, target, query.user.clone()).await?;
        }
        _ => {
            let detail = "`target` is required for links and allowed only for them";
            return Err(ApiError::invalid("invalid_query", detail));
        }
    }
    Ok(sandbox.file_stat(path, query.user).await?)
}

/// The next chunk of the body. The timeout keeps a stalled client from holding the sandbox awake.
async fn next_chunk(
    body: &mut BodyDataStream,
) -> Result<Option<Result<Bytes, axum::Error>>, ApiError> {
    timeout(STALL_TIMEOUT, body.next()).await.map_err(|_| {
        let detail = format!("no data received for {} s", STALL_TIMEOUT.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail)
            .hint("send the file again")
    })
}

async fn drain(body: &mut BodyDataStream) {
    let drained = async {
        let mut read = 0;
        while read < MAX_DRAINED_BYTES
            && let Some(Ok(chunk)) = body.next().await
        {
            read += chunk.len();
        }
    };
    let _ = timeout(DRAIN_TIMEOUT, drained).await;
}

fn mode(octal: Option<&str>, default: u32) -> Result<u32, ApiError> {
    let Some(octal) = octal else { return Ok(default) };
    u32::from_str_radix(octal, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777 && octal.bytes().all(|byte| byte.is_ascii_digit()))
        .ok_or_else(|| {
            ApiError::invalid("invalid_query", "`mode` must be octal, such as 644 or 0755")
        })
}

#[derive(Debug, Deserialize, utoipa::IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct DeleteQuery {
    /// The path
    path: String,
    /// Also remove a folder with its content
    #[serde(default)]
    #[param(value_type = Option<bool>)]
    recursive: bool,
    /// Act with this user's access; by default `harvest`, in a standalone sandbox `root`
    pub(crate) user: Option<String>,
}

/// Removes a file or a link, or with `recursive` a folder and its content.
#[utoipa::path(delete, path = "/v1/sessions/{session}/files", tag = "files",
    params(DeleteQuery),
    responses((status = 204, description = "Removed")))]
async fn file_delete(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<DeleteQuery>,
) -> Result<StatusCode, ApiError> {
    let (path, recursive) = query.checked()?;
    let sandbox = state.sessions.sandbox_handle(&session).await?;
    sandbox.file_remove(path, query.user.clone(), recursive).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl DeleteQuery {
    /// The path and the flag, checked before a paused session is resumed for the request.
    pub(crate) fn checked(&self) -> Result<(&str, bool), ApiError> {
        Ok((valid_path(&self.path)?, self.recursive))
    }
}

fn valid_path(path: &str) -> Result<&str, ApiError> {
    if !path.is_empty() && !path.contains('\0') && path.len() < 4096 {
        return Ok(path);
    }
    Err(ApiError::invalid("invalid_query", "a path must be 1 to 4095 bytes without NUL"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_must_be_octal_with_twelve_bits() {
        assert_eq!((mode(None, 0o644).unwrap(), mode(Some("0755"), 0).unwrap()), (0o644, 0o755));
        for bad in ["", "8", "10000", "-1", "+7", "rw"] {
            assert!(mode(Some(bad), 0).is_err(), "{bad}");
        }
    }

    #[test]
    fn link_targets_are_percent_encoded() {
        assert_eq!(percent_encode("/a b/ä\n%"), "/a%20b/%C3%A4%0A%25");
    }
}
