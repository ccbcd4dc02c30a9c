//! The Model Context Protocol without a transport and without state: a message of the client in,
//! the response out. The tools door of a sandbox and the server's own endpoint share it.

use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Value, json};

use harvest_proto::json;

use crate::ledger::{ToolResult, Tools};

/// Versions of the protocol that begin with `initialize`, newest first. To these the responses are
/// the same.
pub const VERSIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

const PARSE_ERROR: i64 = -32700;
pub(super) const INVALID_REQUEST: i64 = -32600;
const METHOD_NOT_FOUND: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;

/// What a message is answered with.
#[derive(Debug, PartialEq)]
pub enum Answer {
    /// The response to a request.
    Response(Value),
    /// Nothing: the message was a notification, or a response.
    Nothing,
    /// An error, because the message is not one of the protocol.
    Invalid(Value),
}

/// Answers a message; the tools do what it asks for.
pub async fn answer(tools: &dyn Tools, message: Bytes) -> Answer {
    let parsed = parse(&message);
    // A tool may take long, and the message has been read.
    drop(message);
    match parsed {
        Ok(Message::Request(call)) => Answer::Response(respond(tools, call).await),
        Ok(Message::NoReply) => Answer::Nothing,
        Err((code, why)) => Answer::Invalid(error(&Value::Null, code, why)),
    }
}

/// An error response.
#[must_use]
pub fn error(id: &Value, code: i64, message: &str) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": code, "message": message } })
}

/// Why a version in the header `mcp-protocol-version` is refused, if it is.
#[must_use]
pub fn refuse_version(version: &str) -> Option<String> {
    let known = VERSIONS.contains(&version);
    (!known).then(|| format!("unsupported protocol version; use one of {}", VERSIONS.join(", ")))
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

fn parse(body: &[u8]) -> Result<Message, (i64, &'static str)> {
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

async fn respond(tools: &dyn Tools, call: RpcCall) -> Value {
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
                    return error(&id, INVALID_PARAMS, &message);
                }
            }
        }
        other => {
            let message = format!("method `{}` is not supported", short(other));
            return error(&id, METHOD_NOT_FOUND, &message);
        }
    };
    json!({ "jsonrpc": "2.0", "id": id, "result": result })
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<Message, i64> {
        parse(text.as_bytes()).map_err(|(code, _)| code)
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
}
