//! Short texts and their limits, for all that is rendered.

use harvest_proto::{bridge::Exit, event::SnapshotKind};

use crate::sanitize::sanitize;

/// `exit 1`, `signal 9`, `out of memory`.
pub(crate) fn describe_exit(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exit {code}"),
        Exit::Signal(signal) => format!("signal {signal}"),
        Exit::Oom => "out of memory".into(),
        Exit::Timeout => "timed out".into(),
        Exit::Killed => "killed".into(),
    }
}

pub(super) fn describe_agent_exit(exit: Exit) -> String {
    match exit {
        Exit::Code(code) => format!("exited with code {code}"),
        Exit::Signal(signal) => format!("was killed by signal {signal}"),
        Exit::Oom => "ran out of memory".into(),
        Exit::Timeout => "timed out".into(),
        Exit::Killed => "was killed".into(),
    }
}

pub(crate) fn describe_snapshot_kind(kind: SnapshotKind) -> &'static str {
    match kind {
        SnapshotKind::Turn => "turn",
        SnapshotKind::Pause => "pause",
        SnapshotKind::Recovered => "recovered disk",
        SnapshotKind::Build => "build",
        SnapshotKind::Request => "requested",
        SnapshotKind::Check => "check",
    }
}

/// Splits text into lines and indents all but the first, so that untrusted text cannot imitate
/// Harvest's own lines.
pub(super) fn indent_continuation(text: &str) -> Vec<String> {
    let text = sanitize(text);
    let mut lines = text.lines();
    let first = lines.next().unwrap_or("").to_owned();
    std::iter::once(first).chain(lines.map(|line| format!("    {line}"))).collect()
}

pub(super) fn with_tail(line: String, tail: &str) -> Vec<String> {
    std::iter::once(line).chain(tail.lines().map(|line| format!("  | {line}"))).collect()
}

pub(crate) fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// The first seven characters of a commit.
pub(crate) fn short_commit(commit: &str) -> &str {
    commit.get(..7).unwrap_or(commit)
}

/// Truncates to `width` characters and an ellipsis.
pub(crate) fn truncate(text: &str, width: usize) -> String {
    match text.char_indices().nth(width) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
