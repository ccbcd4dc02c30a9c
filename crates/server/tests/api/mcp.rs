//! `/mcp`: sessions as tools, with the rights of the token.

use serde_json::{Value, json};

use super::{permissions::member, problem};
use crate::test_server::{ApiResponse, TestServer};

const JSON: (&str, &str) = ("content-type", "application/json");

async fn send(server: &TestServer, token: Option<&str>, message: &Value) -> ApiResponse {
    server.request_as(token, "POST", "/mcp", &[JSON], &message.to_string()).await
}

/// Calls a tool; returns its result.
async fn call(server: &TestServer, token: &str, tool: &str, arguments: Value) -> Value {
    let params = json!({ "name": tool, "arguments": arguments });
    let message = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params });
    let answer = send(server, Some(token), &message).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.json()["result"].clone()
}

fn said(result: &Value) -> &str {
    result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("{result}"))
}

#[tokio::test]
async fn tools_start_list_and_steer_sessions() {
    let server = TestServer::start().await;
    server.repository().await;
    let token = server.token.clone();
    let use_tool =
        async |tool: &str, arguments: Value| call(&server, &token, tool, arguments).await;
    let key = json!({ "session": "laptop" });
    let start = json!({ "prompt": "begin", "repository": "calc", "key": "laptop" });
    let made = use_tool("start_session", start.clone()).await;
    let id =
        made["structuredContent"]["id"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned();
    assert!(id.starts_with("ses_") && made["isError"] == false, "{made}");
    let again = use_tool("start_session", start).await;
    assert!(again["isError"] == true && said(&again).contains("laptop"), "{again}");

    let listed = use_tool("list_sessions", json!({ "repository": "local/calc" })).await;
    assert_eq!(listed["structuredContent"]["sessions"][0]["id"], json!(id), "{listed}");
    let shown = use_tool("show_session", key.clone()).await;
    assert_eq!(shown["structuredContent"]["key"], "laptop", "{shown}");
    let prompt = use_tool("send_prompt", json!({ "session": id, "prompt": "and more" })).await;
    assert_eq!(prompt["structuredContent"]["text"], "and more", "{prompt}");
    let read = use_tool("read_session", key.clone()).await;
    assert!(said(&read).contains(": begin\n") && said(&read).contains(": and more\n"), "{read}");
    let (_, next) = said(&read).rsplit_once("[read on with after=").unwrap();
    let next: u64 = next.trim_end_matches(']').parse().unwrap();
    let rest = use_tool("read_session", json!({ "session": id, "after": next })).await;
    assert!(!said(&rest).contains("begin"), "{rest}");
    let stopped = use_tool("stop_session", key.clone()).await;
    assert_eq!(stopped["isError"], false, "{stopped}");
    let waited = use_tool("wait_for_session", json!({ "session": id, "seconds": 0 })).await;
    assert!(waited["structuredContent"]["state"].is_string(), "{waited}");
}

#[tokio::test]
async fn tools_have_the_rights_of_the_token() {
    let server = TestServer::start().await;
    server.repository().await;
    let start = json!({ "prompt": "begin", "repository": "calc" });
    let theirs = call(&server, &server.token, "start_session", start.clone()).await;
    let theirs = theirs["structuredContent"]["id"].clone();
    let bob = member(&server, "bob").await;
    assert_eq!(call(&server, &bob, "start_session", start).await["isError"], false);
    let seen = call(&server, &bob, "list_sessions", json!({})).await;
    assert_eq!(seen["structuredContent"]["sessions"].as_array().unwrap().len(), 2, "{seen}");
    for (tool, more) in [("send_prompt", json!("x")), ("stop_session", Value::Null)] {
        let mut arguments = json!({ "session": theirs });
        if more.is_string() {
            arguments["prompt"] = more;
        }
        let refused = call(&server, &bob, tool, arguments).await;
        assert!(refused["isError"] == true && said(&refused).contains("hint: "), "{refused}");
    }
    let list = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    problem(&send(&server, Some("hv_wrong"), &list).await, 401, "unauthorized");
    problem(&send(&server, None, &list).await, 401, "unauthorized");
}

#[tokio::test]
async fn wrong_calls_of_tools_are_explained() {
    let server = TestServer::start().await;
    for (tool, arguments, why) in [
        ("send_prompt", json!({ "session": "ses_000000000000" }), "`prompt` is missing"),
        ("show_session", json!({ "session": "no such" }), "there is no session `no such`"),
        ("show_session", json!({ "session": "ses_000000000000/../x" }), "there is no session"),
        ("list_sessions", json!({ "sort": "up" }), "there is no argument `sort`; known are state"),
        ("list_sessions", json!({ "state": "idle&limit=1" }), "state"),
        ("start_session", json!({ "prompt": " " }), "prompt"),
        ("list_sessions", json!([]), "not an object"),
    ] {
        let result = call(&server, &server.token, tool, arguments).await;
        assert!(result["isError"] == true && said(&result).contains(why), "{tool}: {result}");
    }
    let token = Some(server.token.as_str());
    let note = json!({ "jsonrpc": "2.0", "method": "notifications/initialized" });
    assert_eq!(send(&server, token, &note).await.status, 202);
    let unknown =
        json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": { "name": "x" } });
    assert_eq!(send(&server, token, &unknown).await.json()["error"]["code"], -32602);
    problem(&send(&server, token, &json!([])).await, 400, "invalid_message");
    let old = [JSON, ("mcp-protocol-version", "1999-01-01")];
    let refused = server.request_as(token, "POST", "/mcp", &old, &note.to_string()).await;
    problem(&refused, 400, "unsupported_version");
    problem(&server.request("GET", "/mcp", &[], "").await, 405, "method_not_allowed");
}
