//! Token counts of the Responses and Chat Completions APIs.

use harvest_proto::event::Usage;
use serde::Deserialize;

use super::Tally;

/// Reads an event of a Responses stream.
pub(super) fn responses_event(data: &[u8], tally: &mut Tally) {
    #[derive(Deserialize)]
    struct Event {
        response: Option<Response>,
        delta: Option<Delta>,
    }
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Delta {
        Text(String),
        Other(serde::de::IgnoredAny),
    }
    let Ok(event) = serde_json::from_slice::<Event>(data) else { return };
    if let Some(usage) = event.response.and_then(|response| response.usage) {
        tally.close(usage.into());
    }
    if let Some(Delta::Text(text)) = event.delta {
        tally.content_bytes += text.len() as u64;
    }
}

pub(super) fn responses_json(body: &[u8]) -> Option<Usage> {
    serde_json::from_slice::<Response>(body).ok()?.usage.map(Usage::from)
}

/// Reads a chunk of a Chat Completions stream.
pub(super) fn chat_event(data: &[u8], tally: &mut Tally) {
    #[derive(Deserialize)]
    struct Chunk {
        #[serde(default)]
        choices: Vec<Choice>,
        usage: Option<ChatUsage>,
    }
    #[derive(Deserialize)]
    struct Choice {
        delta: Option<ChatDelta>,
        finish_reason: Option<String>,
    }
    let Ok(chunk) = serde_json::from_slice::<Chunk>(data) else { return };
    if let Some(usage) = chunk.usage {
        tally.usage = usage.into();
        // Compatible services count in every chunk, if asked to.
        tally.closed |= chunk.choices.iter().all(|choice| choice.finish_reason.is_some());
    }
    let deltas = chunk.choices.into_iter().filter_map(|choice| choice.delta);
    tally.content_bytes += deltas.map(|delta| delta.bytes()).sum::<u64>();
}

pub(super) fn chat_json(body: &[u8]) -> Option<Usage> {
    #[derive(Deserialize)]
    struct Completion {
        usage: Option<ChatUsage>,
    }
    serde_json::from_slice::<Completion>(body).ok()?.usage.map(Usage::from)
}

#[derive(Deserialize)]
struct Response {
    usage: Option<ResponsesUsage>,
}

#[derive(Deserialize)]
struct ResponsesUsage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<Details>,
}

#[derive(Deserialize)]
struct ChatUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<Details>,
}

#[derive(Default, Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
    cache_write_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct ChatDelta {
    content: Option<String>,
    // Compatible servers send thoughts in this field.
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<ToolCall>>,
}

#[derive(Deserialize)]
struct ToolCall {
    function: Option<Function>,
}

#[derive(Deserialize)]
struct Function {
    arguments: Option<String>,
}

impl ChatDelta {
    fn bytes(&self) -> u64 {
        let calls = self.tool_calls.iter().flatten().filter_map(|call| call.function.as_ref());
        let arguments = calls.filter_map(|function| function.arguments.as_ref());
        let texts = [&self.content, &self.reasoning_content].into_iter().flatten();
        texts.chain(arguments).map(|text| text.len() as u64).sum()
    }
}

impl From<ResponsesUsage> for Usage {
    fn from(usage: ResponsesUsage) -> Self {
        separate(usage.input_tokens, usage.output_tokens, usage.input_tokens_details)
    }
}

impl From<ChatUsage> for Usage {
    fn from(usage: ChatUsage) -> Self {
        separate(usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details)
    }
}

// OpenAI counts tokens of the cache inside the input, Harvest beside it.
fn separate(input: Option<u64>, output: Option<u64>, details: Option<Details>) -> Usage {
    let details = details.unwrap_or_default();
    let read = details.cached_tokens.unwrap_or(0);
    let write = details.cache_write_tokens.unwrap_or(0);
    Usage {
        input_tokens: input.unwrap_or(0).saturating_sub(read).saturating_sub(write),
        output_tokens: output.unwrap_or(0),
        cache_read_tokens: read,
        cache_write_tokens: write,
    }
}
