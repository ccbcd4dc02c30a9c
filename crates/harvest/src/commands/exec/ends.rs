//! The beginning and the end of a long output: what a document can hold of it. Pure.

use std::collections::VecDeque;

/// What is kept of either end.
const KEPT_BYTES: usize = 512 * 1024;

/// An output, or its two ends.
#[derive(Debug, Default)]
pub(super) struct Ends {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// What came between them.
    dropped: u64,
}

impl Ends {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        let room = (KEPT_BYTES - self.head.len()).min(bytes.len());
        let (first, rest) = bytes.split_at(room);
        self.head.extend_from_slice(first);
        self.tail.extend(rest);
        let over = self.tail.len().saturating_sub(KEPT_BYTES);
        self.tail.drain(..over);
        self.dropped += over as u64;
    }

    pub(super) fn is_truncated(&self) -> bool {
        self.dropped > 0
    }

    /// What is kept, with a line in the place of what is not. No letter is cut in two.
    pub(super) fn bytes(mut self) -> Vec<u8> {
        let tail = self.tail.make_contiguous();
        if self.dropped == 0 {
            self.head.extend_from_slice(tail);
            return self.head;
        }
        let begins = tail.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
        let ends = whole_letters(&self.head);
        let left_out = self.dropped + (self.head.len() - ends + begins) as u64;
        self.head.truncate(ends);
        self.head.extend_from_slice(format!("\n[… {left_out} bytes left out …]\n").as_bytes());
        self.head.extend_from_slice(&tail[begins..]);
        self.head
    }
}

/// How long `bytes` is without a letter at its end that is not whole.
fn whole_letters(bytes: &[u8]) -> usize {
    let from = bytes.len().saturating_sub(3);
    let Some(at) = bytes[from..].iter().rposition(|byte| *byte >= 0xc0) else { return bytes.len() };
    let wanted = match bytes[from + at] {
        0xf0.. => 4,
        0xe0.. => 3,
        _ => 2,
    };
    if bytes.len() - from - at < wanted { from + at } else { bytes.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_output_is_kept_as_it_is() {
        let mut ends = Ends::default();
        ends.push(&vec![b'a'; KEPT_BYTES]);
        ends.push(&vec![b'b'; KEPT_BYTES]);
        assert!(!ends.is_truncated());
        assert_eq!(ends.bytes().len(), 2 * KEPT_BYTES);
    }

    #[test]
    fn of_a_long_one_head_and_tail_stay_and_the_rest_is_counted() {
        let mut ends = Ends::default();
        ends.push(b"first");
        for _ in 0..40 {
            ends.push(&vec![b'x'; 64 * 1024]);
        }
        ends.push(b"last");
        assert!(ends.is_truncated());
        let text = String::from_utf8(ends.bytes()).unwrap();
        assert!(text.starts_with("first") && text.ends_with("last"), "both ends are there");
        let left_out = 40 * 64 * 1024 + 9 - 2 * KEPT_BYTES;
        assert!(text.contains(&format!("[… {left_out} bytes left out …]")), "{left_out}");
    }

    #[test]
    fn no_letter_is_cut_in_two() {
        for shift in 0..4 {
            let mut ends = Ends::default();
            ends.push(&vec![b'a'; shift]);
            ends.push("𝄞€é".repeat(300_000).as_bytes());
            assert!(String::from_utf8(ends.bytes()).is_ok(), "{shift}");
        }
    }
}
