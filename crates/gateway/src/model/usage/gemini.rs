//! Token counts of the Gemini API.

use harvest_proto::event::Usage;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::Tally;

/// Reads an event of a stream. Every event has the counts so far.
pub(super) fn event(data: &[u8], tally: &mut Tally) {
    let Ok(response) = serde_json::from_slice::<Response<'_>>(data) else { return };
    tally.content_bytes += response.candidates.iter().map(Candidate::bytes).sum::<u64>();
    if let Some(counts) = response.usage_metadata {
        tally.usage = counts.into();
        tally.closed |= response.candidates.iter().any(|one| one.finish_reason.is_some());
    }
}

pub(super) fn json(body: &[u8]) -> Option<Usage> {
    serde_json::from_slice::<Response<'_>>(body).ok()?.usage_metadata.map(Usage::from)
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    #[serde(borrow, default)]
    candidates: Vec<Candidate<'a>>,
    usage_metadata: Option<Counts>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Candidate<'a> {
    #[serde(borrow)]
    content: Option<Content<'a>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Content<'a> {
    #[serde(borrow, default)]
    parts: Vec<Part<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Part<'a> {
    text: Option<String>,
    #[serde(borrow)]
    function_call: Option<FunctionCall<'a>>,
}

/// The sandbox has a say in the arguments: a `Value` of them could overflow the stack
/// (`harvest_proto::json`).
#[derive(Deserialize)]
struct FunctionCall<'a> {
    #[serde(borrow)]
    args: Option<&'a RawValue>,
}

impl Candidate<'_> {
    fn bytes(&self) -> u64 {
        let parts = self.content.iter().flat_map(|content| &content.parts);
        let bytes = |part: &Part<'_>| {
            let args = part.function_call.as_ref().and_then(|call| call.args);
            let args = args.map_or(0, |args| args.get().len());
            (part.text.as_ref().map_or(0, String::len) + args) as u64
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gemini_arguments_are_counted_unparsed() {
        // A `Value` would parse the string as JSON, and fail.
        let args = r#"{"$serde_json::private::RawValue":"["}"#;
        let part = format!(r#"{{"functionCall":{{"args":{args}}}}}"#);
        let event_data = format!(r#"{{"candidates":[{{"content":{{"parts":[{part}]}}}}]}}"#);
        let mut tally = Tally::default();
        event(event_data.as_bytes(), &mut tally);
        assert_eq!(tally.content_bytes, args.len() as u64);
    }
}
