//! Reads requests: bodies, path parts and queries, each parsed once, each refusal in our own words.

use std::time::Duration;

use axum::{
    body::Bytes,
    extract::{FromRequest, FromRequestParts, Request, rejection::BytesRejection},
    http::{HeaderMap, StatusCode, header, request::Parts},
    response::IntoResponse,
};
use serde::de::DeserializeOwned;

use crate::problem::ApiError;

// Neither a database's text nor a command line can hold it.
const NO_ZERO: &str =
    "a text holds the character zero, which ends a text for the kernel and the store";

/// The longest body: a prompt of 64,000 characters, escaped, and room.
pub(crate) const MAX_BODY_BYTES: usize = 1024 * 1024;

/// How long a body may take to come. The longest one needs 35 kB/s.
pub(crate) const BODY_PATIENCE: Duration = Duration::from_secs(30);

/// A JSON body.
pub(crate) struct Body<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        require_json(request.headers())?;
        parse(&read(request, state).await?).map(Self)
    }
}

/// A JSON body that may be left out.
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

/// Path parts.
pub(crate) struct Path<T>(pub(crate) T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Path<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let path = axum::extract::Path::<T>::from_request_parts(parts, state).await;
        path.map(|axum::extract::Path(value)| Self(value)).map_err(|error| {
            // A well-formed address of nothing: an id that cannot exist is not found, too.
            ApiError::new(StatusCode::NOT_FOUND, "not_found", error.body_text())
                .hint("ids look like `ses_` or `sbx_`, followed by 12 letters and digits")
        })
    }
}

/// Query parameters.
pub(crate) struct Query<T>(pub(crate) T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        if parts.uri.query().is_some_and(|query| query.contains("%00")) {
            return Err(ApiError::invalid("invalid_query", NO_ZERO));
        }
        let query = axum::extract::Query::<T>::from_request_parts(parts, state).await;
        query
            .map(|axum::extract::Query(value)| Self(value))
            .map_err(|error| ApiError::invalid("invalid_query", error.body_text()))
    }
}

/// How long a list may get, and where it goes on.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Paging {
    #[serde(default)]
    pub(crate) cursor: Option<String>,
    #[serde(default)]
    pub(crate) limit: Option<u32>,
}

impl Paging {
    /// 1 to 200; 50 when the client does not say.
    pub(crate) fn limit(&self) -> Result<u32, ApiError> {
        limit(self.limit, 50, 200)
    }
}

/// How many items a page holds: refused rather than bent, so that nobody takes a part for the whole.
pub(crate) fn limit(asked: Option<u32>, otherwise: u32, most: u32) -> Result<u32, ApiError> {
    let limit = asked.unwrap_or(otherwise);
    match (1..=most).contains(&limit) {
        true => Ok(limit),
        false => {
            Err(ApiError::invalid("invalid_query", format!("`limit` is 1 to {most}, not {limit}")))
        }
    }
}

/// A body of limited length, within a limited time: a client that lets it trickle gets no place for ever.
pub(crate) async fn read<S: Send + Sync>(request: Request, state: &S) -> Result<Bytes, ApiError> {
    let read = tokio::time::timeout(BODY_PATIENCE, Bytes::from_request(request, state)).await;
    let read = read.map_err(|_| {
        let detail = format!("the body was not there within {} s", BODY_PATIENCE.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "request_timeout", detail)
    })?;
    read.map_err(|error: BytesRejection| match error.into_response().status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the body is longer than {MAX_BODY_BYTES} bytes"),
        ),
        _ => ApiError::invalid("invalid_body", "the body could not be read to its end"),
    })
}

pub(crate) fn require_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or("");
    let essence = kind.split(';').next().unwrap_or("").trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let detail = format!("the body's type is `{essence}`, not `application/json`");
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", detail)
        .hint("send the header `content-type: application/json`"))
}

pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    // A list would be taken for the fields in their order, which nobody means.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        let detail = "the body is a list, not an object";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", detail));
    }
    if has_zero(bytes) {
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", NO_ZERO));
    }
    serde_json::from_slice(bytes).map_err(|error| match error.classify() {
        serde_json::error::Category::Data => {
            ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_body", quiet(&error))
        }
        _ => ApiError::invalid("invalid_json", quiet(&error)),
    })
}

/// Whether a text in this JSON holds the character zero. Bare it would be no JSON.
fn has_zero(json: &[u8]) -> bool {
    let mut rest = json;
    while let Some(at) = rest.iter().position(|byte| *byte == b'\\') {
        if rest[at..].starts_with(b"\\u0000") {
            return true;
        }
        // The escaped character as well: it may be a backslash itself.
        rest = rest.get(at + 2..).unwrap_or_default();
    }
    false
}

/// What serde says, without the values it quotes: a body may hold a secret.
fn quiet(error: &serde_json::Error) -> String {
    let (line, column) = (error.line(), error.column());
    let text = error.to_string();
    let safe =
        ["missing field", "unknown field", "EOF while", "expected value", "trailing characters"];
    match safe.iter().find(|safe| text.starts_with(**safe)) {
        Some(_) => format!("the body cannot be read: {text}"),
        None => {
            format!("the body cannot be read: wrong type or value at line {line} column {column}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use harvest_proto::api::SetSecret;

    #[test]
    fn a_refused_body_does_not_quote_the_value_it_held() {
        let error = parse::<SetSecret>(br#"{"value": 12345678}"#).unwrap_err();
        assert!(!error.detail.contains("12345678"), "{}", error.detail);
        let error = parse::<SetSecret>(br#"{"value": "x", "valeu": 1}"#).unwrap_err();
        assert!(error.detail.contains("unknown field `valeu`"), "{}", error.detail);
    }

    #[test]
    fn a_zero_is_found_however_it_is_written() {
        for with in [r#"{"a":"\u0000"}"#, r#"{"a":"x\\\u0000"}"#, r#"{"\n\u0000":1}"#] {
            assert!(has_zero(with.as_bytes()), "{with}");
        }
        for without in [r#"{"a":"\\u0000"}"#, r#"{"a":"\u0001"}"#, r#"{"a":"u0000"}"#, "\\"] {
            assert!(!has_zero(without.as_bytes()), "{without}");
        }
    }

    #[test]
    fn a_list_is_not_taken_for_the_fields_of_an_object() {
        assert!(parse::<SetSecret>(br#"  {"value": "x"}"#).is_ok());
        assert_eq!(parse::<SetSecret>(br#" ["x"]"#).unwrap_err().code, "invalid_body");
    }

    #[test]
    fn a_limit_is_within_what_a_page_may_hold() {
        let limit = |limit| Paging { cursor: None, limit }.limit();
        assert_eq!(
            (limit(None).unwrap(), limit(Some(1)).unwrap(), limit(Some(200)).unwrap()),
            (50, 1, 200)
        );
        assert!(limit(Some(0)).is_err() && limit(Some(201)).is_err());
    }
}
