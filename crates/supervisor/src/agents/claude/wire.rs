//! The lines we send to Claude Code.

use harvest_proto::PromptId;
use serde_json::{Value, json};

/// The request whose answer says that it takes prompts.
pub(super) const INITIALIZE: &str = "initialize";

/// Asks whether it is there.
pub(crate) fn initialize() -> String {
    json!({"type": "control_request", "request_id": INITIALIZE, "request": {"subtype": "initialize"}})
        .to_string()
}

/// Asks it to give up what it is doing.
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

/// Allows the tool that a request was about.
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

/// Says that we do not know what was asked of us.
pub(super) fn refuse(request: &str) -> String {
    json!({
        "type": "control_response",
        "response": {"subtype": "error", "request_id": request, "error": "not supported"},
    })
    .to_string()
}

/// A UUID that only this prompt has: its 60 bits in the places a version 4 UUID leaves free.
pub(crate) fn uuid(id: &PromptId) -> String {
    // The alphabet ids are printed in, five bits a character.
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
    fn a_prompt_always_has_the_same_uuid_and_no_other_has_it() {
        let one: PromptId = "prm_zzzzzzzzzzzz".parse().unwrap();
        let other: PromptId = "prm_zzzzzzzzzzzy".parse().unwrap();
        assert_eq!(uuid(&one), "ffffffff-ffff-4fff-8000-000000000000");
        assert_eq!(uuid(&other), "ffffffff-ffff-4ffe-8000-000000000000");
    }
}
