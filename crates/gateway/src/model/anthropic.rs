//! The Anthropic API as upstream: replaces the sandbox's credentials by the configured key, and
//! counts the tokens of the response while forwarding it unchanged. Follows no redirect and retries
//! nothing: agents retry themselves.

use futures_util::StreamExt;
use harvest_proto::Secret;
use hyper::{
    Response, StatusCode,
    header::{self, HeaderMap, HeaderName, HeaderValue},
};

use super::{CLIENT_GONE, Call, CallResult, Reply, UPSTREAM, error, respond, usage::Meter};
use crate::{
    http::{self, Body, Reach},
    vault::redact,
};

pub(super) const KEY: &str = "ANTHROPIC_API_KEY";
const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
// Longer error responses are cut.
const MAX_ERROR_BYTES: usize = 1024 * 1024;

// Headers the sandbox must not set, and headers of the connection to the upstream. Compressed
// responses could not be counted, so none is requested.
const NOT_FORWARDED: [HeaderName; 8] = [
    X_API_KEY,
    header::AUTHORIZATION,
    header::COOKIE,
    header::HOST,
    header::CONTENT_LENGTH,
    header::ACCEPT_ENCODING,
    header::EXPECT,
    header::FORWARDED,
];

pub(super) async fn answer(call: &Call, mut reply: Reply) -> CallResult {
    let Some(key) = call.door.shared.ledger.secret(KEY).await else {
        // Not 401: agents retry that for minutes, and the service refused nothing.
        let message =
            format!("no API key for Anthropic is stored; store it with `harvest secret set {KEY}`");
        return respond(reply, error(StatusCode::BAD_REQUEST, "invalid_request_error", &message));
    };
    let request = match request(call, &key) {
        Ok(request) => request,
        Err(message) => {
            return respond(reply, error(StatusCode::BAD_GATEWAY, "api_error", message));
        }
    };
    let sent = tokio::select! {
        sent = call.door.shared.clients.execute(request, Reach::Any) => sent,
        () = reply.closed() => return CallResult::unused(CLIENT_GONE),
    };
    let upstream = match sent {
        Ok(upstream) => upstream,
        Err(failed) => {
            tracing::warn!(error = %redact(&failed.to_string(), &[&key]), "cannot reach the Anthropic API");
            let message = "cannot reach the Anthropic API from this machine";
            return respond(reply, error(StatusCode::BAD_GATEWAY, "api_error", message));
        }
    };
    let status = upstream.status();
    if status.is_redirection() {
        let message = "the Anthropic API responded with a redirect, which is not followed";
        respond(reply, error(StatusCode::BAD_GATEWAY, "api_error", message))
    } else if status.is_success() {
        forward(call, upstream, &key, reply).await
    } else {
        respond(reply, failure(upstream, &key).await)
    }
}

fn request(call: &Call, key: &Secret<String>) -> Result<reqwest::Request, &'static str> {
    let base = call.door.shared.config.anthropic_url.trim_end_matches('/');
    let url = format!("{base}{}", call.target);
    let url = reqwest::Url::parse(&url)
        .map_err(|_| "the configured URL of the Anthropic API is invalid")?;
    let mut key = HeaderValue::from_str(key.expose().trim()).map_err(
        |_| "secret ANTHROPIC_API_KEY contains characters that are invalid in a key; set it again",
    )?;
    key.set_sensitive(true);
    let mut request = reqwest::Request::new(reqwest::Method::POST, url);
    *request.headers_mut() = http::forwarded_headers(&call.headers, &NOT_FORWARDED);
    request.headers_mut().insert(X_API_KEY, key);
    request.headers_mut().insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    *request.body_mut() = Some(call.body.clone().into());
    Ok(request)
}

// Forwards a response as it arrives, no faster than the agent reads it.
async fn forward(
    call: &Call,
    upstream: reqwest::Response,
    key: &Secret<String>,
    reply: Reply,
) -> CallResult {
    let status = upstream.status();
    let headers = response_headers(upstream.headers(), key);
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let mut meter = Meter::new(content_type);
    let (sender, body) = http::streamed();
    if reply.send(Ok(http::response(status, headers, body))).is_err() {
        return CallResult::unused(CLIENT_GONE);
    }
    let mut chunks = http::upstream_chunks(upstream, &[key]);
    loop {
        let chunk = tokio::select! {
            chunk = chunks.next() => chunk,
            () = sender.closed() => break,
        };
        let Some(chunk) = chunk else { break };
        if let Ok(chunk) = &chunk {
            meter.observe(chunk);
        }
        // An error is sent too: the agent must see a cut connection, not a response that seems
        // complete.
        if sender.send(chunk).await.is_err() {
            break;
        }
    }
    let usage =
        if call.endpoint == super::Endpoint::Messages { meter.usage() } else { Default::default() };
    CallResult { status, usage }
}

async fn failure(upstream: reqwest::Response, key: &Secret<String>) -> Response<Body> {
    let (status, headers) = (upstream.status(), response_headers(upstream.headers(), key));
    let text = redact(&http::read_text(upstream, MAX_ERROR_BYTES).await, &[key]);
    http::response(status, headers, http::full(text))
}

fn response_headers(from: &HeaderMap, key: &Secret<String>) -> HeaderMap {
    let contains_key = |value: &HeaderValue| {
        let text = String::from_utf8_lossy(value.as_bytes());
        redact(&text, &[key]) != text
    };
    let mut headers: HeaderMap =
        http::forwarded_headers(from, &[header::CONTENT_LENGTH, header::SET_COOKIE])
            .into_iter()
            .filter_map(|(name, value)| name.map(|name| (name, value)))
            .filter(|(_, value)| !contains_key(value))
            .collect();
    headers.insert(UPSTREAM, HeaderValue::from_static("anthropic"));
    headers
}
