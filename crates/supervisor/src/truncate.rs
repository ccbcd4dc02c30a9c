//! Truncates long texts and JSON values: keeps the head and the tail with a note about the gap.

use serde_json::Value;

/// The longest text an event carries.
pub(crate) const MAX_TEXT_BYTES: usize = 64 * 1024;

/// The longest id of a question; answers refer to it.
pub(crate) const MAX_NAME_BYTES: usize = 1024;

// Limit of each string in a long tool input: two dozen of them still fit into one event.
const MAX_INNER_BYTES: usize = 2 * 1024;

// Parsers refuse JSON that is nested deeper than 128; an event is nested in frames and pages.
const MAX_DEPTH: usize = 32;

/// At most about `limit` bytes of `text`.
pub(crate) fn text(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let half = limit / 2;
    let head = &text[..text.floor_char_boundary(half)];
    let tail = &text[text.ceil_char_boundary(text.len() - half)..];
    let missing = text.len() - head.len() - tail.len();
    format!("{head}\n… {missing} bytes left out …\n{tail}")
}

/// The first `limit` bytes of `text`.
pub(crate) fn head(text: &str, limit: usize) -> &str {
    &text[..text.floor_char_boundary(limit)]
}

/// The first `limit` bytes, which may split the last character.
pub(crate) fn bytes(bytes: &[u8], limit: usize) -> &[u8] {
    &bytes[..bytes.len().min(limit)]
}

/// True for a value that [`value`] would change.
pub(crate) fn is_long(value: &Value, json: &str) -> bool {
    json.len() > MAX_TEXT_BYTES || is_deeper(value, MAX_DEPTH)
}

/// A value of at most about [`MAX_TEXT_BYTES`] as JSON; its structure is kept where possible. What
/// is nested too deep becomes text.
pub(crate) fn value(value: Value) -> Value {
    let value = if is_deeper(&value, MAX_DEPTH) { flatten(value, MAX_DEPTH) } else { value };
    if serde_json::to_string(&value).map_or(0, |json| json.len()) <= MAX_TEXT_BYTES {
        return value;
    }
    let shorter = shorten(value);
    let json = serde_json::to_string(&shorter).unwrap_or_default();
    if json.len() <= MAX_TEXT_BYTES { shorter } else { Value::String(text(&json, MAX_TEXT_BYTES)) }
}

fn is_deeper(value: &Value, levels: usize) -> bool {
    match value {
        Value::Array(items) => levels == 0 || items.iter().any(|item| is_deeper(item, levels - 1)),
        Value::Object(fields) => {
            levels == 0 || fields.values().any(|field| is_deeper(field, levels - 1))
        }
        _ => false,
    }
}

fn flatten(value: Value, levels: usize) -> Value {
    match value {
        Value::Array(_) | Value::Object(_) if levels == 0 => {
            Value::String(text(&value.to_string(), MAX_INNER_BYTES))
        }
        Value::Array(items) => {
            Value::Array(items.into_iter().map(|item| flatten(item, levels - 1)).collect())
        }
        Value::Object(fields) => {
            let flat = |(name, field)| (name, flatten(field, levels - 1));
            Value::Object(fields.into_iter().map(flat).collect())
        }
        other => other,
    }
}

fn shorten(value: Value) -> Value {
    match value {
        Value::String(long) => Value::String(text(&long, MAX_INNER_BYTES)),
        Value::Array(items) => Value::Array(items.into_iter().map(shorten).collect()),
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, field)| (name, shorten(field))).collect())
        }
        other => other,
    }
}

/// The length of a value as JSON.
pub(crate) fn json_len(value: &impl serde::Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // A value that cannot be serialised does not fit into a frame either.
    serde_json::to_writer(&mut count, value).map_or(usize::MAX, |()| count.0)
}

/// The last lines of a program's output, each of bounded length.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    lines: std::collections::VecDeque<String>,
    open: Vec<u8>,
}

impl Tail {
    const LINES: usize = 40;
    const LINE_BYTES: usize = 512;

    pub(crate) fn push(&mut self, bytes: &[u8]) {
        for byte in bytes {
            match byte {
                b'\n' | b'\r' => self.close(),
                byte if self.open.len() < Self::LINE_BYTES => self.open.push(*byte),
                _ => {}
            }
        }
    }

    fn close(&mut self) {
        if self.open.is_empty() {
            return;
        }
        self.lines.push_back(String::from_utf8_lossy(&self.open).into_owned());
        self.open.clear();
        if self.lines.len() > Self::LINES {
            self.lines.pop_front();
        }
    }

    pub(crate) fn text(&mut self) -> String {
        self.close();
        self.lines.make_contiguous().join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn tail_keeps_the_last_forty_lines() {
        let mut tail = Tail::default();
        for number in 0..100 {
            tail.push(format!("line {number}\n").as_bytes());
        }
        tail.push(b"last without end");
        let text = tail.text();
        assert!(text.starts_with("line 61\n") && text.ends_with("last without end"));
        assert_eq!(text.lines().count(), 40);
    }

    #[test]
    fn long_input_keeps_its_structure() {
        let short = value(serde_json::json!({"file_path": "/a", "content": "x".repeat(200_000)}));
        assert_eq!(short["file_path"], "/a");
        assert!(short["content"].as_str().unwrap().contains("bytes left out"));
    }

    fn nested(levels: usize) -> Value {
        (0..levels).fold(Value::from("core"), |inner, level| match level % 2 {
            0 => Value::Array(vec![inner]),
            _ => serde_json::json!({ "in": inner }),
        })
    }

    #[test]
    fn deep_input_becomes_text_at_the_limit() {
        assert_eq!(value(nested(MAX_DEPTH)), nested(MAX_DEPTH));
        for levels in [MAX_DEPTH + 1, 126, 1000] {
            let flat = value(nested(levels));
            assert!(!is_deeper(&flat, MAX_DEPTH), "{levels}");
            assert!(flat.to_string().contains("core"));
        }
    }

    proptest! {
        #[test]
        fn truncated_text_is_bounded_and_keeps_both_ends(long in ".{0,400}", limit in 8usize..100) {
            let short = text(&long, limit);
            prop_assert!(short.len() <= limit + 64);
            prop_assert_eq!(short.chars().next(), long.chars().next());
        }
    }
}
