//! The tools door: `http://mcp.harvest.internal/mcp` serves the session's tools by MCP's streamable
//! HTTP, without state: a request is one JSON-RPC message, its response one JSON document, and
//! there are no sessions and no event streams. So a client notices a restart of the server only as
//! a connection that waits at the door. What a tool does is up to [`Tools`]. The path `/NAME` leads
//! to the MCP server of that name, to which the gateway adds a key.

mod gemini;
pub mod protocol;
mod remote;
mod servers;

use std::sync::Arc;

use bytes::Bytes;
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use serde_json::Value;

use harvest_proto::{McpServerName, door::MCP_NAME};

pub use self::servers::{McpServer, McpServerKind, McpServers};
use self::{
    gemini::GeminiTools,
    protocol::{Answer, INVALID_REQUEST, refuse_version},
};

use crate::{
    door::Door,
    http::{self, Abort, Body},
    ledger::Tools,
};

// A tool's arguments are small. Parsed, a hostile body takes 16 to 32 times its size, as long as
// the tool runs; the number of calls per door is limited.
const MAX_REQUEST_BYTES: usize = 1024 * 1024;

pub(crate) async fn answer(
    door: Arc<Door>,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    // Only sessions have tools, and with them the servers of other names.
    if let Some(tools) = &door.tools {
        if request.uri().path() == "/mcp" {
            return serve(&door, tools.as_ref(), request).await;
        }
        if let Some((name, server)) = named(&door, request.uri().path()) {
            return match server.kind {
                McpServerKind::Remote => remote::answer(&door, name, server, request).await,
                McpServerKind::Gemini => {
                    let tools = GeminiTools { door: Arc::clone(&door), server: server.clone() };
                    serve(&door, &tools, request).await
                }
            };
        }
    }
    if door.policy.purpose.is_check() {
        return Ok(http::text(StatusCode::FORBIDDEN, "a check has no tools"));
    }
    // Also the answer to clients that look for an authorization server first.
    Ok(http::text(StatusCode::NOT_FOUND, "the tools are at /mcp"))
}

/// The server that a path names.
fn named<'a>(door: &'a Door, path: &str) -> Option<(&'a McpServerName, &'a McpServer)> {
    let name: McpServerName = path.strip_prefix('/')?.parse().ok()?;
    door.shared.config.mcp_servers.iter().find(|(one, _)| **one == name)
}

async fn serve(
    door: &Door,
    tools: &dyn Tools,
    request: Request<Incoming>,
) -> Result<Response<Body>, Abort> {
    if let Some(refused) = refuse_head(request.method(), request.headers()) {
        return Ok(refused);
    }
    // Held until the tool has returned.
    let _call = door.tool_calls.acquire().await.map_err(|_| Abort)?;
    let body = match read_body(request.into_body()).await? {
        Ok(body) => body,
        Err(refused) => return Ok(refused),
    };
    Ok(match protocol::answer(tools, body).await {
        Answer::Response(response) => document(StatusCode::OK, &response),
        Answer::Nothing => http::response(StatusCode::ACCEPTED, HeaderMap::new(), http::full("")),
        Answer::Invalid(error) => document(StatusCode::BAD_REQUEST, &error),
    })
}

/// The body of a request, or the response to one that is too long.
async fn read_body(body: Incoming) -> Result<Result<Bytes, Response<Body>>, Abort> {
    Ok(http::read_body(body, MAX_REQUEST_BYTES).await?.ok_or_else(|| {
        let message = format!("the request is longer than {MAX_REQUEST_BYTES} bytes");
        let mut refused = refusal(StatusCode::PAYLOAD_TOO_LARGE, &message);
        refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        refused
    }))
}

/// Refuses other methods, and requests that a page in a browser could make.
fn refuse_head(method: &Method, headers: &HeaderMap) -> Option<Response<Body>> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    if method != Method::POST {
        let mut refused = http::text(StatusCode::METHOD_NOT_ALLOWED, "send requests with POST");
        refused.headers_mut().insert(header::ALLOW, HeaderValue::from_static("POST"));
        return Some(refused);
    }
    if let Some(refused) = refuse_origin(headers) {
        return Some(refused);
    }
    let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next());
    if kind.is_none_or(|kind| !kind.trim().eq_ignore_ascii_case("application/json")) {
        let message = "the content type must be application/json";
        return Some(http::text(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
    }
    let version = header::HeaderName::from_static("mcp-protocol-version");
    let version = headers.get(&version).map(|value| value.to_str().unwrap_or_default());
    let why = version.and_then(refuse_version);
    why.map(|why| refusal(StatusCode::BAD_REQUEST, &why))
}

/// Refuses the pages of a browser.
fn refuse_origin(headers: &HeaderMap) -> Option<Response<Body>> {
    let own = format!("http://{MCP_NAME}");
    let foreign = headers.get(header::ORIGIN).is_some_and(|origin| origin != own.as_str());
    let refused = || http::text(StatusCode::FORBIDDEN, "pages of other origins get no tools");
    foreign.then(refused)
}

/// A refusal of the transport as an error of the protocol.
fn refusal(status: StatusCode, why: &str) -> Response<Body> {
    document(status, &protocol::error(&Value::Null, INVALID_REQUEST, why))
}

fn document(status: StatusCode, body: &Value) -> Response<Body> {
    http::with_type(status, "application/json", body.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn browser_pages_are_refused() {
        let status = |headers: &[(&'static str, &'static str)]| {
            let headers = headers.iter().map(|(name, value)| {
                (header::HeaderName::from_static(name), HeaderValue::from_static(value))
            });
            refuse_head(&Method::POST, &headers.collect()).map(|refused| refused.status().as_u16())
        };
        let json = ("content-type", "application/json; charset=utf-8");
        assert_eq!(status(&[json]), None);
        assert_eq!(status(&[json, ("origin", "http://mcp.harvest.internal")]), None);
        assert_eq!(status(&[json, ("origin", "https://example.org")]), Some(403));
        assert_eq!(status(&[("content-type", "text/plain")]), Some(415));
        assert_eq!(status(&[json, ("mcp-protocol-version", "2999-01-01")]), Some(400));
    }
}
