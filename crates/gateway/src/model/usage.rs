//! Counts the tokens of a response of the Anthropic API while it is forwarded. Changes no bytes.

use harvest_proto::event::Usage;
use serde::Deserialize;

// A longer line contains content, never token counts; it is skipped.
const MAX_LINE_BYTES: usize = 256 * 1024;
// A JSON response is buffered until its end; a longer one is not counted. The API's output limit is
// far below.
const MAX_JSON_BYTES: usize = 8 * 1024 * 1024;
// Rough estimate for English text, for connections that broke before the count arrived.
const BYTES_PER_TOKEN: u64 = 4;
// Far above any model's context window. An upstream may claim any number, and sums must not
// overflow.
const MAX_CALL_TOKENS: u64 = 100_000_000;

/// The usage that counts for one call: each claimed number up to a bound.
pub(crate) fn bounded(claimed: Usage) -> Usage {
    Usage {
        input_tokens: claimed.input_tokens.min(MAX_CALL_TOKENS),
        output_tokens: claimed.output_tokens.min(MAX_CALL_TOKENS),
        cache_read_tokens: claimed.cache_read_tokens.min(MAX_CALL_TOKENS),
        cache_write_tokens: claimed.cache_write_tokens.min(MAX_CALL_TOKENS),
    }
}

/// Reads a response.
#[derive(Debug)]
pub(crate) enum Meter {
    Events(Events),
    Json(Vec<u8>),
}

#[derive(Debug, Default)]
pub(crate) struct Events {
    line: Vec<u8>,
    skipping: bool,
    counted: Counts,
    closed: bool,
    content_bytes: u64,
}

impl Meter {
    pub(crate) fn new(content_type: &str) -> Self {
        match content_type.starts_with("text/event-stream") {
            true => Self::Events(Events::default()),
            false => Self::Json(Vec::new()),
        }
    }

    /// Reads more of the response.
    pub(crate) fn observe(&mut self, bytes: &[u8]) {
        match self {
            Self::Events(events) => events.observe(bytes),
            Self::Json(kept) if kept.len() + bytes.len() <= MAX_JSON_BYTES => {
                kept.extend_from_slice(bytes)
            }
            Self::Json(_) => {}
        }
    }

    /// Tokens of the response so far.
    pub(crate) fn usage(&self) -> Usage {
        match self {
            Self::Events(events) => events.usage(),
            Self::Json(kept) => serde_json::from_slice::<Message>(kept)
                .map(|message| message.usage.into())
                .unwrap_or_default(),
        }
    }
}

impl Events {
    fn observe(&mut self, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if !self.skipping {
                self.line.extend_from_slice(piece);
            }
            if self.line.len() > MAX_LINE_BYTES {
                self.content_bytes += self.line.len() as u64;
                (self.skipping, self.line) = (true, Vec::new());
            }
            if piece.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.skipping = false;
                self.end_of_line(&line);
            }
        }
    }

    fn end_of_line(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else { return };
        match serde_json::from_slice::<Event>(data) {
            Ok(Event::MessageStart { message }) => self.counted.replace(message.usage),
            Ok(Event::MessageDelta { usage }) => {
                self.counted.replace(usage);
                self.closed = true;
            }
            Ok(Event::ContentBlockDelta { delta }) => self.content_bytes += delta.bytes(),
            Ok(Event::Other) | Err(_) => {}
        }
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage::from(self.counted);
        if !self.closed {
            usage.output_tokens =
                usage.output_tokens.max(self.content_bytes.div_ceil(BYTES_PER_TOKEN));
        }
        usage
    }
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
    #[serde(default)]
    usage: Counts,
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
struct Counts {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const STREAM: &str = "event: message_start\n\
        data: {\"type\":\"message_start\",\"message\":{\"id\":\"m\",\"usage\":{\"input_tokens\":10,\"cache_read_input_tokens\":5,\"output_tokens\":1}}}\n\n\
        event: ping\ndata: {\"type\":\"ping\"}\n\n\
        data: {\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":\"hello there, you\"}}\n\n\
        data: {\"type\":\"message_delta\",\"delta\":{},\"usage\":{\"output_tokens\":42,\"input_tokens\":null}}\n\n\
        data: {\"type\":\"message_stop\"}\n\n";

    fn meter(stream: &str) -> Meter {
        let mut meter = Meter::new("text/event-stream; charset=utf-8");
        meter.observe(stream.as_bytes());
        meter
    }

    #[test]
    fn stream_usage_combines_first_and_last_counts() {
        let expected = Usage {
            input_tokens: 10,
            output_tokens: 42,
            cache_read_tokens: 5,
            cache_write_tokens: 0,
        };
        assert_eq!(meter(STREAM).usage(), expected);
    }

    #[test]
    fn truncated_stream_is_estimated() {
        let cut = STREAM.find("data: {\"type\":\"message_delta").unwrap();
        assert_eq!(meter(&STREAM[..cut]).usage().output_tokens, 4);
    }

    #[test]
    fn json_response_is_counted_at_its_end() {
        let mut meter = Meter::new("application/json");
        for piece in [
            r#"{"content":[],"usa"#,
            r#"ge":{"input_tokens":3,"output_tokens":7,"cache_creation_input_tokens":9}}"#,
        ] {
            meter.observe(piece.as_bytes());
        }
        let expected = Usage {
            input_tokens: 3,
            output_tokens: 7,
            cache_read_tokens: 0,
            cache_write_tokens: 9,
        };
        assert_eq!(meter.usage(), expected);
    }

    #[test]
    fn claimed_tokens_are_bounded_per_call() {
        let claim = STREAM.replace("\"output_tokens\":42", "\"output_tokens\":9223372036854775807");
        let usage = bounded(meter(&claim).usage());
        assert_eq!((usage.input_tokens, usage.output_tokens), (10, MAX_CALL_TOKENS));
    }

    #[test]
    fn endless_line_is_not_buffered() {
        let mut meter = meter("");
        (0..64).for_each(|_| meter.observe(&[b'x'; 64 * 1024]));
        let Meter::Events(events) = &meter else { unreachable!() };
        assert!(events.line.len() <= MAX_LINE_BYTES);
        meter.observe(format!("\n{STREAM}").as_bytes());
        assert_eq!(meter.usage().output_tokens, 42);
    }

    proptest! {
        #[test]
        fn chunking_does_not_change_usage(cuts in prop::collection::vec(1usize..40, 1..60)) {
            let (mut whole, mut rest) = (meter(""), STREAM.as_bytes());
            for cut in cuts.iter().cycle() {
                let (piece, more) = rest.split_at((*cut).min(rest.len()));
                whole.observe(piece);
                rest = more;
                if rest.is_empty() { break; }
            }
            prop_assert_eq!(whole.usage(), meter(STREAM).usage());
        }
    }
}
