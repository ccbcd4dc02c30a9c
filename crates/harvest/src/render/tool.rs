//! A tool call on one line: its name, its most telling argument and what came of it. Pure.
//!
//! The kind of a tool decides, never its name: each agent has its own names.

use harvest_proto::{event::ToolKind, json};
use serde_json::Value;

use super::first_line;
use crate::{printer::count, sanitize::sanitize_line};

// A few milliseconds.
const MAX_COMPARISONS: usize = 1000 * 1000;

/// A tool's name and its most telling argument.
pub(super) fn title(name: &str, input: &Value) -> String {
    let known = [
        "command",
        "file_path",
        "filePath",
        "path",
        "pattern",
        "url",
        "query",
        "description",
        "prompt",
    ];
    let argument = known.iter().find_map(|key| input.get(key)?.as_str()).map(first_line);
    match argument {
        Some(argument) => sanitize_line(&format!("{name} {argument}")),
        None => sanitize_line(name),
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ResultSummary {
    Shell,
    Read,
    Search,
    /// Lines that an edit adds and removes.
    Edit {
        added: usize,
        removed: usize,
    },
    /// Lines of a file that is written whole.
    Write {
        lines: usize,
    },
    /// An edit or a write whose arguments were cut.
    CutChange,
    Todos,
    Other,
}

impl ResultSummary {
    /// `cut` is whether the arguments are incomplete.
    pub(super) fn of(kind: ToolKind, input: &Value, cut: bool) -> Self {
        match kind {
            ToolKind::Execute => Self::Shell,
            ToolKind::Edit if cut => Self::CutChange,
            ToolKind::Edit => Self::of_change(input),
            ToolKind::Read => Self::Read,
            ToolKind::Search => Self::Search,
            ToolKind::Think if input.get("todos").is_some() => Self::Todos,
            ToolKind::Fetch | ToolKind::Think | ToolKind::Other => Self::Other,
        }
    }

    fn of_change(input: &Value) -> Self {
        let whole = std::slice::from_ref(input);
        let edits = input.get("edits").and_then(Value::as_array).map_or(whole, Vec::as_slice);
        let counts: Vec<_> = edits.iter().filter_map(edit_counts).collect();
        match input.get("content").and_then(Value::as_str) {
            Some(content) => Self::Write { lines: content.lines().count() },
            None if counts.is_empty() => Self::Other,
            None => {
                let (added, removed) =
                    counts.iter().fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
                Self::Edit { added, removed }
            }
        }
    }

    /// What a reader wants to know of the result; `output` is sanitized.
    pub(super) fn result(&self, ok: bool, output: &str) -> Option<String> {
        let output = without_tags(output);
        let first = || output.lines().map(str::trim).find(|line| !line.is_empty());
        match self {
            Self::Shell => shell_result(&output),
            _ if !ok => first().map(str::to_owned),
            Self::Edit { added, removed } => Some(format!("+{added} −{removed}")),
            Self::Write { lines } => Some(format!("+{lines}")),
            Self::Read => read_result(&output),
            Self::Search => match first() {
                Some(line) if line.starts_with("Found ") || line.starts_with("No ") => {
                    Some(line.to_owned())
                }
                _ => Some(lines_text(output.lines().count())),
            },
            Self::CutChange | Self::Todos => None,
            Self::Other => json_result(&output).or_else(|| last_line(&output).map(str::to_owned)),
        }
    }
}

/// The lines that an edit adds and removes.
fn edit_counts(edit: &Value) -> Option<(usize, usize)> {
    let text = |keys: [&str; 2]| keys.iter().find_map(|key| edit.get(key)?.as_str());
    let old: Vec<&str> = text(["old_string", "oldString"])?.lines().collect();
    let new: Vec<&str> = text(["new_string", "newString"])?.lines().collect();
    let common = common_lines(&old, &new);
    Some((new.len() - common, old.len() - common))
}

/// The length of the longest common subsequence; 0 for texts too long to compare, which an agent
/// can write faster than this reads them.
fn common_lines(old: &[&str], new: &[&str]) -> usize {
    if old.len().saturating_mul(new.len()) > MAX_COMPARISONS {
        return 0;
    }
    let mut row = vec![0; new.len() + 1];
    for line in old {
        let mut diagonal = 0;
        for (column, other) in new.iter().enumerate() {
            let above = row[column + 1];
            row[column + 1] = if line == other { diagonal + 1 } else { above.max(row[column]) };
            diagonal = above;
        }
    }
    row[new.len()]
}

/// The last line, after the exit code unless it is 0.
fn shell_result(output: &str) -> Option<String> {
    let is_code = |line: &&str| exit_code(line).is_some();
    let exit = output.lines().map(str::trim).find(is_code).and_then(exit_code);
    let rest: Vec<&str> = output.lines().map(str::trim).filter(|line| !is_code(line)).collect();
    // Claude Code puts a long output into a file and quotes only its beginning.
    let too_large = rest.iter().find(|line| line.starts_with("Output too large ("));
    let last = match too_large {
        Some(line) => line.split_once(')').map(|(head, _)| format!("{head})")),
        None => rest.iter().rfind(|line| !line.is_empty()).map(|line| (*line).to_owned()),
    };
    match (exit, last) {
        (Some(exit), Some(last)) => Some(format!("{exit}: {last}")),
        (exit, last) => exit.or(last),
    }
}

/// `exit 1` for the lines with which the agents report it: `Exit code 1`, `(exit code 1)`.
fn exit_code(line: &str) -> Option<String> {
    let line = line.strip_prefix('(').and_then(|line| line.strip_suffix(')')).unwrap_or(line);
    let exit = line.strip_prefix("Exit code ").or_else(|| line.strip_prefix("exit code "));
    let (word, number) = match exit {
        Some(code) => ("exit", code),
        None => ("signal", line.strip_prefix("signal ")?),
    };
    number.parse::<u8>().ok().map(|number| format!("{word} {number}"))
}

/// The number of lines: of numbered ones by their numbers, since the middle may have been cut.
fn read_result(output: &str) -> Option<String> {
    let number = |line: &str| {
        let (number, _) = line.trim_start().split_once(['\t', '→'])?;
        number.parse::<usize>().ok()
    };
    let mut numbers = output.lines().filter_map(number);
    match (numbers.next(), output.trim()) {
        (Some(first), _) => {
            let last = numbers.next_back().unwrap_or(first);
            Some(lines_text(last.saturating_sub(first) + 1))
        }
        (None, "") => None,
        (None, text) if text.starts_with('[') && !text.contains('\n') => Some(text.to_owned()),
        (None, _) => Some(lines_text(output.lines().count())),
    }
}

fn lines_text(lines: usize) -> String {
    count(lines as u64, "line")
}

/// The last line that says something: not the closing brackets of cut JSON.
fn last_line(output: &str) -> Option<&str> {
    let lines = || output.lines().map(str::trim);
    let says = |line: &&str| line.contains(char::is_alphanumeric);
    lines().rfind(says).or_else(|| lines().rfind(|line| !line.is_empty()))
}

/// JSON of several lines on one line; of a list, its length.
fn json_result(output: &str) -> Option<String> {
    if output.trim().lines().count() < 2 {
        return None;
    }
    let value = match json::from_slice::<Value>(output.as_bytes()).ok()? {
        Value::Array(items) if items.len() == 1 => items.into_iter().next()?,
        value => value,
    };
    match value {
        Value::Array(items) => Some(count(items.len() as u64, "item")),
        Value::Object(_) => Some(value.to_string()),
        _ => None,
    }
}

/// Removes the reminders that Claude Code adds for itself, and the tags around its own messages.
fn without_tags(output: &str) -> String {
    const REMINDER: (&str, &str) = ("<system-reminder>", "</system-reminder>");
    let mut text = output.to_owned();
    while let Some(start) = text.find(REMINDER.0) {
        let end = text[start..].find(REMINDER.1).map(|end| start + end + REMINDER.1.len());
        text.replace_range(start..end.unwrap_or(text.len()), "");
    }
    for tag in ["tool_use_error", "persisted-output"] {
        text = text.replace(&format!("<{tag}>"), "").replace(&format!("</{tag}>"), "");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn result(kind: ToolKind, input: Value, ok: bool, output: &str) -> String {
        ResultSummary::of(kind, &input, false).result(ok, output).unwrap_or_default()
    }

    #[test]
    fn edit_tells_added_and_removed_lines() {
        let output = "The file /workspace/calc/calc.py has been updated successfully. (file state \
                      is current in your context — no need to Read it back)";
        let edit = |old: &str, new: &str| {
            let input = json!({"file_path": "calc.py", "old_string": old, "new_string": new});
            result(ToolKind::Edit, input, true, output)
        };
        assert_eq!(edit("    return a - b", "    return a + b"), "+1 −1");
        assert_eq!(edit("a\nb\nc\nd", "a\nB\nc\nd\ne"), "+2 −1");
        assert_eq!(edit("a\nb", ""), "+0 −2");
        let (old, new) = ("a\n".repeat(1000), "a\n".repeat(1001));
        assert_eq!(edit(&old, &old), "+0 −0");
        assert_eq!(edit(&old, &new), "+1001 −1000", "too long to compare");
        let two =
            json!([{"old_string": "a", "new_string": "b"}, {"old_string": "", "new_string": "c"}]);
        assert_eq!(
            result(ToolKind::Edit, json!({"file_path": "x", "edits": two}), true, output),
            "+2 −1"
        );
        let cut = json!({"file_path": "x", "old_string": "a…", "new_string": "b"});
        assert_eq!(ResultSummary::of(ToolKind::Edit, &cut, true).result(true, output), None);
    }

    #[test]
    fn kind_decides_whatever_the_tool_is_called() {
        let input = json!({"filePath": "a", "oldString": "x", "newString": "y\nz"});
        assert_eq!(title("edit", &input), "edit a");
        assert_eq!(result(ToolKind::Edit, input.clone(), true, "done"), "+2 −1");
        assert_eq!(result(ToolKind::Other, input, true, "done"), "done");
        assert_eq!(result(ToolKind::Edit, json!({"patch": "…"}), true, "Success"), "Success");
    }

    #[test]
    fn write_tells_its_lines() {
        let input = json!({"file_path": "a.txt", "content": "one\ntwo\n"});
        let output = "File created successfully at: a.txt";
        assert_eq!(result(ToolKind::Edit, input, true, output), "+2");
    }

    #[test]
    fn failed_edit_tells_why() {
        let input = json!({"file_path": "a", "old_string": "x", "new_string": "y"});
        let output =
            "<tool_use_error>String to replace not found in file.\nString: x</tool_use_error>";
        assert_eq!(
            result(ToolKind::Edit, input, false, output),
            "String to replace not found in file."
        );
    }

    #[test]
    fn shell_tells_last_line_and_failed_exit() {
        let shell = |ok, output| result(ToolKind::Execute, json!({"command": "make"}), ok, output);
        assert_eq!(shell(true, "a\n2 passed\n\n"), "2 passed");
        assert_eq!(shell(true, ""), "");
        assert_eq!(shell(false, "Exit code 2\nmake: *** No rule"), "exit 2: make: *** No rule");
        assert_eq!(
            shell(false, "FAILED (failures=1)\n\n(exit code 1)"),
            "exit 1: FAILED (failures=1)"
        );
        assert_eq!(shell(false, "(signal 9)"), "signal 9");
    }

    #[test]
    fn long_shell_output_tells_its_size() {
        let output = "<persisted-output>\nOutput too large (36.2KB). Full output saved to: /x/y.txt\n\n\
                      Preview (first 2KB):\n1\n2\n...\n</persisted-output>";
        assert_eq!(
            result(ToolKind::Execute, json!({"command": "seq 9999"}), true, output),
            "Output too large (36.2KB)"
        );
    }

    #[test]
    fn read_tells_number_of_lines() {
        let read = |output| result(ToolKind::Read, json!({"file_path": "a"}), true, output);
        assert_eq!(read("     1→one\n     2→\n    12→"), "12 lines");
        assert_eq!(read("5\tone\n… 900 bytes left out …\n9\ttwo\n"), "5 lines");
        assert_eq!(read("1\tone\n\n<system-reminder>\nbe careful\n</system-reminder>\n"), "1 line");
        assert_eq!(read("plain\ntext\n"), "2 lines");
        assert_eq!(read("[image]"), "[image]");
        assert_eq!(read("<system-reminder>the file is empty"), "");
    }

    #[test]
    fn json_tells_its_content_not_its_brackets() {
        let other = |output| result(ToolKind::Other, json!({}), true, output);
        assert_eq!(other("[\n  {\n    \"number\": 7\n  }\n]"), r#"{"number":7}"#);
        assert_eq!(
            other("{\n  \"failed\": 0,\n  \"passed\": 3\n}\n"),
            r#"{"failed":0,"passed":3}"#
        );
        assert_eq!(other("[\n  1,\n  2\n]"), "2 items");
        assert_eq!(other("… left out …\n    \"url\": \"x\"\n  }\n]"), "\"url\": \"x\"");
        assert_eq!(other("a\n---"), "a");
        let private = "[{\"$serde_json::private::RawValue\":\n\"{\\\"a\\\":1}\"}]";
        assert_ne!(other(private), r#"{"a":1}"#, "JSON in a string is not parsed");
        assert_eq!(other("]"), "]");
    }

    #[test]
    fn search_tells_what_was_found() {
        let search =
            |output| result(ToolKind::Search, json!({"pattern": "x", "path": "src"}), true, output);
        assert_eq!(search("Found 3 files\na\nb\nc"), "Found 3 files");
        assert_eq!(search("No files found"), "No files found");
        assert_eq!(search("a.rs:1:x\nb.rs:2:x"), "2 lines");
    }

    #[test]
    fn other_tools_tell_their_last_line() {
        assert_eq!(result(ToolKind::Fetch, json!({"url": "https://x"}), true, "a\nb\n"), "b");
        assert_eq!(
            result(ToolKind::Think, json!({"todos": []}), true, "Todos have been modified"),
            ""
        );
    }
}
