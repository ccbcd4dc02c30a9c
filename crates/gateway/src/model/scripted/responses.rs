//! Responses of the scripted model as the Responses API sends them.

use harvest_proto::{event::Usage, script::split_text};
use serde_json::{Value, json};

use super::{
    Part,
    conversation::ToolKind,
    stream_actions::{Actions, StreamAction, fresh_id, now},
};

pub(super) fn complete(parts: &[Part], model: &str, usage: Usage) -> Value {
    let items: Vec<_> = parts.iter().filter_map(item).collect();
    response(&items, model, usage)
}

/// The events of a streamed response, with the pauses between them.
pub(super) fn actions(parts: &[Part], model: &str, usage: Usage) -> Vec<StreamAction> {
    let items: Vec<_> = parts.iter().map(item).collect();
    let output: Vec<_> = items.iter().flatten().cloned().collect();
    let full = response(&output, model, usage);
    let mut begin = full.clone();
    begin["status"] = json!("in_progress");
    begin["completed_at"] = Value::Null;
    begin["output"] = json!([]);
    begin["usage"] = Value::Null;
    let mut events = Events { actions: Actions::new(), sequence: 0 };
    events.send("response.created", json!({"response": begin}));
    events.send("response.in_progress", json!({"response": begin}));
    let mut index = 0;
    for (part, item) in parts.iter().zip(items) {
        if events.actions.pause(part) {
            continue;
        }
        if let Some(item) = item {
            events.item(part, &item, index);
            index += 1;
        }
    }
    events.send("response.completed", json!({"response": full}));
    events.actions.list
}

struct Events {
    actions: Actions,
    sequence: usize,
}

impl Events {
    fn send(&mut self, name: &str, mut data: Value) {
        data["type"] = json!(name);
        data["sequence_number"] = json!(self.sequence);
        self.sequence += 1;
        self.actions.push(StreamAction::event(name, &data));
    }

    fn item(&mut self, part: &Part, item: &Value, index: usize) {
        let mut begin = item.clone();
        let at = json!({"item_id": item["id"], "output_index": index});
        match item["type"].as_str().unwrap_or_default() {
            "message" => (begin["content"], begin["status"]) = (json!([]), json!("in_progress")),
            "reasoning" => begin["summary"] = json!([]),
            "custom_tool_call" => {
                (begin["input"], begin["status"]) = (json!(""), json!("in_progress"))
            }
            _ => (begin["arguments"], begin["status"]) = (json!(""), json!("in_progress")),
        }
        self.send("response.output_item.added", json!({"output_index": index, "item": begin}));
        match item["type"].as_str().unwrap_or_default() {
            "message" => self.message(part, item, &at),
            "reasoning" => self.reasoning(item, &at),
            "custom_tool_call" => {
                self.call("response.custom_tool_call_input", "input", item, &at);
            }
            _ => self.call("response.function_call_arguments", "arguments", item, &at),
        }
        self.send("response.output_item.done", json!({"output_index": index, "item": item}));
    }

    fn message(&mut self, part: &Part, item: &Value, at: &Value) {
        let Part::Text { text, chunks, .. } = part else { return };
        let at = with(at, json!({"content_index": 0}));
        let whole = &item["content"][0];
        let empty = with(whole, json!({"text": ""}));
        self.send("response.content_part.added", with(&at, json!({"part": empty})));
        for piece in split_text(text, *chunks) {
            self.actions.delay(part);
            let delta = json!({"delta": piece, "logprobs": []});
            self.send("response.output_text.delta", with(&at, delta));
        }
        let done = json!({"text": text, "logprobs": []});
        self.send("response.output_text.done", with(&at, done));
        self.send("response.content_part.done", with(&at, json!({"part": whole})));
    }

    fn reasoning(&mut self, item: &Value, at: &Value) {
        let at = with(at, json!({"summary_index": 0}));
        let whole = &item["summary"][0];
        let text = whole["text"].as_str().unwrap_or_default();
        let empty = with(whole, json!({"text": ""}));
        self.send("response.reasoning_summary_part.added", with(&at, json!({"part": empty})));
        for piece in split_text(text, 2) {
            let delta = with(&at, json!({"delta": piece}));
            self.send("response.reasoning_summary_text.delta", delta);
        }
        self.send("response.reasoning_summary_text.done", with(&at, json!({"text": text})));
        self.send("response.reasoning_summary_part.done", with(&at, json!({"part": whole})));
    }

    fn call(&mut self, name: &str, field: &str, item: &Value, at: &Value) {
        let text = item[field].as_str().unwrap_or_default();
        for piece in split_text(text, 3) {
            self.send(&format!("{name}.delta"), with(at, json!({"delta": piece})));
        }
        let mut done = with(at, json!({ field: text }));
        if field == "arguments" {
            done["name"] = item["name"].clone();
        }
        self.send(&format!("{name}.done"), done);
    }
}

/// An object with further fields.
fn with(base: &Value, more: Value) -> Value {
    let mut all = base.clone();
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), more) {
        all.extend(more);
    }
    all
}

fn item(part: &Part) -> Option<Value> {
    let item = match part {
        Part::Text { text, .. } => {
            let content =
                json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
            json!({
                "type": "message", "id": fresh_id("msg"), "role": "assistant",
                "status": "completed", "content": [content],
            })
        }
        Part::Thinking(text) => json!({
            "type": "reasoning", "id": fresh_id("rs"), "encrypted_content": null,
            "summary": [{"type": "summary_text", "text": text}],
        }),
        Part::Call { tool, input } => {
            let (kind, prefix, field, text) = match (tool.kind, input) {
                (ToolKind::Custom, Value::String(text)) => {
                    ("custom_tool_call", "ctc", "input", text.clone())
                }
                (ToolKind::Custom, input) => {
                    ("custom_tool_call", "ctc", "input", input.to_string())
                }
                (ToolKind::Function, input) => {
                    ("function_call", "fc", "arguments", input.to_string())
                }
            };
            let mut call = json!({
                "type": kind, "id": fresh_id(prefix), "call_id": fresh_id("call"),
                "name": tool.name, field: text, "status": "completed",
            });
            if let Some(namespace) = &tool.namespace {
                call["namespace"] = json!(namespace);
            }
            call
        }
        Part::Hang(_) | Part::Drop => return None,
    };
    Some(item)
}

fn response(output: &[Value], model: &str, usage: Usage) -> Value {
    let now = now();
    json!({
        "id": fresh_id("resp"), "object": "response", "created_at": now, "completed_at": now,
        "status": "completed", "background": false, "error": null, "incomplete_details": null,
        "instructions": null, "max_output_tokens": null, "max_tool_calls": null, "model": model,
        "output": output, "parallel_tool_calls": true, "previous_response_id": null,
        "reasoning": {"effort": null, "summary": null}, "service_tier": "default", "store": false,
        "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto",
        "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled",
        "usage": counts(usage), "metadata": {},
    })
}

// The API counts tokens of the cache inside the input.
fn counts(usage: Usage) -> Value {
    let Usage { input_tokens, output_tokens, cache_read_tokens, cache_write_tokens } = usage;
    let input = input_tokens.saturating_add(cache_read_tokens).saturating_add(cache_write_tokens);
    json!({
        "input_tokens": input, "output_tokens": output_tokens,
        "total_tokens": input.saturating_add(output_tokens),
        "input_tokens_details": {
            "cached_tokens": cache_read_tokens, "cache_write_tokens": cache_write_tokens,
        },
        "output_tokens_details": {"reasoning_tokens": 0},
    })
}
