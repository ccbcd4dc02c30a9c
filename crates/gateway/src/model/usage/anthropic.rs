//! Token counts of the Messages API.

use harvest_proto::event::Usage;
use serde::Deserialize;

use super::Tally;

/// Reads an event of a stream.
pub(super) fn event(data: &[u8], counts: &mut Counts, tally: &mut Tally) {
    match serde_json::from_slice::<Event>(data) {
        Ok(Event::MessageStart { message }) => {
            counts.replace(message.usage.unwrap_or_default());
            tally.usage = (*counts).into();
        }
        Ok(Event::MessageDelta { usage }) => {
            counts.replace(usage);
            tally.close((*counts).into());
        }
        Ok(Event::ContentBlockDelta { delta }) => tally.content_bytes += delta.bytes(),
        Ok(Event::Other) | Err(_) => {}
    }
}

pub(super) fn json(body: &[u8]) -> Option<Usage> {
    serde_json::from_slice::<Message>(body).ok()?.usage.map(Usage::from)
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Event {
    MessageStart {
        message: Message,
    },
    MessageDelta {
        #[serde(default)]
        usage: Counts,
    },
    ContentBlockDelta {
        delta: Delta,
    },
    #[serde(other)]
    Other,
}

#[derive(Deserialize)]
struct Message {
    usage: Option<Counts>,
}

#[derive(Deserialize)]
struct Delta {
    #[serde(default)]
    text: String,
    #[serde(default)]
    thinking: String,
    #[serde(default)]
    partial_json: String,
}

impl Delta {
    fn bytes(&self) -> u64 {
        (self.text.len() + self.thinking.len() + self.partial_json.len()) as u64
    }
}

// The API omits or nulls unchanged counts; the others are totals, not increments.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub(super) struct Counts {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
}

impl Counts {
    fn replace(&mut self, newer: Self) {
        self.input_tokens = newer.input_tokens.or(self.input_tokens);
        self.output_tokens = newer.output_tokens.or(self.output_tokens);
        self.cache_read_input_tokens =
            newer.cache_read_input_tokens.or(self.cache_read_input_tokens);
        self.cache_creation_input_tokens =
            newer.cache_creation_input_tokens.or(self.cache_creation_input_tokens);
    }
}

impl From<Counts> for Usage {
    fn from(counts: Counts) -> Self {
        Self {
            input_tokens: counts.input_tokens.unwrap_or(0),
            output_tokens: counts.output_tokens.unwrap_or(0),
            cache_read_tokens: counts.cache_read_input_tokens.unwrap_or(0),
            cache_write_tokens: counts.cache_creation_input_tokens.unwrap_or(0),
        }
    }
}
