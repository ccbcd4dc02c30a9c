//! The Anthropic API as upstream: the sandbox's credentials are taken off, ours are put on, and the
//! answer passes byte for byte while its tokens are counted. Follows no redirect, retries nothing:
//! agents do that themselves and show it.

use bytes::Bytes;
use futures_util::StreamExt;
use harvest_proto::Secret;
use hyper::{
    Response, StatusCode,
    header::{self, HeaderMap, HeaderName, HeaderValue},
};

use super::{CLIENT_GONE, Call, Ended, Reply, error, give, usage::Meter};
use crate::{
    http::{self, Body},
    vault::redact,
};

const KEY: &str = "ANTHROPIC_API_KEY";
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
const UPSTREAM: HeaderName = HeaderName::from_static("x-harvest-upstream");
// An error that needs more words is cut.
const MAX_ERROR_BYTES: usize = 1024 * 1024;

// What the sandbox may not say for us, and what is between us and the upstream alone. Compressed
// answers could not be counted, so none is asked for.
const NOT_PASSED: [HeaderName; 8] = [
    X_API_KEY,
    header::AUTHORIZATION,
    header::COOKIE,
    header::HOST,
    header::CONTENT_LENGTH,
    header::ACCEPT_ENCODING,
    header::EXPECT,
    header::FORWARDED,
];

/// Has the API answer a call.
pub(super) async fn answer(call: &Call, mut reply: Reply) -> Ended {
    let Some(key) = call.door.shared.ledger.secret(KEY).await else {
        let message =
            format!("no key for the Anthropic API is set; set one with `harvest secret set {KEY}`");
        return give(reply, error(StatusCode::UNAUTHORIZED, "authentication_error", &message));
    };
    let request = match request(call, &key) {
        Ok(request) => request,
        Err(message) => return give(reply, error(StatusCode::BAD_GATEWAY, "api_error", message)),
    };
    let sent = tokio::select! {
        sent = call.door.shared.clients.execute(request) => sent,
        () = reply.closed() => return Ended::unused(CLIENT_GONE),
    };
    let upstream = match sent {
        Ok(upstream) => upstream,
        Err(failed) => {
            tracing::warn!(error = %redact(&failed.to_string(), &[&key]), "cannot reach the Anthropic API");
            let message = "the Anthropic API could not be reached from this host";
            return give(reply, error(StatusCode::BAD_GATEWAY, "api_error", message));
        }
    };
    let status = upstream.status();
    if status.is_redirection() {
        let message = "the Anthropic API answered with a redirect, which is not followed";
        give(reply, error(StatusCode::BAD_GATEWAY, "api_error", message))
    } else if status.is_success() {
        pass(call, upstream, &key, reply).await
    } else {
        give(reply, failure(upstream, &key).await)
    }
}

fn request(call: &Call, key: &Secret<String>) -> Result<reqwest::Request, &'static str> {
    let base = call.door.shared.config.anthropic_url.trim_end_matches('/');
    let url = format!("{base}{}", call.target);
    let url = reqwest::Url::parse(&url)
        .map_err(|_| "the configured URL of the Anthropic API is not a URL")?;
    let mut key = HeaderValue::from_str(key.expose().trim()).map_err(
        |_| "the secret ANTHROPIC_API_KEY holds characters that no key has; set it again",
    )?;
    key.set_sensitive(true);
    let mut request = reqwest::Request::new(reqwest::Method::POST, url);
    *request.headers_mut() = http::passed_on(&call.headers, &NOT_PASSED);
    request.headers_mut().insert(X_API_KEY, key);
    request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    *request.body_mut() = Some(call.body.clone().into());
    Ok(request)
}

// Passes a good answer on as it comes, no faster than the agent reads it.
async fn pass(
    call: &Call,
    upstream: reqwest::Response,
    key: &Secret<String>,
    reply: Reply,
) -> Ended {
    let status = upstream.status();
    let headers = answer_headers(upstream.headers(), key);
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut meter = Meter::new(content_type);
    let (feed, body) = http::streamed();
    let mut response = Response::new(body);
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    if reply.send(Ok(response)).is_err() {
        return Ended::unused(CLIENT_GONE);
    }
    let mut pieces = upstream.bytes_stream();
    loop {
        let piece = tokio::select! {
            piece = pieces.next() => piece,
            () = feed.closed() => break,
        };
        let sent = match piece {
            None => break,
            Some(Ok(piece)) => {
                meter.pass(&piece);
                feed.send(Ok(piece)).await
            }
            // The agent must see a cut connection, not an answer that seems to end well.
            Some(Err(failed)) => feed.send(Err(failed.without_url().into())).await,
        };
        if sent.is_err() {
            break;
        }
    }
    let usage =
        if call.question == super::Question::Message { meter.usage() } else { Default::default() };
    Ended { status, usage }
}

async fn failure(upstream: reqwest::Response, key: &Secret<String>) -> Response<Body> {
    let (status, headers) = (upstream.status(), answer_headers(upstream.headers(), key));
    let mut text = Vec::new();
    let mut pieces = upstream.bytes_stream();
    while let Some(Ok(piece)) = pieces.next().await {
        text.extend_from_slice(&piece);
        if text.len() > MAX_ERROR_BYTES {
            break;
        }
    }
    let text = redact(&String::from_utf8_lossy(&text), &[key]);
    let mut response = Response::new(http::full(Bytes::from(text)));
    *response.status_mut() = status;
    *response.headers_mut() = headers;
    response
}

fn answer_headers(from: &HeaderMap, key: &Secret<String>) -> HeaderMap {
    let holds_key = |value: &HeaderValue| {
        let text = String::from_utf8_lossy(value.as_bytes());
        redact(&text, &[key]) != text
    };
    let mut headers: HeaderMap =
        http::passed_on(from, &[header::CONTENT_LENGTH, header::SET_COOKIE])
            .into_iter()
            .filter_map(|(name, value)| name.map(|name| (name, value)))
            .filter(|(_, value)| !holds_key(value))
            .collect();
    headers.insert(UPSTREAM, HeaderValue::from_static("anthropic"));
    headers
}
