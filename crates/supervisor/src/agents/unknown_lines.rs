//! Limits the events for lines of an agent that cannot be interpreted.

use harvest_proto::EventBody;

use super::Signal;
use crate::truncate;

/// The length to which such a line is truncated.
pub(super) const MAX_RAW_BYTES: usize = 4 * 1024;

// A newer protocol version causes a few such lines per turn. But other processes can write to the
// agent's output without limit, and every event is stored.
const MAX_RAW_LINES: u32 = 100;

#[derive(Debug, Default)]
pub(super) struct UnknownLines {
    /// Since the last prompt.
    lines: u32,
}

impl UnknownLines {
    /// Called at the start of a prompt.
    pub(super) fn reset(&mut self) {
        self.lines = 0;
    }

    /// The events for this line.
    pub(super) fn record(&mut self, line: &[u8]) -> Vec<Signal> {
        let line = String::from_utf8_lossy(truncate::bytes(line, MAX_RAW_BYTES));
        if line.trim().is_empty() || self.lines > MAX_RAW_LINES {
            return Vec::new();
        }
        self.lines += 1;
        vec![Signal::Event(if self.lines > MAX_RAW_LINES {
            EventBody::Warning {
                message: "too many unknown lines from the agent; further ones are dropped"
                    .to_owned(),
            }
        } else {
            EventBody::AgentRaw { line: truncate::head(&line, MAX_RAW_BYTES).to_owned() }
        })]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_lines_are_limited_per_prompt() {
        let mut unknown = UnknownLines::default();
        let signals: Vec<Signal> = (0..1000).flat_map(|_| unknown.record(b"y")).collect();
        assert_eq!(signals.len(), 101);
        assert!(matches!(signals.last(), Some(Signal::Event(EventBody::Warning { .. }))));
        assert_eq!(unknown.record(b"y"), []);
        unknown.reset();
        assert_eq!(unknown.record(b"y").len(), 1);
    }

    #[test]
    fn binary_line_is_truncated() {
        let signals = UnknownLines::default().record(&[0xff; 100_000]);
        let [Signal::Event(EventBody::AgentRaw { line })] = &signals[..] else {
            panic!("{signals:?}")
        };
        assert!(line.len() <= MAX_RAW_BYTES && line.starts_with('\u{fffd}'), "{}", line.len());
    }
}
