//! Colours of the terminal. Decides whether text is styled at all: `NO_COLOR`, `TERM=dumb`,
//! `--json` and streams that are no terminal stay plain.
//!
//! Untrusted text is sanitized, and cells are padded, before they are styled: the sanitizer removes
//! every escape sequence, and widths count them.

use anstyle::{AnsiColor, Style};

/// Styles the text of one stream: in colour on a terminal, otherwise not at all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Palette {
    colors: bool,
}

impl Palette {
    /// `capable` is whether the stream is a terminal that interprets escape sequences.
    pub(crate) fn new(capable: bool, no_color: Option<&str>) -> Self {
        Self { colors: capable && no_color.is_none_or(str::is_empty) }
    }

    pub(crate) fn is_plain(self) -> bool {
        !self.colors
    }

    pub(crate) fn ok(self, text: &str) -> String {
        self.color(AnsiColor::Green, text)
    }

    pub(crate) fn fail(self, text: &str) -> String {
        self.color(AnsiColor::Red, text)
    }

    pub(crate) fn warn(self, text: &str) -> String {
        self.color(AnsiColor::Yellow, text)
    }

    pub(crate) fn info(self, text: &str) -> String {
        self.color(AnsiColor::Cyan, text)
    }

    pub(crate) fn bold(self, text: &str) -> String {
        self.paint(Style::new().bold(), text)
    }

    pub(crate) fn dim(self, text: &str) -> String {
        self.paint(Style::new().dimmed(), text)
    }

    /// The state or outcome of a session, turn, prompt, sandbox, check or pull request; padding
    /// around the word is kept.
    pub(crate) fn state(self, word: &str) -> String {
        match word.trim() {
            "running" | "starting" | "dispatched" | "open" => self.info(word),
            "idle" | "completed" | "passed" | "ready" | "merged" => self.ok(word),
            "needs_input" | "interrupted" | "queued" => self.warn(word),
            "failed" => self.fail(word),
            "paused" | "archived" | "stopped" | "cancelled" | "closed" => self.dim(word),
            _ => word.to_owned(),
        }
    }

    pub(crate) fn paint(self, style: Style, text: &str) -> String {
        match self.colors && !text.is_empty() {
            true => format!("{style}{text}{style:#}"),
            false => text.to_owned(),
        }
    }

    fn color(self, color: AnsiColor, text: &str) -> String {
        self.paint(color.on_default(), text)
    }
}

/// Whether a terminal of this type (`TERM`) interprets escape sequences.
pub(crate) fn is_capable(term: Option<&str>) -> bool {
    term.is_some_and(|term| !term.is_empty() && term != "dumb")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn palette(capable: bool, no_color: Option<&str>) -> Palette {
        Palette::new(capable, no_color)
    }

    #[test]
    fn only_capable_terminals_without_no_color_are_styled() {
        assert_eq!(palette(true, None).ok("✓"), "\x1b[32m✓\x1b[0m");
        assert_eq!(palette(true, Some("")).ok("✓"), "\x1b[32m✓\x1b[0m");
        assert_eq!(palette(true, Some("1")).ok("✓"), "✓");
        assert_eq!(palette(false, None).ok("✓"), "✓");
    }

    #[test]
    fn dumb_and_unknown_terminals_are_not_capable() {
        let capable = is_capable;
        assert!(capable(Some("xterm-256color")) && capable(Some("linux")));
        assert!(!capable(Some("dumb")) && !capable(Some("")) && !capable(None));
    }

    #[test]
    fn padded_states_are_styled() {
        let style = palette(true, None);
        assert_eq!(style.state("failed  "), "\x1b[31mfailed  \x1b[0m");
        assert_eq!(style.state("unknown"), "unknown");
    }
}
