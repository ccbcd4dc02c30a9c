//! Token counts of streamed Chat Completions: the API sends them only on request, in a chunk of
//! their own. The gateway requests them, and takes the chunk out again if the agent had not.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::{Deserialize, de::IgnoredAny};
use serde_json::value::{RawValue, to_raw_value};

// A longer line contains content, never token counts; it passes as it arrives.
const MAX_LINE_BYTES: usize = 256 * 1024;
const OPTIONS: &str = "stream_options";

type Fields = BTreeMap<String, Box<RawValue>>;

/// The request with a wish for token counts; `None` when it has one or is not for a stream.
pub(super) fn request_usage(body: &[u8]) -> Option<Bytes> {
    #[derive(Deserialize)]
    struct Wish {
        stream: Option<bool>,
        stream_options: Option<Options>,
    }
    #[derive(Deserialize)]
    struct Options {
        include_usage: Option<bool>,
    }
    let wish: Wish = serde_json::from_slice(body).ok()?;
    let included = wish.stream_options.as_ref().and_then(|options| options.include_usage);
    if wish.stream != Some(true) || included == Some(true) {
        return None;
    }
    let mut fields: Fields = serde_json::from_slice(body).ok()?;
    let given = fields.get(OPTIONS).filter(|_| wish.stream_options.is_some());
    let mut options: Fields = match given {
        Some(options) => serde_json::from_str(options.get()).ok()?,
        None => Fields::new(),
    };
    options.insert("include_usage".to_owned(), to_raw_value(&true).ok()?);
    fields.insert(OPTIONS.to_owned(), to_raw_value(&options).ok()?);
    serde_json::to_vec(&fields).ok().map(Bytes::from)
}

/// Removes the chunk with the token counts from a stream.
#[derive(Debug, Default)]
pub(super) struct UsageFilter {
    line: Vec<u8>,
    /// The rest of a long line passes.
    passing: bool,
    /// The empty line that ended a removed chunk is removed too.
    after_removed: bool,
}

impl UsageFilter {
    /// The part of the stream that can be sent on.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Bytes {
        let mut kept = Vec::with_capacity(bytes.len() + self.line.len());
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let complete = piece.ends_with(b"\n");
            if self.passing {
                kept.extend_from_slice(piece);
                self.passing = !complete;
                continue;
            }
            self.line.extend_from_slice(piece);
            if complete {
                let line = std::mem::take(&mut self.line);
                if self.keeps(&line) {
                    kept.extend_from_slice(&line);
                }
            } else if self.line.len() > MAX_LINE_BYTES {
                kept.append(&mut self.line);
                (self.passing, self.after_removed) = (true, false);
            }
        }
        kept.into()
    }

    /// What is left at the end of the stream.
    pub(super) fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.line).into()
    }

    fn keeps(&mut self, line: &[u8]) -> bool {
        if self.after_removed && matches!(line, b"\n" | b"\r\n") {
            self.after_removed = false;
            return false;
        }
        self.after_removed = is_usage_chunk(line);
        !self.after_removed
    }
}

fn is_usage_chunk(line: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<IgnoredAny>,
        usage: Option<IgnoredAny>,
    }
    let data = line.strip_prefix(b"data:");
    let chunk = data.and_then(|data| serde_json::from_slice::<Chunk>(data).ok());
    chunk.is_some_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    const CONTENT: &str =
        "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}],\"usage\":null}\n\n";
    const USAGE: &str = "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n";
    const DONE: &str = "data: [DONE]\n\n";

    #[test]
    fn streamed_requests_ask_for_usage() {
        let asked = |body: Value| {
            request_usage(body.to_string().as_bytes())
                .map(|body| serde_json::from_slice::<Value>(&body).unwrap())
        };
        let full = json!({"stream": true, "messages": [1.50, {"a": null}], "stream_options": {"include_usage": true}});
        for options in
            [None, Some(Value::Null), Some(json!({})), Some(json!({"include_usage": false}))]
        {
            let mut body = full.clone();
            match options {
                Some(options) => body["stream_options"] = options,
                None => drop(body.as_object_mut().unwrap().remove("stream_options")),
            }
            assert_eq!(asked(body), Some(full.clone()));
        }
        let other = json!({"stream": true, "stream_options": {"include_obfuscation": false}});
        assert_eq!(
            asked(other).unwrap()["stream_options"],
            json!({"include_obfuscation": false, "include_usage": true})
        );
        assert_eq!(asked(full), None);
        assert_eq!(asked(json!({"stream": false})), None);
        assert_eq!(asked(json!({"messages": []})), None);
    }

    #[test]
    fn long_line_passes_unbuffered() {
        let mut filter = UsageFilter::default();
        let long = format!("data: {}", "x".repeat(MAX_LINE_BYTES));
        assert_eq!(filter.push(long.as_bytes()).len(), long.len());
        assert_eq!(filter.push(format!("y\n\n{USAGE}{DONE}").as_bytes()), format!("y\n\n{DONE}"));
    }

    proptest! {
        #[test]
        fn only_usage_chunk_is_removed(cuts in prop::collection::vec(1usize..40, 1..60), crlf: bool) {
            let ends = |text: &str| if crlf { text.replace('\n', "\r\n") } else { text.to_owned() };
            let stream = ends(&format!(": ping\n\n{CONTENT}{CONTENT}{USAGE}{DONE}tail"));
            let (mut filter, mut rest, mut kept) = (UsageFilter::default(), stream.as_bytes(), Vec::new());
            for cut in cuts.iter().cycle() {
                let (piece, more) = rest.split_at((*cut).min(rest.len()));
                kept.extend_from_slice(&filter.push(piece));
                rest = more;
                if rest.is_empty() { break; }
            }
            kept.extend_from_slice(&filter.finish());
            let expected = ends(&format!(": ping\n\n{CONTENT}{CONTENT}{DONE}tail"));
            prop_assert_eq!(String::from_utf8(kept).unwrap(), expected);
        }
    }
}
