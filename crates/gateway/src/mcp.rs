//! The tools door: `http://mcp.harvest.internal/mcp` serves the session's tools by MCP's streamable
//! HTTP, without state: a request is one JSON-RPC message, its response one JSON document, and
//! there are no sessions and no event streams. So a client notices a restart of the server only as
//! a connection that waits at the door. What a tool does is up to [`Tools`]. The path `/NAME` leads
//! to the MCP server of that name, to which the gateway adds a key.

mod gemini;
mod remote;
mod servers;

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use serde::Deserialize;
use serde_json::{Value, json};

use harvest_proto::{McpServerName, door::MCP_NAME, json};

use self::gemini::GeminiTools;
pub use self::servers::{McpServer, McpServerKind, McpServers};

use crate::{
    door::Door,
    http::{self, Abort, Body},
    ledger::{ToolResult, Tools},
};

// A tool's arguments are small. Parsed, a hostile body takes 16 to 32 times its size, as long as
// the tool runs; the number of calls per door is limited.
const MAX_REQUEST_BYTES: usize = 1024 * 1024;

/// Versions of the protocol that begin with `initialize`, newest first. To these the front is the
/// same.
const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

const PARSE_ERROR: i64 = -32700;
const INVALID_REQUEST: i64 = -32600;
const METHOD_NOT_FOUND: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;

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
    let message = parse(&body);
    drop(body);
    Ok(match message {
        Ok(Message::Request(call)) => respond(tools, call).await,
        Ok(Message::NoReply) => {
            http::response(StatusCode::ACCEPTED, HeaderMap::new(), http::full(""))
        }
        Err((code, message)) => error(StatusCode::BAD_REQUEST, Value::Null, code, message),
    })
}

/// The body of a request, or the response to one that is too long.
async fn read_body(body: Incoming) -> Result<Result<Bytes, Response<Body>>, Abort> {
    match Limited::new(body, MAX_REQUEST_BYTES).collect().await {
        Ok(collected) => Ok(Ok(collected.to_bytes())),
        Err(failed) if failed.is::<LengthLimitError>() => {
            let message = format!("the request is longer than {MAX_REQUEST_BYTES} bytes");
            let mut refused =
                error(StatusCode::PAYLOAD_TOO_LARGE, Value::Null, INVALID_REQUEST, &message);
            // The rest of the body is not read, so the connection cannot be used again.
            refused.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
            Ok(Err(refused))
        }
        Err(_) => Err(Abort),
    }
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
    match headers.get(&version).map(|value| value.to_str().unwrap_or_default()) {
        Some(other) if !VERSIONS.contains(&other) => {
            let message =
                format!("unsupported protocol version; use one of {}", VERSIONS.join(", "));
            Some(error(StatusCode::BAD_REQUEST, Value::Null, INVALID_REQUEST, &message))
        }
        _ => None,
    }
}

/// Refuses the pages of a browser.
fn refuse_origin(headers: &HeaderMap) -> Option<Response<Body>> {
    let own = format!("http://{MCP_NAME}");
    let foreign = headers.get(header::ORIGIN).is_some_and(|origin| origin != own.as_str());
    let refused = || http::text(StatusCode::FORBIDDEN, "pages of other origins get no tools");
    foreign.then(refused)
}

/// A request of the client.
#[derive(Debug, PartialEq)]
struct RpcCall {
    id: Value,
    method: String,
    params: Value,
}

#[derive(Debug, PartialEq)]
enum Message {
    Request(RpcCall),
    /// A notification, or the response to a request, of which this server makes none.
    NoReply,
}

fn parse(body: &Bytes) -> Result<Message, (i64, &'static str)> {
    #[derive(Deserialize)]
    struct Raw {
        jsonrpc: Option<String>,
        id: Option<Value>,
        method: Option<String>,
        #[serde(default)]
        params: Value,
    }
    let value: Value = json::from_slice(body).map_err(|_| (PARSE_ERROR, "the body is not JSON"))?;
    let invalid = (INVALID_REQUEST, "the body is not a JSON-RPC 2.0 message");
    let Raw { jsonrpc, id, method, params } = match value.is_object() {
        true => serde_json::from_value(value).map_err(|_| invalid)?,
        false => return Err(invalid),
    };
    if jsonrpc.as_deref() != Some("2.0") {
        return Err(invalid);
    }
    match (id, method) {
        (Some(id), Some(method)) if id.is_string() || id.is_number() => {
            Ok(Message::Request(RpcCall { id, method, params }))
        }
        (None, Some(_)) | (Some(_), None) => Ok(Message::NoReply),
        _ => Err(invalid),
    }
}

async fn respond(tools: &dyn Tools, call: RpcCall) -> Response<Body> {
    let RpcCall { id, method, mut params } = call;
    let result = match method.as_str() {
        "initialize" => initialize(&params),
        "ping" => json!({}),
        "tools/list" => json!({ "tools": tools.list() }),
        "tools/call" => {
            let arguments = match params.get_mut("arguments").map(Value::take) {
                None | Some(Value::Null) => json!({}),
                Some(given) => given,
            };
            let name = params["name"].as_str().unwrap_or_default();
            match tools.call(name, arguments).await {
                Some(result) => call_result(result),
                None => {
                    let message = format!("there is no tool `{}`", short(name));
                    return error(StatusCode::OK, id, INVALID_PARAMS, &message);
                }
            }
        }
        other => {
            let message = format!("method `{}` is not supported", short(other));
            return error(StatusCode::OK, id, METHOD_NOT_FOUND, &message);
        }
    };
    let body = json!({ "jsonrpc": "2.0", "id": id, "result": result });
    http::with_type(StatusCode::OK, "application/json", body.to_string())
}

/// The client's version if it is known, else the newest one.
fn initialize(params: &Value) -> Value {
    let asked = params["protocolVersion"].as_str();
    let version = VERSIONS.into_iter().find(|known| asked == Some(known)).unwrap_or(VERSIONS[0]);
    json!({
        "protocolVersion": version,
        "capabilities": { "tools": {} },
        "serverInfo": { "name": "harvest", "version": env!("CARGO_PKG_VERSION") },
    })
}

fn call_result(ToolResult { text, structured, failed }: ToolResult) -> Value {
    let mut result = json!({ "content": [{ "type": "text", "text": text }], "isError": failed });
    if let Some(structured) = structured {
        result["structuredContent"] = structured;
    }
    result
}

fn short(name: &str) -> String {
    name.chars().take(100).collect()
}

fn error(status: StatusCode, id: Value, code: i64, message: &str) -> Response<Body> {
    let body = json!({ "jsonrpc": "2.0", "id": id, "error": { "code": code, "message": message } });
    http::with_type(status, "application/json", body.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Message, i64> {
        parse(&Bytes::from(text.to_owned())).map_err(|(code, _)| code)
    }

    #[test]
    fn only_requests_get_a_result() {
        let request = parsed(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#);
        let expected = RpcCall { id: json!(1), method: "ping".into(), params: Value::Null };
        assert_eq!(request, Ok(Message::Request(expected)));
        for quiet in [
            r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#,
            r#"{"jsonrpc":"2.0","id":1,"result":{}}"#,
        ] {
            assert_eq!(parsed(quiet), Ok(Message::NoReply), "{quiet}");
        }
        for invalid in ["[]", "{}", "1", r#"{"jsonrpc":"2.0","id":{},"method":"ping"}"#] {
            assert_eq!(parsed(invalid), Err(INVALID_REQUEST), "{invalid}");
        }
        assert_eq!(parsed("{"), Err(PARSE_ERROR));
    }

    #[test]
    fn json_in_private_keys_is_not_parsed() {
        let hidden = r#"{"$serde_json::private::RawValue":"[]"}"#;
        let call = format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{hidden}}}"#);
        assert_eq!(parsed(&call), Err(PARSE_ERROR));
    }

    #[test]
    fn unknown_protocol_version_gets_the_newest() {
        let version = |asked: &str| {
            initialize(&json!({ "protocolVersion": asked }))["protocolVersion"].clone()
        };
        assert_eq!(version("2025-03-26"), "2025-03-26");
        assert_eq!(version("1999-01-01"), VERSIONS[0]);
    }

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
