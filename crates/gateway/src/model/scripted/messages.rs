//! Responses of the scripted model as the Messages API sends them.

use harvest_proto::{event::Usage, script::split_text};
use serde_json::{Value, json};

use super::{
    Part,
    stream_actions::{Actions, StreamAction, fresh_id},
};

pub(super) fn complete(parts: &[Part], model: &str, usage: Usage) -> Value {
    let content: Vec<_> = parts.iter().filter_map(content).collect();
    message(&content, model, usage)
}

/// The events of a streamed response, with the pauses between them.
pub(super) fn actions(parts: &[Part], model: &str, usage: Usage) -> Vec<StreamAction> {
    let blocks: Vec<_> = parts.iter().map(content).collect();
    let content: Vec<_> = blocks.iter().flatten().cloned().collect();
    let full = message(&content, model, usage);
    let mut start = full.clone();
    start["content"] = json!([]);
    start["stop_reason"] = Value::Null;
    start["usage"]["output_tokens"] = json!(1);
    let mut actions = Actions::new();
    actions.push(event(json!({"type": "message_start", "message": start})));
    actions.push(event(json!({"type": "ping"})));
    let mut index = 0;
    for (part, block) in parts.iter().zip(blocks) {
        if actions.pause(part) {
            continue;
        }
        if let Some(block) = block {
            block_actions(part, block, index, &mut actions);
            index += 1;
        }
    }
    let delta = json!({"stop_reason": full["stop_reason"], "stop_sequence": null});
    let delta = json!({"type": "message_delta", "delta": delta, "usage": counts(usage)});
    actions.push(event(delta));
    actions.push(event(json!({"type": "message_stop"})));
    actions.list
}

fn block_actions(part: &Part, block: Value, index: usize, actions: &mut Actions) {
    let (begin, deltas) = match part {
        Part::Text { text, chunks, .. } => {
            let deltas = split_text(text, *chunks)
                .into_iter()
                .map(|piece| json!({"type": "text_delta", "text": piece}))
                .collect();
            (json!({"type": "text", "text": ""}), deltas)
        }
        Part::Thinking(text) => {
            let texts = split_text(text, 2).into_iter();
            let mut deltas: Vec<_> =
                texts.map(|piece| json!({"type": "thinking_delta", "thinking": piece})).collect();
            deltas.push(json!({"type": "signature_delta", "signature": block["signature"]}));
            (json!({"type": "thinking", "thinking": "", "signature": ""}), deltas)
        }
        Part::Call { input, .. } => {
            let input = input.to_string();
            let texts = split_text(&input, 3).into_iter();
            let deltas = texts
                .map(|piece| json!({"type": "input_json_delta", "partial_json": piece}))
                .collect();
            let mut begin = block;
            begin["input"] = json!({});
            (begin, deltas)
        }
        Part::Hang(_) | Part::Drop => return,
    };
    let begin = json!({"type": "content_block_start", "index": index, "content_block": begin});
    actions.push(event(begin));
    for delta in deltas {
        actions.delay(part);
        let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
        actions.push(event(delta));
    }
    actions.push(event(json!({"type": "content_block_stop", "index": index})));
}

fn event(data: Value) -> StreamAction {
    StreamAction::event(data["type"].as_str().unwrap_or_default(), &data)
}

fn content(part: &Part) -> Option<Value> {
    match part {
        Part::Text { text, .. } => Some(json!({"type": "text", "text": text})),
        Part::Thinking(text) => {
            Some(json!({"type": "thinking", "thinking": text, "signature": "c2NyaXB0ZWQ="}))
        }
        Part::Call { tool, input } => Some(
            json!({"type": "tool_use", "id": fresh_id("toolu"), "name": tool.name, "input": input}),
        ),
        Part::Hang(_) | Part::Drop => None,
    }
}

fn message(content: &[Value], model: &str, usage: Usage) -> Value {
    let calls = content.iter().any(|block| block["type"] == "tool_use");
    json!({
        "id": fresh_id("msg"), "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": if calls { "tool_use" } else { "end_turn" }, "stop_sequence": null, "usage": counts(usage),
    })
}

fn counts(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens,
        "cache_read_input_tokens": usage.cache_read_tokens,
        "cache_creation_input_tokens": usage.cache_write_tokens,
    })
}
