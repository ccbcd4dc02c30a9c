//! The lines sent to Claude Code.

use harvest_proto::PromptId;
use serde_json::{Value, json};

/// The id of the request whose response means that the agent is ready.
pub(super) const INITIALIZE: &str = "initialize";

pub(crate) fn initialize() -> String {
    json!({"type": "control_request", "request_id": INITIALIZE, "request": {"subtype": "initialize"}})
        .to_string()
}

pub(crate) fn interrupt() -> String {
    json!({"type": "control_request", "request_id": "interrupt", "request": {"subtype": "interrupt"}})
        .to_string()
}

/// A prompt. Claude Code runs a line with the same `uuid` once, also after a resume.
pub(crate) fn prompt(id: &PromptId, text: &str) -> String {
    json!({
        "type": "user",
        "uuid": uuid(id),
        "message": {"role": "user", "content": [{"type": "text", "text": text}]},
    })
    .to_string()
}

/// Allows a tool call.
pub(super) fn allow(request: &str, input: &Value) -> String {
    respond(request, &json!({"behavior": "allow", "updatedInput": input}))
}

fn respond(request: &str, response: &Value) -> String {
    json!({
        "type": "control_response",
        "response": {"subtype": "success", "request_id": request, "response": response},
    })
    .to_string()
}

/// The error response to an unknown control request.
pub(super) fn not_supported(request: &str) -> String {
    json!({
        "type": "control_response",
        "response": {"subtype": "error", "request_id": request, "error": "not supported"},
    })
    .to_string()
}

/// The prompt's 60 bits as a version 4 UUID.
pub(crate) fn uuid(id: &PromptId) -> String {
    // The alphabet of ids, five bits per character.
    const ALPHABET: &str = "0123456789abcdefghjkmnpqrstvwxyz";
    let bits = id
        .part()
        .chars()
        .fold(0u64, |bits, letter| (bits << 5) | ALPHABET.find(letter).unwrap_or(0) as u64);
    format!(
        "{:08x}-{:04x}-4{:03x}-8000-000000000000",
        bits >> 28,
        (bits >> 12) & 0xffff,
        bits & 0xfff
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_is_stable_and_unique_per_prompt() {
        let one: PromptId = "prm_zzzzzzzzzzzz".parse().unwrap();
        let other: PromptId = "prm_zzzzzzzzzzzy".parse().unwrap();
        assert_eq!(uuid(&one), "ffffffff-ffff-4fff-8000-000000000000");
        assert_eq!(uuid(&other), "ffffffff-ffff-4ffe-8000-000000000000");
    }
}
