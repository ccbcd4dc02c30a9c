//! The lines that an agent writes, of bounded size.

use std::io;

use harvest_proto::json;
use tokio::net::unix::pipe;

use super::{dropped_line::MAX_HEAD_BYTES, stdin::Replies};
use crate::pipes::read_rest;

// A line carries at most one tool result; one with an image takes a few megabytes as text.
const MAX_LINE_BYTES: usize = 8 * 1024 * 1024;

// Parsed, they take some 50 MB of the supervisor's 256 MiB. A tool's result has some thousand.
const MAX_LINE_NODES: usize = 200_000;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum AgentLine {
    Complete(Vec<u8>),
    /// A line that is too large to be interpreted, and begins with `head`.
    Dropped {
        head: Vec<u8>,
        reason: &'static str,
    },
}

impl AgentLine {
    fn of(mut line: Vec<u8>) -> Self {
        if json::count_nodes(&line) <= MAX_LINE_NODES {
            return Self::Complete(line);
        }
        line.truncate(MAX_HEAD_BYTES);
        Self::Dropped { head: line, reason: "more than 200,000 values" }
    }
}

/// Splits the agent's output into lines of bounded length.
pub(super) struct LineReader {
    receiver: pipe::Receiver,
    buffer: Vec<u8>,
    searched: usize,
    /// The beginning of a line whose rest is skipped.
    skipping: Option<Vec<u8>>,
}

impl LineReader {
    pub(super) fn new(receiver: pipe::Receiver) -> Self {
        Self { receiver, buffer: Vec::new(), searched: 0, skipping: None }
    }

    pub(super) fn pop(&mut self) -> Option<AgentLine> {
        let end = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end.map(|end| self.searched + end) else {
            self.searched = self.buffer.len();
            if self.buffer.len() > MAX_LINE_BYTES {
                let mut head = std::mem::take(&mut self.buffer);
                head.truncate(MAX_HEAD_BYTES);
                head.shrink_to_fit();
                self.skipping.get_or_insert(head);
                self.searched = 0;
            }
            return None;
        };
        let rest = self.buffer.split_off(end + 1);
        let mut line = std::mem::replace(&mut self.buffer, rest);
        line.pop();
        self.searched = 0;
        Some(match self.skipping.take() {
            Some(head) => AgentLine::Dropped { head, reason: "longer than 8 MiB" },
            None => AgentLine::of(line),
        })
    }

    /// Reads once the agent has read its replies; false at the end of the output.
    /// Cancel-safe.
    pub(super) async fn fill_after(&mut self, replies: &Replies) -> bool {
        replies.wait_for_space().await;
        self.fill().await
    }

    // False at the end of the output. Cancel-safe.
    async fn fill(&mut self) -> bool {
        if self.receiver.readable().await.is_err() {
            return false;
        }
        let mut chunk = [0u8; 8192];
        match self.receiver.try_read(&mut chunk) {
            Ok(0) => false,
            Ok(count) => {
                self.buffer.extend_from_slice(&chunk[..count]);
                true
            }
            Err(error) => error.kind() == io::ErrorKind::WouldBlock,
        }
    }

    pub(super) fn drain(&mut self) {
        read_rest(&self.receiver, |bytes| self.buffer.extend_from_slice(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_of_too_many_values_is_dropped() {
        let line = |objects: usize| {
            let list = "{\"\":0},".repeat(objects);
            format!("{{\"id\":1,\"result\":[{list}0]}}").into_bytes()
        };
        assert_eq!(AgentLine::of(line(1000)), AgentLine::Complete(line(1000)));
        let AgentLine::Dropped { head, reason } = AgentLine::of(line(1_000_000)) else {
            panic!("the supervisor would need 700 MB")
        };
        assert!(head.starts_with(b"{\"id\":1,") && head.len() == MAX_HEAD_BYTES);
        assert!(reason.contains("200,000 values"), "{reason}");
        let text = AgentLine::of(format!("\"{}\"", "[,".repeat(1_000_000)).into_bytes());
        assert!(matches!(text, AgentLine::Complete(_)), "text is no list");
    }
}
