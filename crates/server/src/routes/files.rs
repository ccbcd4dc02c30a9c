//! `/v1/sessions/{session}/files`: files and folders in the session's sandbox, and what these routes have in common
//! with those of sandboxes without a session. Bytes stream through; no file is ever held whole.

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
use harvest_session::inside::{Content, Download, Inside};
use serde::Deserialize;
use tokio::{
    sync::mpsc::{self, error::SendTimeoutError},
    time::{Duration, timeout},
};

use crate::{
    ServerState,
    extract::{Path, Query, limit},
    problem::ApiError,
};

/// Who is refused while still sending hears it only if most of that is taken.
const DRAINED_BYTES: usize = 16 * 1024 * 1024;
const DRAIN: Duration = Duration::from_secs(5);

// How long nothing of a file may move, either way.
const STALL: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Get {
    path: String,
    #[serde(default)]
    cursor: Option<String>,
    #[serde(default)]
    limit: Option<u32>,
}

/// Reads a file, or lists a folder by name. A path is absolute or begins in the primary checkout; links are
/// followed inside the sandbox. `x-harvest-kind` says which of the two came.
#[utoipa::path(get, path = "/v1/sessions/{session}/files", tag = "files",
    params(
        ("session" = SessionId, Path, description = "The session"),
        ("path" = String, Query, description = "The file or folder"),
        ("cursor" = Option<String>, Query, description = "Where a list goes on: its `next_cursor`"),
        ("limit" = Option<u32>, Query, description = "How many entries, 1 to 1000; 200 when absent"),
    ),
    responses(
        (status = 200, description = "The file's bytes, or what the folder holds",
            content((Vec<u8> = "application/octet-stream"), (Page<FileStat> = "application/json"))),
        (status = 409, body = Problem, content_type = "application/problem+json",
            description = "The session has no machine, and none could be started for this"),
    ))]
pub(crate) async fn file_get(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<Get>,
) -> Result<Response, ApiError> {
    query.check()?;
    read(state.sessions.inside(&session).await?, query).await
}

impl Get {
    /// Before anybody is woken for it.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        sound(&self.path)?;
        limit(self.limit, 200, 1000).map(drop)
    }
}

/// Answers with a file's bytes, or what a folder holds.
pub(crate) async fn read(inside: Inside, query: Get) -> Result<Response, ApiError> {
    let path = sound(&query.path)?;
    let most = limit(query.limit, 200, 1000)? as usize;
    match inside.file_get(path, query.cursor.as_deref().unwrap_or_default()).await? {
        Content::File(stat, download) => {
            let kind = (header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
            Ok((described(&stat), [kind], Body::from_stream(bytes(download))).into_response())
        }
        Content::Folder(mut items, mut more) => {
            more |= items.len() > most;
            items.truncate(most);
            let next_cursor = items.last().filter(|_| more).map(|last| last.name.clone());
            let kind =
                [(HeaderName::from_static("x-harvest-kind"), HeaderValue::from_static("folder"))];
            Ok((kind, Json(Page { items, next_cursor })).into_response())
        }
    }
}

/// Ends with an error, and so not as a whole answer, when the file cannot be read to its end, or when nobody
/// takes any of it for long.
fn bytes(
    mut download: Download,
) -> impl futures_util::Stream<Item = Result<Bytes, axum::BoxError>> {
    let (pieces, taken) = mpsc::channel::<Result<Bytes, axum::BoxError>>(1);
    tokio::spawn(async move {
        loop {
            let piece = match download.next().await {
                Ok(Some(piece)) => Ok(Bytes::from(piece)),
                Ok(None) => return,
                Err(error) => Err(error.into()),
            };
            let over = piece.is_err();
            // The machine is free to rest from here on; who comes back finds the answer broken off.
            if let Err(SendTimeoutError::Timeout(_)) = pieces.send_timeout(piece, STALL).await {
                drop(download);
                let _ = pieces.send(Err("nobody took the file for too long".into())).await;
                return;
            }
            if over || pieces.is_closed() {
                return;
            }
        }
    });
    stream::unfold(taken, |mut taken| async move { taken.recv().await.map(|piece| (piece, taken)) })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Head {
    path: String,
}

/// Describes a file, folder or link in headers: `x-harvest-kind`, `-size`, `-mode`, `-uid`, `-modified` and, of a
/// link, `-target`, percent-encoded. A link is not followed.
#[utoipa::path(head, path = "/v1/sessions/{session}/files", tag = "files",
    params(
        ("session" = SessionId, Path, description = "The session"),
        ("path" = String, Query, description = "The file, folder or link"),
    ),
    responses((status = 200, description = "It is there")))]
pub(crate) async fn file_stat(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<Head>,
) -> Result<HeaderMap, ApiError> {
    let path = query.checked()?;
    Ok(described(&state.sessions.inside(&session).await?.file_stat(path).await?))
}

impl Head {
    /// The path, before anybody is woken for it.
    pub(crate) fn checked(&self) -> Result<&str, ApiError> {
        sound(&self.path)
    }
}

pub(crate) fn described(stat: &FileStat) -> HeaderMap {
    let kind = match stat.kind {
        FileKind::File => "file",
        FileKind::Folder => "folder",
        FileKind::Link => "link",
        FileKind::Other => "other",
    };
    let fields = [
        ("x-harvest-kind", Some(kind.to_owned())),
        ("x-harvest-size", Some(stat.size.to_string())),
        ("x-harvest-mode", Some(format!("{:04o}", stat.mode))),
        ("x-harvest-uid", Some(stat.uid.to_string())),
        ("x-harvest-modified", Some(stat.modified.to_string())),
        ("x-harvest-target", stat.target.as_deref().map(escaped)),
    ];
    let field = |(name, value): (&'static str, Option<String>)| {
        Some((HeaderName::from_static(name), HeaderValue::from_str(&value?).ok()?))
    };
    fields.into_iter().filter_map(field).collect()
}

/// A text in a header: what is not plain is percent-encoded.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-~".contains(&byte);
    text.bytes().fold(String::new(), |out, byte| match plain(byte) {
        true => out + &char::from(byte).to_string(),
        false => out + &format!("%{byte:02X}"),
    })
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Put {
    path: String,
    #[serde(default)]
    mode: Option<String>,
    #[serde(default)]
    user: Option<String>,
    #[serde(default)]
    kind: Option<FileKind>,
    #[serde(default)]
    target: Option<String>,
}

/// Writes a file, or makes a folder or a link. A file appears under its name complete or not at all; one that
/// is there is replaced, a folder that is there stays as it is.
#[utoipa::path(put, path = "/v1/sessions/{session}/files", tag = "files",
    params(
        ("session" = SessionId, Path, description = "The session"),
        ("path" = String, Query, description = "What is to be there; its folder is"),
        ("mode" = Option<String>, Query, description = "Permission bits, octal; 644, for a folder 755, when absent"),
        ("user" = Option<String>, Query, description = "Whose it is: `harvest`, the default, `root` or a number"),
        ("kind" = Option<FileKind>, Query, description = "`file`, the default, `folder` or `link`"),
        ("target" = Option<String>, Query, description = "Where a link points"),
    ),
    request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "The file's bytes"),
    responses((status = 200, body = FileStat, description = "What is there now")))]
pub(crate) async fn file_put(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<Put>,
    body: Body,
) -> Result<Json<FileStat>, ApiError> {
    let inside = async { Ok(state.sessions.inside(&session).await?) };
    write_or_drain(inside, query, body).await
}

impl Put {
    /// As somebody else's, unless it says whose.
    pub(crate) fn by(self, user: &str) -> Self {
        Self { user: Some(self.user.unwrap_or_else(|| user.to_owned())), ..self }
    }
}

/// Writes what is sent; takes it all the same when that is refused.
pub(crate) async fn write_or_drain(
    inside: impl Future<Output = Result<Inside, ApiError>>,
    query: Put,
    body: Body,
) -> Result<Json<FileStat>, ApiError> {
    let mut body = body.into_data_stream();
    let put = async { write(&inside.await?, query, &mut body).await };
    match put.await {
        Ok(stat) => Ok(Json(stat)),
        Err(error) => {
            drain(&mut body).await;
            Err(error)
        }
    }
}

async fn write(
    inside: &Inside,
    query: Put,
    body: &mut BodyDataStream,
) -> Result<FileStat, ApiError> {
    let path = sound(&query.path)?;
    let kind = query.kind.unwrap_or(FileKind::File);
    let bits = mode(query.mode.as_deref(), if kind == FileKind::Folder { 0o755 } else { 0o644 })?;
    match (kind, query.target) {
        (FileKind::File, None) => {
            let mut writing = inside.file_put(path, bits, query.user)?;
            while let Some(piece) = next_of(body).await? {
                let broke =
                    |_| ApiError::invalid("invalid_body", "the body could not be read to its end");
                writing
                    .write(&piece.map_err(broke)?)
                    .await
                    .map_err(harvest_session::SessionError::from)?;
            }
            writing.finish().await.map_err(harvest_session::SessionError::from)?;
        }
        (FileKind::Folder, None) => inside.folder_put(path, bits, query.user).await?,
        (FileKind::Link, Some(target)) if !target.is_empty() => {
            inside.link_put(path, sound(&target)?.to_owned(), query.user).await?;
        }
        _ => {
            return Err(ApiError::invalid(
                "invalid_query",
                "a link, and nothing else, has a `target`",
            ));
        }
    }
    Ok(inside.file_stat(path).await?)
}

/// The next piece of a body; who sends none for long does not keep the machine awake for it.
async fn next_of(
    body: &mut BodyDataStream,
) -> Result<Option<Result<Bytes, axum::Error>>, ApiError> {
    timeout(STALL, body.next()).await.map_err(|_| {
        let detail = format!("no more of the body came for {} s", STALL.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail)
            .hint("send the file again")
    })
}

async fn drain(body: &mut BodyDataStream) {
    let drained = async {
        let mut taken = 0;
        while taken < DRAINED_BYTES
            && let Some(Ok(piece)) = body.next().await
        {
            taken += piece.len();
        }
    };
    let _ = timeout(DRAIN, drained).await;
}

fn mode(octal: Option<&str>, otherwise: u32) -> Result<u32, ApiError> {
    let Some(octal) = octal else { return Ok(otherwise) };
    u32::from_str_radix(octal, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777 && octal.bytes().all(|byte| byte.is_ascii_digit()))
        .ok_or_else(|| ApiError::invalid("invalid_query", "`mode` is octal, such as 644 or 0755"))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Delete {
    path: String,
    #[serde(default)]
    recursive: bool,
}

/// Removes a file or a link; with `recursive` a folder as well, with all that is in it.
#[utoipa::path(delete, path = "/v1/sessions/{session}/files", tag = "files",
    params(
        ("session" = SessionId, Path, description = "The session"),
        ("path" = String, Query, description = "What is to go"),
        ("recursive" = Option<bool>, Query, description = "Also a folder with all that is in it"),
    ),
    responses((status = 204, description = "It is gone")))]
pub(crate) async fn file_delete(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
    Query(query): Query<Delete>,
) -> Result<StatusCode, ApiError> {
    let (path, recursive) = query.checked()?;
    state.sessions.inside(&session).await?.file_remove(path, recursive).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl Delete {
    /// What is to go, before anybody is woken for it.
    pub(crate) fn checked(&self) -> Result<(&str, bool), ApiError> {
        Ok((sound(&self.path)?, self.recursive))
    }
}

/// A path the kernel can be given.
fn sound(path: &str) -> Result<&str, ApiError> {
    match !path.is_empty() && !path.contains('\0') && path.len() < 4096 {
        true => Ok(path),
        false => {
            Err(ApiError::invalid("invalid_query", "a path is 1 to 4095 bytes without a zero byte"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mode_is_octal_and_has_no_more_than_twelve_bits() {
        assert_eq!((mode(None, 0o644).unwrap(), mode(Some("0755"), 0).unwrap()), (0o644, 0o755));
        for bad in ["", "8", "10000", "-1", "+7", "rw"] {
            assert!(mode(Some(bad), 0).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_header_can_hold_any_target() {
        assert_eq!(escaped("/a b/ä\n%"), "/a%20b/%C3%A4%0A%25");
    }
}
