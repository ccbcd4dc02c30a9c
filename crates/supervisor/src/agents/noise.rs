//! Lines of an agent that mean nothing to us: kept for whoever looks into them, but not without end.

use harvest_proto::EventBody;

use super::Signal;
use crate::cut;

/// As much as is kept of such a line.
pub(super) const MAX_RAW_BYTES: usize = 4 * 1024;

// A protocol that has grown brings a few such lines a turn. Whatever runs beside the agent can write
// to its output too, without end, and every event is stored for good.
const MAX_RAW_LINES: u32 = 100;

/// Counts such lines.
#[derive(Debug, Default)]
pub(super) struct Noise {
    /// Since the last prompt.
    lines: u32,
}

impl Noise {
    /// A prompt is about to be sent.
    pub(super) fn begin(&mut self) {
        self.lines = 0;
    }

    /// What to tell of this line.
    pub(super) fn hear(&mut self, line: &[u8]) -> Vec<Signal> {
        let line = String::from_utf8_lossy(cut::bytes(line, MAX_RAW_BYTES));
        if line.trim().is_empty() || self.lines > MAX_RAW_LINES {
            return Vec::new();
        }
        self.lines += 1;
        vec![Signal::Event(if self.lines > MAX_RAW_LINES {
            EventBody::Warning {
                message: "the agent says too much that has no meaning; more of it is left out"
                    .to_owned(),
            }
        } else {
            EventBody::AgentRaw { line: cut::head(&line, MAX_RAW_BYTES).to_owned() }
        })]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_without_meaning_is_cut_off_until_the_next_prompt() {
        let mut noise = Noise::default();
        let signals: Vec<Signal> = (0..1000).flat_map(|_| noise.hear(b"y")).collect();
        assert_eq!(signals.len(), 101);
        assert!(matches!(signals.last(), Some(Signal::Event(EventBody::Warning { .. }))));
        assert_eq!(noise.hear(b"y"), []);
        noise.begin();
        assert_eq!(noise.hear(b"y").len(), 1);
    }

    #[test]
    fn a_line_that_is_no_text_is_kept_short() {
        let signals = Noise::default().hear(&[0xff; 100_000]);
        let [Signal::Event(EventBody::AgentRaw { line })] = &signals[..] else {
            panic!("{signals:?}")
        };
        assert!(line.len() <= MAX_RAW_BYTES && line.starts_with('\u{fffd}'), "{}", line.len());
    }
}
