//! Responses of the scripted model as the Chat Completions API sends them.

use harvest_proto::{event::Usage, script::split_text};
use serde_json::{Value, json};

use super::{
    Part,
    stream_actions::{Actions, StreamAction, fresh_id, now},
};

pub(super) fn complete(parts: &[Part], model: &str, usage: Usage) -> Value {
    let texts = |wanted: fn(&Part) -> Option<&String>| -> Value {
        let text: String = parts.iter().filter_map(wanted).map(String::as_str).collect();
        if text.is_empty() { Value::Null } else { json!(text) }
    };
    let content = texts(|part| match part {
        Part::Text { text, .. } => Some(text),
        _ => None,
    });
    let thoughts = texts(|part| match part {
        Part::Thinking(text) => Some(text),
        _ => None,
    });
    let mut message = json!({
        "role": "assistant", "content": content, "refusal": null, "annotations": [],
    });
    if !thoughts.is_null() {
        message["reasoning_content"] = thoughts;
    }
    let calls = calls(parts);
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
    }
    let choice = json!({
        "index": 0, "message": message, "logprobs": null, "finish_reason": finish_reason(parts),
    });
    let mut completion = head(model, "chat.completion");
    completion["choices"] = json!([choice]);
    completion["usage"] = counts(usage);
    completion
}

/// The chunks of a streamed response, with the pauses between them.
pub(super) fn actions(
    parts: &[Part],
    model: &str,
    usage: Usage,
    include_usage: bool,
) -> Vec<StreamAction> {
    let head = head(model, "chat.completion.chunk");
    let chunk = |delta: Value, finish_reason: Value| {
        let choice = json!({
            "index": 0, "delta": delta, "logprobs": null, "finish_reason": finish_reason,
        });
        let mut chunk = head.clone();
        chunk["choices"] = json!([choice]);
        if include_usage {
            chunk["usage"] = Value::Null;
        }
        StreamAction::data(&chunk)
    };
    let mut actions = Actions::new();
    let start = json!({"role": "assistant", "content": "", "refusal": null});
    actions.push(chunk(start, Value::Null));
    let mut calls = calls(parts).into_iter().enumerate();
    for part in parts {
        if actions.pause(part) {
            continue;
        }
        for delta in deltas(part, &mut calls) {
            actions.delay(part);
            actions.push(chunk(delta, Value::Null));
        }
    }
    actions.push(chunk(json!({}), json!(finish_reason(parts))));
    let mut last = head.clone();
    last["choices"] = json!([]);
    last["usage"] = counts(usage);
    let last = format!("data: {last}\n\n");
    actions.push(if include_usage { StreamAction::Send(last) } else { StreamAction::Count(last) });
    actions.push(StreamAction::Send("data: [DONE]\n\n".to_owned()));
    actions.list
}

fn deltas(part: &Part, calls: &mut impl Iterator<Item = (usize, Value)>) -> Vec<Value> {
    match part {
        Part::Text { text, chunks, .. } => {
            split_text(text, *chunks).into_iter().map(|piece| json!({"content": piece})).collect()
        }
        Part::Thinking(text) => {
            let pieces = split_text(text, 2).into_iter();
            pieces.map(|piece| json!({"reasoning_content": piece})).collect()
        }
        Part::Call { .. } => {
            let Some((index, mut call)) = calls.next() else { return Vec::new() };
            let arguments = std::mem::replace(&mut call["function"]["arguments"], json!(""));
            call["index"] = json!(index);
            let pieces = split_text(arguments.as_str().unwrap_or_default(), 3).into_iter();
            let pieces =
                pieces.map(|piece| json!({"index": index, "function": {"arguments": piece}}));
            std::iter::once(call).chain(pieces).map(|call| json!({"tool_calls": [call]})).collect()
        }
        Part::Hang(_) | Part::Drop => Vec::new(),
    }
}

fn calls(parts: &[Part]) -> Vec<Value> {
    let call = |part: &Part| match part {
        Part::Call { tool, input } => {
            let function = json!({"name": tool.name, "arguments": input.to_string()});
            Some(json!({"id": fresh_id("call"), "type": "function", "function": function}))
        }
        _ => None,
    };
    parts.iter().filter_map(call).collect()
}

fn finish_reason(parts: &[Part]) -> &'static str {
    let calls = parts.iter().any(|part| matches!(part, Part::Call { .. }));
    if calls { "tool_calls" } else { "stop" }
}

fn head(model: &str, object: &str) -> Value {
    json!({
        "id": fresh_id("chatcmpl").replacen('_', "-", 1), "object": object, "created": now(),
        "model": model, "service_tier": "default", "system_fingerprint": null,
    })
}

// The API counts tokens of the cache inside the prompt.
fn counts(usage: Usage) -> Value {
    let Usage { input_tokens, output_tokens, cache_read_tokens, cache_write_tokens } = usage;
    let prompt = input_tokens.saturating_add(cache_read_tokens).saturating_add(cache_write_tokens);
    json!({
        "prompt_tokens": prompt, "completion_tokens": output_tokens,
        "total_tokens": prompt.saturating_add(output_tokens),
        "prompt_tokens_details": {
            "cached_tokens": cache_read_tokens, "cache_write_tokens": cache_write_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": 0, "audio_tokens": 0, "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    })
}
