//! Responses of the Gemini API, streamed or not.

use harvest_proto::{event::Usage, script::split_text};
use serde_json::{Value, json};

use super::{
    MODEL, Part,
    stream_actions::{Actions, StreamAction, fresh_id},
};

pub(super) fn complete(parts: &[Part], model: &str, usage: Usage) -> Value {
    let parts: Vec<Value> = parts.iter().flat_map(|part| contents(part, 1)).collect();
    response(&fresh_id("r"), model, &parts, Some("STOP"), usage)
}

/// The events of a streamed response, with the pauses between them.
pub(super) fn actions(parts: &[Part], model: &str, usage: Usage) -> Vec<StreamAction> {
    let (id, mut actions) = (fresh_id("r"), Actions::new());
    for part in parts {
        if actions.pause(part) {
            continue;
        }
        let chunks = if let Part::Text { chunks, .. } = part { *chunks } else { 1 };
        for content in contents(part, chunks) {
            actions.delay(part);
            // The counts of the output grow; those of the input are known.
            let so_far = Usage { output_tokens: 0, ..usage };
            actions.push(StreamAction::data(&response(&id, model, &[content], None, so_far)));
        }
    }
    let last = response(&id, model, &[json!({"text": ""})], Some("STOP"), usage);
    actions.push(StreamAction::data(&last));
    actions.list
}

fn contents(part: &Part, chunks: usize) -> Vec<Value> {
    match part {
        Part::Text { text, .. } => {
            split_text(text, chunks).into_iter().map(|piece| json!({ "text": piece })).collect()
        }
        Part::Thinking(text) => vec![json!({"text": text, "thought": true})],
        Part::Call { tool, input } => {
            let call = json!({"id": fresh_id("call"), "name": tool.name, "args": input});
            vec![json!({ "functionCall": call })]
        }
        Part::Hang(_) | Part::Drop => Vec::new(),
    }
}

fn response(id: &str, model: &str, parts: &[Value], finish: Option<&str>, usage: Usage) -> Value {
    let mut candidate = json!({"content": {"role": "model", "parts": parts}, "index": 0});
    if let Some(reason) = finish {
        candidate["finishReason"] = reason.into();
    }
    json!({
        "candidates": [candidate], "usageMetadata": counts(usage), "modelVersion": model,
        "responseId": id,
    })
}

// The API counts tokens of the cache inside the prompt.
fn counts(usage: Usage) -> Value {
    let Usage { input_tokens, output_tokens, cache_read_tokens, cache_write_tokens } = usage;
    let prompt = input_tokens.saturating_add(cache_read_tokens).saturating_add(cache_write_tokens);
    json!({
        "promptTokenCount": prompt, "candidatesTokenCount": output_tokens,
        "totalTokenCount": prompt.saturating_add(output_tokens),
        "cachedContentTokenCount": cache_read_tokens,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
    })
}

/// The list of models, or one of them.
pub(super) fn models(name: Option<&str>) -> Option<Value> {
    let model = json!({
        "name": format!("models/{MODEL}"), "baseModelId": MODEL, "version": "1",
        "displayName": "Scripted model", "inputTokenLimit": 1_000_000, "outputTokenLimit": 65_536,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    });
    match name {
        None => Some(json!({ "models": [model] })),
        Some(MODEL) => Some(model),
        Some(_) => None,
    }
}
