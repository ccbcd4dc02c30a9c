//! `/v1/sessions/{session}/artifacts`: files that the session's agents handed over. Streamed, never
//! held in memory.

use std::{io::SeekFrom, ops::Range};

use axum::{
    body::{Body, Bytes},
    extract::State,
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use harvest_proto::{
    SessionId,
    api::{Artifact, Page},
};
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};

use crate::{
    ServerState,
    authorization::Access::{Change, Read},
    extract::Path,
    problem::{ApiError, JsonResult},
    routes::{
        files::percent_encode,
        route::{Routes, page, routes},
    },
};

const CHUNK_BYTES: usize = 64 * 1024;

pub(super) fn routes() -> Routes<ServerState> {
    routes![
        artifact_list: Read,
        artifact_get: Change,
    ]
}

/// Lists the files that the session's agents handed over, oldest first.
#[utoipa::path(get, path = "/v1/sessions/{session}/artifacts", tag = "artifacts",
    responses((status = 200, body = Page<Artifact>, description = "The artifacts")))]
async fn artifact_list(
    State(state): State<ServerState>,
    Path(session): Path<SessionId>,
) -> JsonResult<Page<Artifact>> {
    Ok(page(state.sessions.artifacts(&session).await?))
}

/// Downloads an artifact, or one range of its bytes.
#[utoipa::path(get, path = "/v1/sessions/{session}/artifacts/{name}", tag = "artifacts",
    params(("name" = String, Path, description = "The artifact's name"),
           ("range" = Option<String>, Header, description = "One range of bytes, such as `bytes=0-99`")),
    responses(
        (status = 200, body = Vec<u8>, content_type = "application/octet-stream", description = "The file's bytes"),
        (status = 206, body = Vec<u8>, content_type = "application/octet-stream", description = "The bytes of the range"),
        (status = 416, body = harvest_proto::api::Problem, content_type = "application/problem+json",
            description = "The file has no such range"),
    ))]
async fn artifact_get(
    State(state): State<ServerState>,
    Path((session, name)): Path<(SessionId, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let (artifact, file) = state.sessions.artifact(&session, &name).await?;
    let wanted = headers.get(header::RANGE).and_then(|value| value.to_str().ok());
    let (status, range) = match wanted
        .map_or(Wanted::All, |text| wanted_range(text, artifact.bytes))
    {
        Wanted::All => (StatusCode::OK, 0..artifact.bytes),
        Wanted::Part(range) => (StatusCode::PARTIAL_CONTENT, range),
        Wanted::None => {
            let detail = format!("the file has {} bytes", artifact.bytes);
            return Err(ApiError::new(StatusCode::RANGE_NOT_SATISFIABLE, "invalid_range", detail));
        }
    };
    let headers = artifact_headers(&artifact, (status, &range));
    let mut file = tokio::fs::File::from_std(file);
    let seeked = file.seek(SeekFrom::Start(range.start)).await;
    seeked.map_err(|error| {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", error.to_string())
    })?;
    let length = range.end - range.start;
    Ok((status, headers, Body::from_stream(chunks(file, length))).into_response())
}

/// The content is untrusted: a browser must save it, not show it.
fn artifact_headers(artifact: &Artifact, (status, range): (StatusCode, &Range<u64>)) -> HeaderMap {
    let disposition = format!("attachment; filename*=UTF-8''{}", percent_encode(&artifact.name));
    let part = (status == StatusCode::PARTIAL_CONTENT)
        .then(|| format!("bytes {}-{}/{}", range.start, range.end - 1, artifact.bytes));
    let fields = [
        (header::CONTENT_TYPE, Some(artifact.media_type.clone())),
        (header::CONTENT_LENGTH, Some((range.end - range.start).to_string())),
        (header::CONTENT_DISPOSITION, Some(disposition)),
        (header::CONTENT_RANGE, part),
        (header::ACCEPT_RANGES, Some("bytes".to_owned())),
        (header::ETAG, Some(format!("\"{}\"", artifact.sha256))),
        (header::X_CONTENT_TYPE_OPTIONS, Some("nosniff".to_owned())),
        (header::CONTENT_SECURITY_POLICY, Some("sandbox; default-src 'none'".to_owned())),
    ];
    let field =
        |(name, value): (_, Option<String>)| Some((name, HeaderValue::from_str(&value?).ok()?));
    fields.into_iter().filter_map(field).collect()
}

fn chunks(
    file: tokio::fs::File,
    length: u64,
) -> impl futures_util::Stream<Item = Result<Bytes, std::io::Error>> {
    stream::try_unfold((file, length), |(mut file, left)| async move {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(CHUNK_BYTES);
        if most == 0 {
            return Ok(None);
        }
        let mut chunk = vec![0; most];
        let read = file.read(&mut chunk).await?;
        if read == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        chunk.truncate(read);
        Ok(Some((Bytes::from(chunk), (file, left - read as u64))))
    })
}

#[derive(Debug, PartialEq, Eq)]
enum Wanted {
    All,
    Part(Range<u64>),
    None,
}

/// One range of a file. Anything else than one valid range is ignored, as HTTP allows.
fn wanted_range(text: &str, bytes: u64) -> Wanted {
    let Some((first, last)) = text.strip_prefix("bytes=").and_then(|text| text.split_once('-'))
    else {
        return Wanted::All;
    };
    let range = match (first.parse::<u64>(), last.parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => first..last.saturating_add(1).min(bytes),
        (Ok(first), Err(_)) if last.is_empty() => first..bytes,
        (Err(_), Ok(last)) if first.is_empty() => bytes.saturating_sub(last)..bytes,
        _ => return Wanted::All,
    };
    if range.start < range.end { Wanted::Part(range) } else { Wanted::None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_range_of_a_file_is_served() {
        for (text, expected) in [
            ("bytes=0-9", Wanted::Part(0..10)),
            ("bytes=90-200", Wanted::Part(90..100)),
            ("bytes=90-", Wanted::Part(90..100)),
            ("bytes=-10", Wanted::Part(90..100)),
            ("bytes=-500", Wanted::Part(0..100)),
            ("bytes=100-", Wanted::None),
            ("bytes=-0", Wanted::None),
            ("bytes=9-0", Wanted::All),
            ("bytes=0-1,5-6", Wanted::All),
            ("lines=0-9", Wanted::All),
        ] {
            assert_eq!(wanted_range(text, 100), expected, "{text}");
        }
        assert_eq!(wanted_range("bytes=0-", 0), Wanted::None);
        assert_eq!(wanted_range(&format!("bytes=0-{}", u64::MAX), 100), Wanted::Part(0..100));
    }
}
