//! Forwards the requests of an agent to a remote MCP server (streamable HTTP) and adds the key. The
//! response, also an endless stream of events, is forwarded as it arrives. Follows no redirect and
//! keeps no state: the server's own session id passes through.

use bytes::Bytes;
use futures_util::TryStreamExt;
use harvest_proto::{McpServerName, Secret};
use http_body_util::{BodyExt, StreamBody};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Frame, Incoming},
    header::{self, HeaderName, HeaderValue},
};

use super::{McpServer, read_body, refuse_origin};
use crate::{
    door::Door,
    http::{self, Abort, Body, Reach},
    vault::redact,
};

/// Headers of a request that reach the server, besides those of [`is_mcp`].
const REQUEST_HEADERS: [HeaderName; 4] = [
    header::ACCEPT,
    header::CONTENT_TYPE,
    header::USER_AGENT,
    HeaderName::from_static("last-event-id"),
];

/// Headers of a response that reach the agent, besides those of [`is_mcp`]. `www-authenticate` is
/// not among them: the agent would look for an authorization server.
const RESPONSE_HEADERS: [HeaderName; 3] =
    [header::CONTENT_TYPE, header::CACHE_CONTROL, header::RETRY_AFTER];

pub(super) async fn answer(
    door: &Door,
    name: &McpServerName,
    server: &McpServer,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    if let Some(refused) = refuse_head(request.method(), request.headers()) {
        return Ok(refused);
    }
    // Held until the response has ended, which streams do only with their connection. Waiting would
    // never end when all are streams.
    let Ok(slot) = std::sync::Arc::clone(&door.remote_calls).try_acquire_owned() else {
        let message = "too many requests to MCP servers are open; close some of them";
        return Ok(http::text(StatusCode::TOO_MANY_REQUESTS, message));
    };
    let key = match &server.secret {
        None => None,
        Some(secret) => match door.shared.ledger.secret(&door.policy.secrets, secret).await {
            Some(key) => Some(key),
            None => return Ok(no_key(name, secret)),
        },
    };
    let (head, body) = request.into_parts();
    let body = match read_body(body).await? {
        Ok(body) => body,
        Err(refused) => return Ok(refused),
    };
    let failed = |message: &str| Ok(http::text(StatusCode::BAD_GATEWAY, message));
    let Some(request) = outgoing(server, head.method, &head.headers, body, key.as_ref()) else {
        return failed(&format!("the URL or the key of the MCP server `{name}` is not valid"));
    };
    let secrets: Vec<&Secret<String>> = key.iter().collect();
    let response = match door.shared.clients.execute(request, Reach::Any).await {
        Ok(response) => response,
        Err(error) => {
            let error = redact(&error.to_string(), &secrets);
            tracing::warn!(%error, server = %name, "cannot reach an MCP server");
            return failed(&format!("cannot reach the MCP server `{name}` from this machine"));
        }
    };
    if let Some(problem) = problem(response.status()) {
        return failed(&format!("the MCP server `{name}` {problem}"));
    }
    let (status, headers) = (response.status(), returned(response.headers(), &secrets));
    let chunks = http::upstream_chunks(response, &secrets).map_ok(move |chunk| {
        // Moves the slot into the body.
        let _held = &slot;
        Frame::data(chunk)
    });
    Ok(http::response(status, headers, StreamBody::new(chunks).boxed_unsync()))
}

fn refuse_head(method: &Method, headers: &HeaderMap) -> Option<Response<Body>> {
    if ![Method::POST, Method::GET, Method::DELETE].contains(method) {
        let message = "send requests with POST, GET or DELETE";
        return Some(http::text(StatusCode::METHOD_NOT_ALLOWED, message));
    }
    refuse_origin(headers)
}

fn no_key(name: &McpServerName, secret: &str) -> Response<Body> {
    let message = format!(
        "no key for the MCP server `{name}` is stored; store it with `harvest secret set {secret}`"
    );
    http::text(StatusCode::NOT_FOUND, &message)
}

/// Why a response is not forwarded. A refused key is no request for a login, which agents would
/// make of status 401.
fn problem(status: StatusCode) -> Option<&'static str> {
    match status {
        StatusCode::UNAUTHORIZED => Some("rejected the key (401); store a valid one"),
        redirect if redirect.is_redirection() => {
            Some("responded with a redirect, which is not followed")
        }
        _ => None,
    }
}

/// The request with the key; `None` when the configured URL or the key is invalid.
fn outgoing(
    server: &McpServer,
    method: Method,
    headers: &HeaderMap,
    body: Bytes,
    key: Option<&Secret<String>>,
) -> Option<reqwest::Request> {
    let mut request = reqwest::Request::new(method, reqwest::Url::parse(&server.url).ok()?);
    let mut headers = selected(headers, &REQUEST_HEADERS);
    // A compressed response could not be searched for the key.
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    if let Some(key) = key {
        let mut value = HeaderValue::from_str(&format!("Bearer {}", key.expose().trim())).ok()?;
        value.set_sensitive(true);
        headers.insert(header::AUTHORIZATION, value);
    }
    *request.headers_mut() = headers;
    if !body.is_empty() {
        *request.body_mut() = Some(body.into());
    }
    Some(request)
}

fn returned(headers: &HeaderMap, secrets: &[&Secret<String>]) -> HeaderMap {
    let mut headers = selected(headers, &RESPONSE_HEADERS);
    for value in headers.values_mut() {
        let text = String::from_utf8_lossy(value.as_bytes()).into_owned();
        if redact(&text, secrets) != text {
            *value = HeaderValue::from_static("***");
        }
    }
    headers
}

/// The headers of MCP, and those of this list.
fn selected(headers: &HeaderMap, list: &[HeaderName]) -> HeaderMap {
    let kept = |name: &HeaderName| is_mcp(name) || list.contains(name);
    headers
        .iter()
        .filter(|(name, _)| kept(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}

/// Session, protocol version and the settings of single servers.
fn is_mcp(name: &HeaderName) -> bool {
    name.as_str().starts_with("mcp-") || name.as_str().starts_with("x-mcp-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::McpServerKind;

    fn headers(of: &[(&'static str, &'static str)]) -> HeaderMap {
        of.iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect()
    }

    #[test]
    fn only_mcp_headers_and_the_key_are_sent() {
        let url = "https://example.org/mcp".to_owned();
        let server = McpServer { kind: McpServerKind::Remote, url, secret: Some("K".into()) };
        let given = headers(&[
            ("authorization", "Bearer mine"),
            ("cookie", "a=b"),
            ("host", "mcp.harvest.internal"),
            ("mcp-session-id", "s1"),
            ("x-mcp-readonly", "true"),
            ("accept", "text/event-stream"),
        ]);
        let key = Secret::new(" k3y\n".to_owned());
        let sent = outgoing(&server, Method::GET, &given, Bytes::new(), Some(&key)).unwrap();
        assert_eq!(sent.headers()["authorization"], "Bearer k3y");
        assert_eq!(sent.headers()["mcp-session-id"], "s1");
        let mut names: Vec<&str> = sent.headers().keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(
            names,
            ["accept", "accept-encoding", "authorization", "mcp-session-id", "x-mcp-readonly"]
        );
        let invalid = Secret::new("a\nb".to_owned());
        assert!(outgoing(&server, Method::GET, &given, Bytes::new(), Some(&invalid)).is_none());
    }

    #[test]
    fn returned_headers_offer_no_login_and_no_key() {
        let from = headers(&[
            ("content-type", "application/json"),
            ("mcp-session-id", "secret-key-1"),
            ("set-cookie", "a=b"),
            ("www-authenticate", "Bearer"),
        ]);
        let key = Secret::new("secret-key-1".to_owned());
        let expected = headers(&[("content-type", "application/json"), ("mcp-session-id", "***")]);
        assert_eq!(returned(&from, &[&key]), expected);
    }

    #[test]
    fn refused_keys_and_redirects_are_not_forwarded() {
        for status in [301, 307, 401] {
            assert!(problem(StatusCode::from_u16(status).unwrap()).is_some(), "{status}");
        }
        for status in [200, 202, 400, 403, 404, 429, 500] {
            assert!(problem(StatusCode::from_u16(status).unwrap()).is_none(), "{status}");
        }
    }
}
