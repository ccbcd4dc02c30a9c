//! Counts the tokens of a response while it is forwarded. Changes no bytes. The four counts mean
//! the same for all APIs: input is what was neither read from a cache nor written to one.

mod anthropic;
mod gemini;
mod openai;

use harvest_proto::event::Usage;

use super::route::Endpoint;
use crate::ledger::Used;

// A longer line of Messages or Chat Completions contains content, never token counts; it is
// skipped.
const MAX_LINE_BYTES: usize = 256 * 1024;
// A JSON response is buffered until its end; a longer one is estimated. The API's output limit is
// far below.
const MAX_JSON_BYTES: usize = 8 * 1024 * 1024;
// The last event of the Responses API repeats the whole response, and has the token counts. Every
// event of Gemini has them, beside content such as an image.
const MAX_COUNTED_LINE_BYTES: usize = MAX_JSON_BYTES;
// Rough estimate for English text, for complete responses without a count, and for what is known of
// a response that was not read to its end.
const BYTES_PER_TOKEN: u64 = 4;
// An estimate of the input is no more than a usual context window: a request may contain images.
const MAX_ESTIMATED_INPUT: u64 = 200_000;
// Far above any model's context window. An upstream may claim any number, and sums must not
// overflow.
const MAX_CALL_TOKENS: u64 = 100_000_000;

/// The tokens that count for one call: each claimed number up to a bound.
pub(crate) fn bounded(claimed: Used) -> Used {
    match claimed {
        Used::Counted(usage) => Used::Counted(bounded_usage(usage)),
        Used::AtLeast(usage) => Used::AtLeast(bounded_usage(usage)),
    }
}

fn bounded_usage(claimed: Usage) -> Usage {
    Usage {
        input_tokens: claimed.input_tokens.min(MAX_CALL_TOKENS),
        output_tokens: claimed.output_tokens.min(MAX_CALL_TOKENS),
        cache_read_tokens: claimed.cache_read_tokens.min(MAX_CALL_TOKENS),
        cache_write_tokens: claimed.cache_write_tokens.min(MAX_CALL_TOKENS),
    }
}

/// Reads a response.
#[derive(Debug)]
pub(crate) struct Meter {
    endpoint: Endpoint,
    request_bytes: u64,
    body: MeteredBody,
}

#[derive(Debug)]
enum MeteredBody {
    Events(Events),
    Json(JsonBody),
}

#[derive(Debug, Default)]
struct JsonBody {
    /// The whole body; empty when it is too long.
    kept: Vec<u8>,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Events {
    line: Vec<u8>,
    skipping: bool,
    counts: anthropic::Counts,
    tally: Tally,
}

/// What a stream has said so far.
#[derive(Debug, Default)]
struct Tally {
    usage: Usage,
    /// Whether the usage is final.
    closed: bool,
    content_bytes: u64,
}

impl Tally {
    fn close(&mut self, usage: Usage) {
        (self.usage, self.closed) = (usage, true);
    }
}

impl Meter {
    pub(crate) fn new(endpoint: Endpoint, content_type: &str, request_bytes: usize) -> Self {
        let body = match content_type.starts_with("text/event-stream") {
            true => MeteredBody::Events(Events::default()),
            false => MeteredBody::Json(JsonBody::default()),
        };
        Self { endpoint, request_bytes: request_bytes as u64, body }
    }

    /// Reads more of the response.
    pub(crate) fn observe(&mut self, bytes: &[u8]) {
        match &mut self.body {
            MeteredBody::Events(events) => events.observe(self.endpoint, bytes),
            MeteredBody::Json(json) => {
                json.bytes += bytes.len() as u64;
                match json.bytes <= MAX_JSON_BYTES as u64 {
                    true => json.kept.extend_from_slice(bytes),
                    false => json.kept = Vec::new(),
                }
            }
        }
    }

    /// Whether a stream has said all its counts.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(&self.body, MeteredBody::Events(Events { tally, .. }) if tally.closed)
    }

    /// The tokens of a response, which was read to its end or not.
    pub(crate) fn used(&self, complete: bool) -> Used {
        if !self.endpoint.uses_tokens() {
            return Used::Counted(Usage::default());
        }
        let (counted, estimated) = match &self.body {
            MeteredBody::Events(Events { tally, .. }) => (
                tally.closed.then_some(tally.usage),
                self.estimated(tally.usage, tally.content_bytes),
            ),
            MeteredBody::Json(JsonBody { kept, bytes }) => {
                (self.counted(kept), self.estimated(Usage::default(), *bytes))
            }
        };
        match counted {
            Some(counted) => Used::Counted(counted),
            None if complete => Used::Counted(estimated),
            None => Used::AtLeast(estimated),
        }
    }

    fn counted(&self, json: &[u8]) -> Option<Usage> {
        match self.endpoint {
            Endpoint::Messages => anthropic::json(json),
            Endpoint::Responses => openai::responses_json(json),
            Endpoint::Chat => openai::chat_json(json),
            Endpoint::Gemini => gemini::json(json),
            _ => None,
        }
    }

    fn estimated(&self, known: Usage, content_bytes: u64) -> Usage {
        let mut usage = known;
        usage.output_tokens = usage.output_tokens.max(content_bytes.div_ceil(BYTES_PER_TOKEN));
        // Only Anthropic counts the input at the beginning of a stream.
        if known == Usage::default() {
            let input = self.request_bytes.div_ceil(BYTES_PER_TOKEN);
            usage.input_tokens = input.min(MAX_ESTIMATED_INPUT);
        }
        usage
    }
}

impl Events {
    fn observe(&mut self, endpoint: Endpoint, bytes: &[u8]) {
        let max = match endpoint {
            Endpoint::Responses | Endpoint::Gemini => MAX_COUNTED_LINE_BYTES,
            _ => MAX_LINE_BYTES,
        };
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            if !self.skipping {
                self.line.extend_from_slice(piece);
            }
            if self.line.len() > max {
                self.tally.content_bytes += self.line.len() as u64;
                (self.skipping, self.line) = (true, Vec::new());
            }
            if piece.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.skipping = false;
                self.end_of_line(endpoint, &line);
            }
        }
    }

    fn end_of_line(&mut self, endpoint: Endpoint, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else { return };
        match endpoint {
            Endpoint::Messages => anthropic::event(data, &mut self.counts, &mut self.tally),
            Endpoint::Responses => openai::responses_event(data, &mut self.tally),
            Endpoint::Chat => openai::chat_event(data, &mut self.tally),
            Endpoint::Gemini => gemini::event(data, &mut self.tally),
            _ => {}
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

    const RESPONSES: &str = "event: response.created\n\
        data: {\"type\":\"response.created\",\"response\":{\"id\":\"r\",\"usage\":null}}\n\n\
        data: {\"type\":\"response.output_text.delta\",\"delta\":\"hello there, you\"}\n\n\
        data: {\"type\":\"response.function_call_arguments.delta\",\"delta\":\"{}\"}\n\n\
        data: {\"type\":\"response.completed\",\"response\":{\"output\":[],\"usage\":{\"input_tokens\":20,\"input_tokens_details\":{\"cached_tokens\":5,\"cache_write_tokens\":3},\"output_tokens\":42,\"total_tokens\":62}}}\n\n";

    const CHAT: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"hello there, you\"}}],\"usage\":null}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{}\"}}]}}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"prompt_tokens_details\":{\"cached_tokens\":5,\"cache_write_tokens\":3},\"completion_tokens\":42}}\n\n\
        data: [DONE]\n\n";

    fn meter_of(endpoint: Endpoint, stream: &str) -> Meter {
        let mut meter = Meter::new(endpoint, "text/event-stream; charset=utf-8", 400);
        meter.observe(stream.as_bytes());
        meter
    }

    /// Of a complete response.
    fn usage_of(meter: &Meter) -> Usage {
        match meter.used(true) {
            Used::Counted(usage) => usage,
            unknown @ Used::AtLeast(_) => panic!("{unknown:?}"),
        }
    }

    fn meter(stream: &str) -> Meter {
        meter_of(Endpoint::Messages, stream)
    }

    const OPENAI: [(Endpoint, &str); 2] =
        [(Endpoint::Responses, RESPONSES), (Endpoint::Chat, CHAT)];

    #[test]
    fn openai_input_excludes_tokens_of_cache() {
        let expected = Usage {
            input_tokens: 12,
            output_tokens: 42,
            cache_read_tokens: 5,
            cache_write_tokens: 3,
        };
        for (endpoint, stream) in OPENAI {
            assert_eq!(usage_of(&meter_of(endpoint, stream)), expected, "{endpoint:?}");
            // The last event with token counts, as a response that is not streamed.
            let last = stream.lines().rfind(|line| line.contains("42")).unwrap();
            let json = last.trim_start_matches("data: ");
            let json: serde_json::Value = serde_json::from_str(json).unwrap();
            let json = json.get("response").unwrap_or(&json).to_string();
            let mut meter = Meter::new(endpoint, "application/json", 400);
            meter.observe(json.as_bytes());
            assert_eq!(usage_of(&meter), expected, "{endpoint:?}");
        }
    }

    const GEMINI: &str = "data: {\"candidates\":[{\"content\":{\"parts\":[{\"text\":\"hello there, you\"}]}}],\"usageMetadata\":{\"promptTokenCount\":20}}\n\n\
        data: {\"candidates\":[{\"content\":{\"parts\":[{\"functionCall\":{\"args\":{}}}]},\"finishReason\":\"STOP\"}],\"usageMetadata\":{\"promptTokenCount\":17,\"toolUsePromptTokenCount\":3,\"cachedContentTokenCount\":5,\"candidatesTokenCount\":40,\"thoughtsTokenCount\":2}}\n\n";

    #[test]
    fn gemini_counts_mean_the_same() {
        let counts = usage_of(&meter_of(Endpoint::Gemini, GEMINI));
        let (input_tokens, output_tokens, cache_read_tokens) = (15, 42, 5);
        let expected =
            Usage { input_tokens, output_tokens, cache_read_tokens, cache_write_tokens: 0 };
        assert_eq!(counts, expected);
        let json = GEMINI.lines().rfind(|line| line.contains("STOP")).unwrap();
        let mut meter = Meter::new(Endpoint::Gemini, "application/json", 400);
        meter.observe(json.trim_start_matches("data: ").as_bytes());
        assert_eq!(usage_of(&meter), expected);
        // Without the last event: the input as counted, 16 bytes of content.
        let cut =
            usage_of(&meter_of(Endpoint::Gemini, &GEMINI[..GEMINI.find("\n\n").unwrap() + 2]));
        assert_eq!((cut.input_tokens, cut.output_tokens), (20, 4));
    }

    #[test]
    fn truncated_openai_stream_is_estimated() {
        for (endpoint, stream) in OPENAI {
            let cut = stream.find("42").unwrap();
            let usage = usage_of(&meter_of(endpoint, &stream[..cut]));
            // 400 bytes of the request, 18 of content.
            assert_eq!((usage.input_tokens, usage.output_tokens), (100, 5), "{endpoint:?}");
        }
    }

    #[test]
    fn inconsistent_openai_counts_do_not_underflow() {
        let more = RESPONSES.replace("\"cached_tokens\":5", "\"cached_tokens\":500");
        let usage = usage_of(&meter_of(Endpoint::Responses, &more));
        assert_eq!((usage.input_tokens, usage.cache_read_tokens), (0, 500));
    }

    #[test]
    fn long_last_event_of_responses_is_counted() {
        let output = format!("\"output\":[\"{}\"]", "x".repeat(MAX_LINE_BYTES));
        let long = RESPONSES.replace("\"output\":[]", &output);
        assert_eq!(usage_of(&meter_of(Endpoint::Responses, &long)).output_tokens, 42);
    }

    #[test]
    fn long_event_of_gemini_is_counted() {
        let long =
            GEMINI.replace("\"args\":{}", &format!("\"args\":\"{}\"", "x".repeat(MAX_LINE_BYTES)));
        assert_eq!(usage_of(&meter_of(Endpoint::Gemini, &long)).output_tokens, 42);
    }

    #[test]
    fn stream_usage_combines_first_and_last_counts() {
        let expected = Usage {
            input_tokens: 10,
            output_tokens: 42,
            cache_read_tokens: 5,
            cache_write_tokens: 0,
        };
        assert_eq!(usage_of(&meter(STREAM)), expected);
    }

    #[test]
    fn truncated_stream_is_estimated() {
        let cut = STREAM.find("data: {\"type\":\"message_delta").unwrap();
        let usage = usage_of(&meter(&STREAM[..cut]));
        assert_eq!((usage.input_tokens, usage.output_tokens), (10, 4));
        assert_eq!(usage_of(&meter("")).input_tokens, 100);
    }

    #[test]
    fn json_response_is_counted_at_its_end() {
        let mut meter = Meter::new(Endpoint::Messages, "application/json", 400);
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
        assert_eq!(usage_of(&meter), expected);
    }

    #[test]
    fn unreadable_json_response_is_estimated() {
        let long = format!("{{\"a\":\"{}\",", "x".repeat(MAX_JSON_BYTES));
        // The end alone would parse.
        let end = r#"{"usage":{"input_tokens":1,"output_tokens":1,"prompt_tokens":1}}"#;
        for endpoint in [Endpoint::Messages, Endpoint::Responses, Endpoint::Chat] {
            for pieces in [&["no json!"][..], &["{}", "\t\t\t\t\t\t"], &[&long, end], &[]] {
                let mut meter = Meter::new(endpoint, "application/json", 400);
                pieces.iter().for_each(|piece| meter.observe(piece.as_bytes()));
                let bytes: usize = pieces.iter().map(|piece| piece.len()).sum();
                let output_tokens = bytes.div_ceil(4) as u64;
                let expected = Usage { input_tokens: 100, output_tokens, ..Usage::default() };
                assert_eq!(usage_of(&meter), expected, "{endpoint:?}: {bytes} bytes");
            }
        }
        let huge = Meter::new(Endpoint::Chat, "application/json", 32 * 1024 * 1024);
        assert_eq!(usage_of(&huge).input_tokens, MAX_ESTIMATED_INPUT);
        let free = Meter::new(Endpoint::Models, "application/json", 400);
        assert_eq!(usage_of(&free), Usage::default());
    }

    #[test]
    fn claimed_tokens_are_bounded_per_call() {
        let claim = STREAM.replace("\"output_tokens\":42", "\"output_tokens\":9223372036854775807");
        let usage = bounded_usage(usage_of(&meter(&claim)));
        assert_eq!((usage.input_tokens, usage.output_tokens), (10, MAX_CALL_TOKENS));
    }

    #[test]
    fn endless_line_is_not_buffered() {
        let mut meter = meter("");
        (0..64).for_each(|_| meter.observe(&[b'x'; 64 * 1024]));
        let MeteredBody::Events(events) = &meter.body else { unreachable!() };
        assert!(events.line.len() <= MAX_LINE_BYTES);
        meter.observe(format!("\n{STREAM}").as_bytes());
        assert_eq!(usage_of(&meter).output_tokens, 42);
    }

    proptest! {
        #[test]
        fn chunking_does_not_change_usage(cuts in prop::collection::vec(1usize..40, 1..60)) {
            let others = [(Endpoint::Messages, STREAM), (Endpoint::Gemini, GEMINI)];
            for (endpoint, stream) in OPENAI.into_iter().chain(others) {
                let (mut whole, mut rest) = (meter_of(endpoint, ""), stream.as_bytes());
                for cut in cuts.iter().cycle() {
                    let (piece, more) = rest.split_at((*cut).min(rest.len()));
                    whole.observe(piece);
                    rest = more;
                    if rest.is_empty() { break; }
                }
                prop_assert_eq!(usage_of(&whole), usage_of(&meter_of(endpoint, stream)));
            }
        }
    }
}
