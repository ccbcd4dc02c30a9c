//! Token counts of the Gemini API.

use harvest_proto::event::Usage;
use serde::Deserialize;

use super::Tally;

/// Reads an event of a stream. Every event has the counts so far.
pub(super) fn event(data: &[u8], tally: &mut Tally) {
    let Ok(response) = serde_json::from_slice::<Response>(data) else { return };
    tally.content_bytes += response.candidates.iter().map(Candidate::bytes).sum::<u64>();
    if let Some(counts) = response.usage_metadata {
        tally.usage = counts.into();
        tally.closed |= response.candidates.iter().any(|one| one.finish_reason.is_some());
    }
}

pub(super) fn json(body: &[u8]) -> Option<Usage> {
    serde_json::from_slice::<Response>(body).ok()?.usage_metadata.map(Usage::from)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response {
    #[serde(default)]
    candidates: Vec<Candidate>,
    usage_metadata: Option<Counts>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Candidate {
    content: Option<Content>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Content {
    #[serde(default)]
    parts: Vec<Part>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    text: Option<String>,
    function_call: Option<serde_json::Value>,
}

impl Candidate {
    fn bytes(&self) -> u64 {
        let parts = self.content.iter().flat_map(|content| &content.parts);
        let bytes = |part: &Part| {
            let call = part.function_call.as_ref().map_or(0, |call| call["args"].to_string().len());
            (part.text.as_ref().map_or(0, String::len) + call) as u64
        };
        parts.map(bytes).sum()
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Counts {
    prompt_token_count: Option<u64>,
    tool_use_prompt_token_count: Option<u64>,
    cached_content_token_count: Option<u64>,
    candidates_token_count: Option<u64>,
    thoughts_token_count: Option<u64>,
}

// Gemini counts tokens of the cache inside the prompt and thoughts beside the output.
impl From<Counts> for Usage {
    fn from(counts: Counts) -> Self {
        let sum = |one: Option<u64>, other: Option<u64>| {
            one.unwrap_or(0).saturating_add(other.unwrap_or(0))
        };
        let read = counts.cached_content_token_count.unwrap_or(0);
        let input = sum(counts.prompt_token_count, counts.tool_use_prompt_token_count);
        Self {
            input_tokens: input.saturating_sub(read),
            output_tokens: sum(counts.candidates_token_count, counts.thoughts_token_count),
            cache_read_tokens: read,
            cache_write_tokens: 0,
        }
    }
}
