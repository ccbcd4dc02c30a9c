//! JSON-RPC 2.0 over lines, as agents speak it. Pure: builds and parses lines, and remembers which
//! of our requests are open.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::{dropped_line, unknown_lines::MAX_RAW_BYTES};
use crate::truncate;

// One or two are open at a time.
const MAX_OPEN_REQUESTS: usize = 64;

/// A message of the agent.
#[derive(Debug, PartialEq)]
pub(super) enum Message {
    /// Must be answered with [`reply`] or [`method_not_found`].
    Request {
        id: Value,
        method: String,
        params: Value,
    },
    Notification {
        method: String,
        params: Value,
    },
    /// The answer to one of our requests.
    Response {
        id: u64,
        result: Result<Value, RpcError>,
    },
}

#[derive(Debug, PartialEq)]
pub(super) struct RpcError {
    pub(super) message: String,
}

impl Message {
    /// `None` for anything that is not a message of this protocol.
    pub(super) fn parse(line: &[u8]) -> Option<Self> {
        Self::of_fields(harvest_proto::json::from_slice(line).ok()?)
    }

    /// The message that begins like this; what comes later is empty.
    pub(super) fn of_head(head: &[u8]) -> Option<Self> {
        Self::of_fields(dropped_line::fields(head))
    }

    fn of_fields(mut message: Map<String, Value>) -> Option<Self> {
        let mut take = |field: &str| message.remove(field).unwrap_or_default();
        let (id, params) = (take("id"), take("params"));
        if let Value::String(method) = take("method") {
            return Some(match id {
                Value::Null => Self::Notification { method, params },
                id => Self::Request { id, method, params },
            });
        }
        let id = id.as_u64()?;
        if let Some(error) = message.get("error").filter(|error| !error.is_null()) {
            let text = error["message"].as_str().unwrap_or("unknown error");
            let message = truncate::text(text, MAX_RAW_BYTES);
            return Some(Self::Response { id, result: Err(RpcError { message }) });
        }
        let result = Ok(message.remove("result")?);
        Some(Self::Response { id, result })
    }
}

/// Our open requests; `K` says what each one was for.
#[derive(Debug)]
pub(super) struct OpenRequests<K> {
    last: u64,
    open: BTreeMap<u64, K>,
}

impl<K> Default for OpenRequests<K> {
    fn default() -> Self {
        Self { last: 0, open: BTreeMap::new() }
    }
}

impl<K> OpenRequests<K> {
    /// The line of a new request.
    pub(super) fn request(&mut self, purpose: K, method: &str, params: &Value) -> String {
        self.last += 1;
        // An agent that never answers must not grow the supervisor.
        if self.open.len() >= MAX_OPEN_REQUESTS {
            self.open.pop_first();
        }
        self.open.insert(self.last, purpose);
        json!({"jsonrpc": "2.0", "id": self.last, "method": method, "params": params}).to_string()
    }

    /// Closes a request; `None` if it is not open.
    pub(super) fn close(&mut self, id: u64) -> Option<K> {
        self.open.remove(&id)
    }
}

/// The line of a notification.
pub(super) fn notification(method: &str, params: &Value) -> String {
    json!({"jsonrpc": "2.0", "method": method, "params": params}).to_string()
}

/// The line that answers a request.
pub(super) fn reply(id: &Value, result: &Value) -> String {
    json!({"jsonrpc": "2.0", "id": id, "result": result}).to_string()
}

/// The line that answers a request we do not serve.
pub(super) fn method_not_found(id: &Value, method: &str) -> String {
    let method = truncate::text(method, truncate::MAX_NAME_BYTES);
    error(id, -32601, &format!("method not found: {method}"))
}

/// The line that answers a request which failed.
pub(super) fn failure(id: &Value, message: &str) -> String {
    error(id, -32000, message)
}

fn error(id: &Value, code: i32, message: &str) -> String {
    json!({"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message}}).to_string()
}

/// A string field; empty when it is absent.
pub(super) fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value.get(field).and_then(Value::as_str).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(message: &Value) -> Option<Message> {
        Message::parse(message.to_string().as_bytes())
    }

    #[test]
    fn messages_are_told_apart() {
        let (id, method, params) = (json!("a"), "m".to_owned(), json!({"x": 1}));
        let request = json!({"jsonrpc": "2.0", "id": "a", "method": "m", "params": {"x": 1}});
        let expected = Message::Request { id, method: method.clone(), params: params.clone() };
        assert_eq!(parse(&request), Some(expected));
        let notification = json!({"method": "m", "params": {"x": 1}});
        assert_eq!(parse(&notification), Some(Message::Notification { method, params }));
        let response = Message::Response { id: 7, result: Ok(Value::Null) };
        assert_eq!(parse(&json!({"id": 7, "result": null})), Some(response));
        let failed = json!({"id": 7, "error": {"code": -32603, "message": "bad key"}});
        let result = Err(RpcError { message: "bad key".into() });
        assert_eq!(parse(&failed), Some(Message::Response { id: 7, result }));
        for other in [json!({}), json!([1]), json!({"id": 7}), json!({"id": "x", "result": 1})] {
            assert_eq!(parse(&other), None, "{other}");
        }
    }

    #[test]
    fn response_closes_its_request_once() {
        let mut requests = OpenRequests::default();
        let line = requests.request("first", "m", &json!({}));
        assert_eq!(line, r#"{"id":1,"jsonrpc":"2.0","method":"m","params":{}}"#);
        requests.request("second", "m", &json!({}));
        assert_eq!((requests.close(2), requests.close(2)), (Some("second"), None));
        assert_eq!((requests.close(9), requests.close(1)), (None, Some("first")));
    }

    #[test]
    fn unknown_method_is_refused_by_its_code() {
        let line = method_not_found(&json!("x1"), "fs/read_text_file");
        let line: Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&line["id"], &line["error"]["code"]), (&json!("x1"), &json!(-32601)));
    }

    #[test]
    fn json_in_private_keys_is_no_message() {
        let line = br#"{"method":"m","params":{"$serde_json::private::RawValue":"[]"}}"#;
        assert_eq!(Message::parse(line), None);
    }

    proptest! {
        #[test]
        fn arbitrary_lines_never_panic(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _any = Message::parse(&line);
        }
    }
}
