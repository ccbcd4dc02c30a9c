//! A stand-in for the model services: it answers at once and notes when. A prompt with [`CALL`]
//! gets a call of the agent's shell tool, everything else a text.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use anyhow::Result;
use axum::{
    Router,
    body::Bytes,
    extract::DefaultBodyLimit,
    http::{StatusCode, Uri, header},
    response::{IntoResponse as _, Response},
    routing::post,
};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::text;

/// A name that no agent knows: for models that it knows, Codex has other tools.
pub(super) const MODEL: &str = "m-one";

/// A prompt that is answered with a call of a tool.
pub(super) const CALL: &str = "Call a tool.";

pub(super) struct Model {
    /// As the Anthropic API; that of OpenAI is below `/v1`.
    pub(super) url: String,
    answered: Arc<Mutex<Option<Instant>>>,
}

impl Model {
    pub(super) async fn start() -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        let answered = Arc::default();
        let (noted, number) = (Arc::clone(&answered), Arc::new(AtomicU64::new(0)));
        let handler = move |uri: Uri, body: Bytes| {
            let number = number.fetch_add(1, Ordering::Relaxed);
            let response = respond(uri.path(), &body, number, &noted);
            async move { response }
        };
        let router = Router::new().fallback(post(handler)).layer(DefaultBodyLimit::disable());
        tokio::spawn(async move { axum::serve(listener, router).await });
        Ok(Self { url, answered })
    }

    /// When the first byte of the last answer with a text to an agent was sent.
    pub(super) fn first_byte(&self) -> Option<Instant> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

fn respond(path: &str, body: &Bytes, number: u64, noted: &Mutex<Option<Instant>>) -> Response {
    let request: Value = serde_json::from_slice(body).unwrap_or_default();
    let call = call(&request);
    let events = match path {
        "/v1/messages" => messages(call.as_ref(), number),
        "/v1/responses" => responses(call.as_ref(), number),
        _ => return StatusCode::NOT_FOUND.into_response(),
    };
    let body: String = events
        .iter()
        .map(|event| format!("event: {}\ndata: {event}\n\n", text(event, "type")))
        .collect();
    // Requests without tools are for titles.
    if call.is_none() && tools(&request).next().is_some() {
        *noted.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

fn tools(request: &Value) -> impl Iterator<Item = &str> {
    request["tools"].as_array().into_iter().flatten().map(|tool| text(tool, "name"))
}

/// The call of a tool that the request asks for: its name and its input.
fn call(request: &Value) -> Option<(String, Value)> {
    let conversation = request["messages"].as_array().or(request["input"].as_array())?;
    let answer =
        |item: &Value| text(item, "role") == "assistant" || text(item, "type") == "function_call";
    // Agents add messages of their own around the prompt.
    let since = conversation.iter().rposition(answer).map_or(0, |last| last + 1);
    if !conversation[since..].iter().any(|item| item.to_string().contains(CALL)) {
        return None;
    }
    tools(request).find_map(|name| match name {
        "Bash" | "bash" => {
            Some((name.to_owned(), json!({"command": "true", "description": "Nothing"})))
        }
        "exec_command" => Some((name.to_owned(), json!({"cmd": "true"}))),
        _ => None,
    })
}

/// Anthropic Messages.
fn messages(call: Option<&(String, Value)>, number: u64) -> Vec<Value> {
    let (block, delta, reason) = match call {
        Some((name, input)) => (
            json!({"type": "tool_use", "id": format!("toolu_{number}"), "name": name, "input": {}}),
            json!({"type": "input_json_delta", "partial_json": input.to_string()}),
            "tool_use",
        ),
        None => (
            json!({"type": "text", "text": ""}),
            json!({"type": "text_delta", "text": "said"}),
            "end_turn",
        ),
    };
    let message = json!({
        "id": format!("msg_{number}"), "type": "message", "role": "assistant", "model": MODEL,
        "content": [], "stop_reason": null, "stop_sequence": null,
        "usage": {"input_tokens": 1, "output_tokens": 1},
    });
    vec![
        json!({"type": "message_start", "message": message}),
        json!({"type": "content_block_start", "index": 0, "content_block": block}),
        json!({"type": "content_block_delta", "index": 0, "delta": delta}),
        json!({"type": "content_block_stop", "index": 0}),
        json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": null},
            "usage": {"output_tokens": 1},
        }),
        json!({"type": "message_stop"}),
    ]
}

/// OpenAI Responses.
fn responses(call: Option<&(String, Value)>, number: u64) -> Vec<Value> {
    let response = json!({"id": format!("resp_{number}"), "object": "response", "model": MODEL});
    let with = |status: &str, output: Value, usage: Value| {
        let mut response = response.clone();
        response["status"] = status.into();
        response["output"] = output;
        response["usage"] = usage;
        response
    };
    let id = format!("item_{number}");
    let item =
        |texts: Value| json!({"type": "message", "id": id, "role": "assistant", "content": texts});
    let said = json!([{"type": "output_text", "text": "said", "annotations": []}]);
    let (item, streamed) = match call {
        Some((name, input)) => (
            json!({
                "type": "function_call", "id": id, "call_id": format!("call_{number}"),
                "name": name, "arguments": input.to_string(),
            }),
            Vec::new(),
        ),
        None => (
            item(said),
            vec![
                json!({"type": "response.output_item.added", "output_index": 0, "item": item(json!([]))}),
                json!({
                    "type": "response.output_text.delta", "item_id": id, "output_index": 0,
                    "content_index": 0, "delta": "said",
                }),
            ],
        ),
    };
    let usage = json!({
        "input_tokens": 1, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 1, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2,
    });
    let created = with("in_progress", json!([]), Value::Null);
    let mut events = vec![json!({"type": "response.created", "response": created})];
    events.extend(streamed);
    events.push(json!({"type": "response.output_item.done", "output_index": 0, "item": item}));
    let completed = with("completed", json!([item]), usage);
    events.push(json!({"type": "response.completed", "response": completed}));
    events
}
