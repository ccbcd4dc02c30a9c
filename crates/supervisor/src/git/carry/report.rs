//! What a job says to pid 1: one fact per line, after a line that begins the report. Lines are
//! short, because pid 1 keeps only the last ones of a program's output.

use std::collections::VecDeque;

use harvest_proto::event::CommittedWork;
use serde::{Deserialize, Serialize};

/// The line before the facts. Filters of the repository may print lines before it.
const BEGIN: &str = "harvest-report";

// A line has at most 512 bytes, with the name of the fact.
const MAX_JSON_BYTES: usize = 440;

/// The most names in a list; there are three lists of names in 40 lines.
pub(super) const MAX_NAMES: usize = 6;

/// A fact.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Fact {
    Branch(String),
    Before(String),
    After(String),
    Base(String),
    Snapshot(String),
    Files(u32),
    LeftOut(String),
    Ignored(String),
    Checkpoint(String),
    Conflict(String),
    Commit(String),
    /// Part of the error; they follow each other.
    Error(String),
    Next(String),
    /// The history that a shallow clone lacks is needed.
    NeedsHistory,
    /// An interrupted rebase was undone.
    Undone,
    /// This commit is to be pushed.
    Push(String),
}

/// Prints the facts.
pub(super) fn print(facts: &[Fact]) {
    // On a line of its own, whatever the repository's filters have printed.
    println!("\n{BEGIN}");
    for line in facts.iter().filter_map(|fact| serde_json::to_string(fact).ok()) {
        println!("{line}");
    }
}

/// A text in pieces that fit into a line; the end of a long one is left out.
pub(super) fn pieces(text: &str) -> Vec<String> {
    let (mut pieces, mut rest) = (Vec::new(), text);
    while !rest.is_empty() && pieces.len() < MAX_NAMES {
        let (piece, after) = rest.split_at(fitting(rest));
        pieces.push(piece.to_owned());
        rest = after;
    }
    pieces
}

/// The beginning of a text, as much as fits into a line.
pub(super) fn short(text: &str) -> String {
    let end = fitting(text);
    if end == text.len() { text.to_owned() } else { format!("{}…", &text[..end]) }
}

// How many bytes of the text fit into a line as JSON.
fn fitting(text: &str) -> usize {
    let mut json = 0;
    for (at, character) in text.char_indices() {
        json += match character {
            '"' | '\\' => 2,
            character if character.is_control() => 6,
            character => character.len_utf8(),
        };
        if json > MAX_JSON_BYTES {
            return at;
        }
    }
    text.len()
}

/// The facts of a report.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Report {
    pub(super) branch: Option<String>,
    pub(super) before: Option<String>,
    pub(super) after: Option<String>,
    pub(super) base: Option<String>,
    pub(super) work: CommittedWork,
    pub(super) checkpoint: Option<String>,
    pub(super) conflicts: Vec<String>,
    pub(super) commit: Option<String>,
    pub(super) error: Option<String>,
    pub(super) next: Option<String>,
    pub(super) needs_history: bool,
    pub(super) undone: bool,
    pub(super) push: Option<String>,
}

impl Report {
    /// Reads a report out of a program's output. Other lines are passed over.
    pub(super) fn parse(output: &str) -> Option<Self> {
        let mut lines: VecDeque<&str> = output.lines().collect();
        let begin = lines.iter().rposition(|line| *line == BEGIN)?;
        let mut report = Self::default();
        for line in lines.drain(begin..) {
            if let Ok(fact) = serde_json::from_str(line) {
                report.add(fact);
            }
        }
        Some(report)
    }

    fn add(&mut self, fact: Fact) {
        let push = |names: &mut Vec<String>, name| {
            if names.len() < MAX_NAMES {
                names.push(name);
            }
        };
        match fact {
            Fact::Branch(name) => self.branch = Some(name),
            Fact::Before(commit) => self.before = Some(commit),
            Fact::After(commit) => self.after = Some(commit),
            Fact::Base(commit) => self.base = Some(commit),
            Fact::Snapshot(commit) => self.work.snapshot = Some(commit),
            Fact::Files(count) => self.work.files = count,
            Fact::LeftOut(name) => push(&mut self.work.left_out, name),
            Fact::Ignored(name) => push(&mut self.work.ignored, name),
            Fact::Checkpoint(name) => self.checkpoint = Some(name),
            Fact::Conflict(name) => push(&mut self.conflicts, name),
            Fact::Commit(text) => self.commit = Some(text),
            Fact::Error(piece) => self.error.get_or_insert_default().push_str(&piece),
            Fact::Next(text) => self.next = Some(text),
            Fact::NeedsHistory => self.needs_history = true,
            Fact::Undone => self.undone = true,
            Fact::Push(commit) => self.push = Some(commit),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lines_before_the_report_are_passed_over() {
        let output = "{\"undone\":null}\nwarning: x\nharvest-report\n\"undone\"\nnoise\n\
                      {\"error\":\"a\"}\n{\"error\":\"b\"}";
        let report = Report::parse(output).unwrap();
        assert!(report.undone);
        assert_eq!(report.error.as_deref(), Some("ab"));
        assert_eq!(Report::parse("git: not found"), None);
    }

    proptest! {
        #[test]
        fn every_fact_fits_into_a_line(text in "\\PC*|[\\x00-\\x1f]*") {
            let line = serde_json::to_string(&Fact::Checkpoint(short(&text))).unwrap();
            prop_assert!(line.len() < 512, "{}", line.len());
            for piece in pieces(&text) {
                prop_assert!(serde_json::to_string(&Fact::Error(piece)).unwrap().len() < 512);
            }
        }
    }
}
