//! Keeps the first and last part of a long output, for JSON documents. Pure.

use std::collections::VecDeque;

/// Size of each part.
const KEPT_BYTES: usize = 512 * 1024;

#[derive(Debug, Default)]
pub(super) struct HeadTail {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// Number of bytes between head and tail.
    dropped: u64,
}

impl HeadTail {
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

    /// Head and tail, with a line in place of the dropped bytes. UTF-8 characters stay whole.
    pub(super) fn bytes(mut self) -> Vec<u8> {
        let tail = self.tail.make_contiguous();
        if self.dropped == 0 {
            self.head.extend_from_slice(tail);
            return self.head;
        }
        let skipped = tail.iter().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
        let ends = complete_utf8_len(&self.head);
        let omitted = self.dropped + (self.head.len() - ends + skipped) as u64;
        self.head.truncate(ends);
        self.head.extend_from_slice(format!("\n[… {omitted} bytes omitted …]\n").as_bytes());
        self.head.extend_from_slice(&tail[skipped..]);
        self.head
    }
}

/// The length of `bytes` without an incomplete UTF-8 character at the end.
fn complete_utf8_len(bytes: &[u8]) -> usize {
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
    fn short_output_is_unchanged() {
        let mut output = HeadTail::default();
        output.push(&vec![b'a'; KEPT_BYTES]);
        output.push(&vec![b'b'; KEPT_BYTES]);
        assert!(!output.is_truncated());
        assert_eq!(output.bytes().len(), 2 * KEPT_BYTES);
    }

    #[test]
    fn long_output_keeps_head_and_tail() {
        let mut output = HeadTail::default();
        output.push(b"first");
        for _ in 0..40 {
            output.push(&vec![b'x'; 64 * 1024]);
        }
        output.push(b"last");
        assert!(output.is_truncated());
        let text = String::from_utf8(output.bytes()).unwrap();
        assert!(text.starts_with("first") && text.ends_with("last"), "both ends are there");
        let omitted = 40 * 64 * 1024 + 9 - 2 * KEPT_BYTES;
        assert!(text.contains(&format!("[… {omitted} bytes omitted …]")), "{omitted}");
    }

    #[test]
    fn utf8_characters_stay_whole() {
        for shift in 0..4 {
            let mut output = HeadTail::default();
            output.push(&vec![b'a'; shift]);
            output.push("𝄞€é".repeat(300_000).as_bytes());
            assert!(String::from_utf8(output.bytes()).is_ok(), "{shift}");
        }
    }
}
