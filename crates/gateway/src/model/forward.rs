//! Forwards a call to its upstream: replaces the sandbox's credentials by the configured key, and
//! counts the tokens of the response while forwarding it unchanged. Follows no redirect and retries
//! nothing: agents retry themselves. A response that the agent no longer wants is read on for its
//! counts, for a while: the service computes it nevertheless.

mod relay;

use std::time::Duration;

use bytes::Bytes;
use harvest_proto::{Secret, UpstreamName, event::Usage};
use hyper::{
    Response, StatusCode,
    header::{self, HeaderMap, HeaderName, HeaderValue},
};
use tokio::sync::Notify;

use super::{
    CLIENT_GONE, Call, CallResult, Endpoint, Reply, Upstream,
    chat_usage::{self, UsageFilter},
    error, respond,
    upstreams::{Credential, MissingKey, X_API_KEY},
    usage::Meter,
};
use crate::{
    http::{self, Body, Reach},
    ledger::Used,
    vault::redact,
};
use relay::Relay;

// Longer error responses are cut.
const MAX_ERROR_BYTES: usize = 1024 * 1024;

// For an agent that does not read, in all of a response. A sandbox under load reads slowly, but an
// agent is far faster than a model.
const PATIENCE: Duration = Duration::from_secs(5 * 60);
// For the rest of a response that the agent no longer wants. Most are shorter; the others are
// charged as held.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5 * 60);

// Headers the sandbox must not set, and headers of the connection to the upstream. Compressed
// responses could not be counted, so none is requested.
const NOT_FORWARDED: [HeaderName; 11] = [
    X_API_KEY,
    // The method is the one that was judged.
    HeaderName::from_static("x-http-method-override"),
    HeaderName::from_static("openai-organization"),
    HeaderName::from_static("openai-project"),
    header::AUTHORIZATION,
    header::COOKIE,
    header::HOST,
    header::CONTENT_LENGTH,
    header::ACCEPT_ENCODING,
    header::EXPECT,
    header::FORWARDED,
];

// Google's headers choose keys, projects and the fields of a response: `x-goog-fieldmask` would
// hide the token counts. One of them only names the SDK.
const GOOGLE_PREFIX: &str = "x-goog-";
const GOOGLE_SDK: &str = "x-goog-api-client";

pub(super) async fn answer(call: &Call, reply: Reply) -> CallResult {
    let (gone, mut meter) = (Notify::new(), Meter::new(call.route.endpoint, "", call.body.len()));
    tokio::select! {
        biased;
        result = exchange(call, reply, &gone, &mut meter) => return result,
        () = drained(call, &gone) => {}
    }
    CallResult { status: CLIENT_GONE, used: meter.used(false) }
}

/// Waits until the agent has disconnected, and then as long as the response is worth reading.
async fn drained(call: &Call, gone: &Notify) {
    gone.notified().await;
    // Without a key it costs nothing, and may keep the user's own machine busy.
    if !call.route.endpoint.uses_tokens() || !call.is_keyed() {
        return;
    }
    if let Ok(_slot) = call.door.drains.try_acquire() {
        tokio::time::sleep(DRAIN_TIMEOUT).await;
    }
}

async fn exchange(call: &Call, mut reply: Reply, gone: &Notify, meter: &mut Meter) -> CallResult {
    let name = &call.route.upstream;
    let unavailable = |message: &str| error(StatusCode::BAD_GATEWAY, "api_error", message);
    let (ledger, owners) = (call.door.shared.ledger.as_ref(), &call.door.policy.secrets);
    let key = match call.upstream.credential(ledger, owners).await {
        Ok(key) => key,
        Err(missing) => return respond(reply, refuse_without_key(name, &missing)),
    };
    let asked = match call.route.endpoint {
        Endpoint::Chat => chat_usage::request_usage(&call.body),
        _ => None,
    };
    let filter = asked.as_ref().map(|_| UsageFilter::default());
    let request = match request(call, &key, asked.unwrap_or_else(|| call.body.clone())) {
        Ok(request) => request,
        Err(message) => return respond(reply, unavailable(&message)),
    };
    if reply.is_closed() {
        return CallResult::unused(CLIENT_GONE);
    }
    let mut sent = Box::pin(call.door.shared.clients.execute(request, Reach::Any));
    let sent = tokio::select! {
        sent = &mut sent => sent,
        // The service may have read the request already.
        () = reply.closed() => {
            gone.notify_one();
            sent.await
        }
    };
    let upstream = match sent {
        Ok(upstream) => upstream,
        Err(failed) => {
            let error = redact(&failed.to_string(), &secrets(&key));
            tracing::warn!(%error, upstream = %name, "cannot reach a model service");
            let message = format!("cannot reach the model service `{name}` from this machine");
            let unsent = http::is_unsent(&failed).then_some(Used::Counted(Usage::default()));
            let used = unsent.unwrap_or_else(|| meter.used(false));
            return CallResult { used, ..respond(reply, unavailable(&message)) };
        }
    };
    let status = upstream.status();
    if status.is_redirection() {
        let message =
            format!("the model service `{name}` responded with a redirect, which is not followed");
        respond(reply, unavailable(&message))
    } else if status.is_success() {
        let relay = Relay { meter, filter, gone, patience: PATIENCE };
        forward(call, upstream, &key, relay, reply).await
    } else {
        respond(reply, failure(call, upstream, &key).await)
    }
}

// Not 401: agents retry that for minutes, and the service refused nothing.
fn refuse_without_key(name: &UpstreamName, MissingKey(secret): &MissingKey) -> Response<Body> {
    let message = format!(
        "no API key for the model service `{name}` is stored; store it with `harvest secret set \
         {secret}`"
    );
    error(StatusCode::BAD_REQUEST, "invalid_request_error", &message)
}

fn secrets(key: &Credential) -> Vec<&Secret<String>> {
    key.secret().into_iter().collect()
}

fn request(call: &Call, key: &Credential, body: Bytes) -> Result<reqwest::Request, String> {
    let name = &call.route.upstream;
    let url = target_url(&call.upstream, &call.route.target)
        .ok_or_else(|| format!("the configured URL of the model service `{name}` is invalid"))?;
    let mut request = reqwest::Request::new(call.method.clone(), url);
    let mut headers = request_headers(&call.headers);
    key.add_to(&mut headers).map_err(|_| {
        format!(
            "the key of the model service `{name}` contains characters that are invalid in a key; \
             store it again"
        )
    })?;
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    *request.headers_mut() = headers;
    if !call.route.endpoint.is_catalog() {
        // The form in which the request was judged.
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(header::CONTENT_TYPE, json);
        *request.body_mut() = Some(body.into());
    }
    Ok(request)
}

/// The headers of a sandbox that an upstream receives.
fn request_headers(from: &HeaderMap) -> HeaderMap {
    let is_dropped =
        |name: &&HeaderName| name.as_str().starts_with(GOOGLE_PREFIX) && *name != GOOGLE_SDK;
    let google = from.keys().filter(is_dropped).cloned();
    let without: Vec<_> = NOT_FORWARDED.into_iter().chain(google).collect();
    http::forwarded_headers(from, &without)
}

// The path must be the one that was judged, however the URL was parsed.
fn target_url(upstream: &Upstream, target: &str) -> Option<reqwest::Url> {
    let base = reqwest::Url::parse(&upstream.url_of("")).ok()?;
    let url = reqwest::Url::parse(&upstream.url_of(target)).ok()?;
    let path = target.split('?').next().unwrap_or_default();
    let expected = format!("{}{path}", base.path().trim_end_matches('/'));
    (url.path() == expected && url.origin() == base.origin()).then_some(url)
}

async fn forward(
    call: &Call,
    upstream: reqwest::Response,
    key: &Credential,
    mut relay: Relay<'_>,
    reply: Reply,
) -> CallResult {
    let status = upstream.status();
    let headers = response_headers(call, upstream.headers(), key);
    let content_type =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    *relay.meter = Meter::new(call.route.endpoint, content_type, call.body.len());
    let (sender, body) = http::streamed();
    let (status, sender) = match reply.send(Ok(http::response(status, headers, body))) {
        Ok(()) => (status, Some(sender)),
        Err(_) => (CLIENT_GONE, None),
    };
    let complete = relay.run(http::upstream_chunks(upstream, &secrets(key)), sender).await;
    CallResult { status, used: relay.meter.used(complete) }
}

async fn failure(call: &Call, upstream: reqwest::Response, key: &Credential) -> Response<Body> {
    let (status, headers) = (upstream.status(), response_headers(call, upstream.headers(), key));
    let text = redact(&http::read_text(upstream, MAX_ERROR_BYTES).await, &secrets(key));
    http::response(status, headers, http::full(text))
}

fn response_headers(call: &Call, from: &HeaderMap, key: &Credential) -> HeaderMap {
    let contains_key = |value: &HeaderValue| {
        let text = String::from_utf8_lossy(value.as_bytes());
        redact(&text, &secrets(key)) != text
    };
    let mut headers: HeaderMap =
        http::forwarded_headers(from, &[header::CONTENT_LENGTH, header::SET_COOKIE])
            .into_iter()
            .filter_map(|(name, value)| name.map(|name| (name, value)))
            .filter(|(_, value)| !contains_key(value))
            .collect();
    call.label(&mut headers);
    headers
}

#[cfg(test)]
mod tests {
    use harvest_proto::UpstreamKind;

    use super::*;

    #[test]
    fn headers_that_steer_google_are_dropped() {
        let kept = ["x-goog-api-client", "anthropic-beta", "user-agent"];
        let dropped = [
            "x-goog-api-key",
            "x-goog-fieldmask",
            "x-goog-user-project",
            "x-goog-request-params",
            "x-http-method-override",
        ];
        let all = kept.iter().chain(&dropped).map(|name| HeaderName::from_static(name));
        let all: HeaderMap = all.map(|name| (name, HeaderValue::from_static("v"))).collect();
        let forwarded = request_headers(&all);
        assert!(kept.iter().all(|name| forwarded.contains_key(*name)), "{forwarded:?}");
        assert_eq!(forwarded.len(), kept.len(), "{forwarded:?}");
    }

    #[test]
    fn parsed_url_must_keep_the_path() {
        let url = |base: &str, target: &str| {
            let (kind, url) = (UpstreamKind::Openai, base.to_owned());
            let upstream = Upstream { kind, url, secret: None, oauth_secret: None };
            target_url(&upstream, target).map(|url| url.to_string())
        };
        for (base, expected) in [
            ("https://Example.org:443/v1/", "https://example.org/v1/models/gpt?a=../b"),
            ("http://127.0.0.1:9", "http://127.0.0.1:9/models/gpt?a=../b"),
        ] {
            assert_eq!(url(base, "/models/gpt?a=../b").as_deref(), Some(expected));
            for target in ["/models/../files", "/models/%2e%2e/files", "/models\\a"] {
                assert_eq!(url(base, target), None, "{target}");
            }
        }
    }
}
