//! Extractors for bodies, path parameters and queries. Rejections are [`ApiError`]s.

use std::time::Duration;

use axum::{
    body::Bytes,
    extract::{
        DefaultBodyLimit, FromRequest, FromRequestParts, Request, rejection::BytesRejection,
    },
    http::{HeaderMap, StatusCode, header, request::Parts},
    middleware::Next,
    response::{IntoResponse, Response},
};
use harvest_proto::image::MAX_IMAGES_BYTES;
use serde::de::DeserializeOwned;

use crate::problem::ApiError;

// Neither the database nor a command line can represent NUL.
const NO_NUL: &str = "strings must not contain NUL characters";

/// Fits a prompt of 64,000 escaped characters.
pub(crate) const MAX_BODY_BYTES: usize = 1024 * 1024;

/// At this timeout the longest body needs 35 kB/s.
pub(crate) const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Fits a prompt and its images in base64.
const MAX_IMAGE_BODY_BYTES: usize = MAX_BODY_BYTES + MAX_IMAGES_BYTES / 3 * 4 + 1024;

const IMAGE_BODY_TIMEOUT: Duration = Duration::from_secs(300);

/// The limits of a body; a route may have its own.
#[derive(Debug, Clone, Copy)]
struct BodyLimits {
    bytes: usize,
    timeout: Duration,
}

const BODY_LIMITS: BodyLimits = BodyLimits { bytes: MAX_BODY_BYTES, timeout: BODY_TIMEOUT };

/// Raises the limits of a request whose body may hold images.
pub(crate) async fn allow_images(mut request: Request, next: Next) -> Response {
    let limits = BodyLimits { bytes: MAX_IMAGE_BODY_BYTES, timeout: IMAGE_BODY_TIMEOUT };
    request.extensions_mut().insert(limits);
    DefaultBodyLimit::max(limits.bytes).apply(&mut request);
    next.run(request).await
}

/// A JSON body.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        parse(&read(request, state).await?).map(Self)
    }
}

/// A JSON body that may be absent.
pub(crate) struct OptionalBody<T>(pub(crate) T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for OptionalBody<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let headers = request.headers().clone();
        let bytes = read(request, state).await?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        require_json(&headers)?;
        if bytes.trim_ascii() == b"null" {
            return Ok(Self(T::default()));
        }
        parse(&bytes).map(Self)
    }
}

/// Path parameters.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        path.map(|axum::extract::Path(value)| Self(value)).map_err(|error| {
            // An id that cannot exist is not found, like any other unknown id.
            let text = error.body_text();
            let detail = text.strip_prefix("Invalid URL: ").unwrap_or(&text);
            ApiError::new(StatusCode::NOT_FOUND, "not_found", detail)
                .hint("ids are `ses_` or `sbx_` followed by 12 letters and digits")
        })
    }
}

/// Query parameters.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        if parts.uri.query().is_some_and(|query| query.contains("%00")) {
            return Err(ApiError::invalid("invalid_query", NO_NUL));
        }
        let query = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        query
            .map(|axum::extract::Query(value)| Self(value))
            .map_err(|error| ApiError::invalid("invalid_query", query_error(&error.body_text())))
    }
}

/// A parser's error about a query, in words for people.
fn query_error(text: &str) -> String {
    let detail = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(text);
    let detail = detail.replace("unknown variant", "unknown value");
    format!("invalid query: {}", detail.replace("unknown field", "unknown parameter"))
}

/// The page size. Out of range it is rejected, not clamped, so that a client never takes a part of
/// a list for the whole.
pub(crate) fn limit(limit: Option<u32>, default: u32, max: u32) -> Result<u32, ApiError> {
    let limit = limit.unwrap_or(default);
    if (1..=max).contains(&limit) {
        return Ok(limit);
    }
    let detail = format!("`limit` must be 1 to {max}, not {limit}");
    Err(ApiError::invalid("invalid_query", detail))
}

/// Reads a body of limited length within a limited time.
pub(crate) async fn read<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, ApiError> {
    let limits = request.extensions().get::<BodyLimits>().copied().unwrap_or(BODY_LIMITS);
    let read = tokio::time::timeout(limits.timeout, Bytes::from_request(request, state)).await;
    let read = read.map_err(|_| {
        let detail = format!("the body did not arrive within {} s", limits.timeout.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail)
    })?;
    read.map_err(|error: BytesRejection| match error.into_response().status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the body is longer than {} bytes", limits.bytes),
        ),
        _ => ApiError::invalid("invalid_body", "the body is incomplete"),
    })
}

/// Reads the bytes of a body with a limit of its own.
pub(crate) async fn read_up_to(mut request: Request, bytes: usize) -> Result<Bytes, ApiError> {
    request.extensions_mut().insert(BodyLimits { bytes, timeout: BODY_TIMEOUT });
    DefaultBodyLimit::max(bytes).apply(&mut request);
    read(request, &()).await
}

/// The media type of a body, without parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> &str {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    kind.and_then(|kind| kind.split(';').next()).unwrap_or("").trim()
}

fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let essence = media_type(headers);
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let detail = format!("the content type is `{essence}`, not `application/json`");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail)
        .hint("send the header `content-type: application/json`"))
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // serde would accept an array as the fields in order.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        let detail = "the body is an array, not an object";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", detail));
    }
    if has_nul(bytes) {
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", NO_NUL));
    }
    serde_json::from_slice(bytes).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => {
            let (code, detail) = refused_value(&error);
            ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, code, detail)
        }
        _ => ApiError::invalid("invalid_json", without_values(&error)),
    })
}

/// Whether a string in this JSON contains an escaped NUL. A bare one would not be valid JSON.
fn has_nul(json: &[u8]) -> bool {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        if rest[at..].starts_with(b"\\u0000") {
            return true;
        }
        // Also skip the escaped character, which may be a backslash.
        rest = rest.get(at + 2..).unwrap_or_default();
    }
    false
}

/// The messages of [`harvest_proto`]'s own types, by their beginnings, and their error codes.
const TYPE_ERRORS: [(&str, &str); 8] = [
    ("invalid agent", "invalid_agent"),
    ("unknown effort", "invalid_effort"),
    ("unknown network policy", "invalid_network"),
    ("unknown verdict of a rule", "invalid_verdict"),
    ("invalid model", "invalid_model"),
    ("invalid repository name", "invalid_name"),
    ("invalid branch name", "invalid_branch"),
    ("prompt is", "invalid_prompt"),
];

/// The code and the message of a value that one of our own types refuses.
fn refused_value(error: &serde_json::Error) -> (&'static str, String) {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match TYPE_ERRORS.iter().find(|(start, _)| text.starts_with(start)) {
        Some((_, code)) => (code, text.strip_suffix(&place).unwrap_or(&text).to_owned()),
        None => ("invalid_body", without_values(error)),
    }
}

/// serde's message without the values it quotes, because a body may contain a secret.
fn without_values(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let safe =
        ["missing field", "unknown field", "EOF while", "expected value", "trailing characters"];
    match safe.iter().find(|safe| text.starts_with(**safe)) {
        Some(_) => format!("invalid body: {text}"),
        None => {
            format!("invalid body: wrong type or value at line {line} column {column}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::api::{CreateSession, SetSecret};

    #[test]
    fn rejections_do_not_quote_values() {
        let error = parse::<SetSecret>(br#"{"value": 12345678}"#).unwrap_err();
        assert!(!error.detail.contains("12345678"), "{}", error.detail);
        let error = parse::<SetSecret>(br#"{"value": "x", "valeu": 1}"#).unwrap_err();
        assert!(error.detail.contains("unknown field `valeu`"), "{}", error.detail);
    }

    #[test]
    fn refused_values_have_code_and_plain_message() {
        let refused = |body: &[u8]| parse::<CreateSession>(body).unwrap_err();
        let network = refused(br#"{"network": "open"}"#);
        let message = "unknown network policy `open`; use `none`, `trusted` or `full`";
        assert_eq!((network.code, network.detail.as_str()), ("invalid_network", message));
        for (body, code) in
            [(r#"{"agent": "GPT 5"}"#, "invalid_agent"), (r#"{"model": "a b"}"#, "invalid_model")]
        {
            assert_eq!(refused(body.as_bytes()).code, code);
        }
    }

    #[test]
    fn escaped_nul_is_found() {
        for with in [r#"{"a":"\u0000"}"#, r#"{"a":"x\\\u0000"}"#, r#"{"\n\u0000":1}"#] {
            assert!(has_nul(with.as_bytes()), "{with}");
        }
        for without in [r#"{"a":"\\u0000"}"#, r#"{"a":"\u0001"}"#, r#"{"a":"u0000"}"#, "\\"] {
            assert!(!has_nul(without.as_bytes()), "{without}");
        }
    }

    #[test]
    fn array_is_not_accepted_as_an_object() {
        assert!(parse::<SetSecret>(br#"  {"value": "x"}"#).is_ok());
        assert_eq!(parse::<SetSecret>(br#" ["x"]"#).unwrap_err().code, "invalid_body");
    }

    #[test]
    fn page_size_out_of_range_is_rejected() {
        let limit = |given| limit(given, 50, 200);
        assert_eq!(
            (limit(None).unwrap(), limit(Some(1)).unwrap(), limit(Some(200)).unwrap()),
            (50, 1, 200)
        );
        assert!(limit(Some(0)).is_err() && limit(Some(201)).is_err());
    }
}
