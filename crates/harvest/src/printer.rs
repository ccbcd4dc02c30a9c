//! Prints results to stdout and everything else to stderr; errors with their causes and a hint.

use std::{
    borrow::Cow,
    error::Error,
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use anyhow::Result;
use harvest_engine::{EngineError, rootless::RootlessError};
use harvest_forge::ImportError;
use harvest_proto::{Hint, api::Problem};
use harvest_session::{SessionError, StoreError, sandboxes::SandboxError};
use serde::Serialize;

use crate::{
    cli::GlobalFlags,
    config::Env,
    confirm, live,
    sanitize::{sanitize, sanitize_json, sanitize_line},
    style::{self, Palette},
    table::{table, width},
};

/// Columns of the live line besides its text: the spinner and the longest usual clock.
const LIVE_MARGIN: usize = 12;

/// An error with a hint for the user.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Advice {
    message: String,
    hint: String,
    wrong_usage: bool,
}

impl Advice {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into(), wrong_usage: false }
    }

    /// An error in the arguments, which exits with 2 like those that clap finds.
    pub(crate) fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { wrong_usage: true, ..Self::new(message, hint) }
    }
}

impl Hint for Advice {
    fn hint(&self) -> Option<Cow<'_, str>> {
        Some(self.hint.as_str().into())
    }
}

/// The server refused a request.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.detail)]
pub(crate) struct ApiRefusal(pub(crate) Problem);

impl Hint for ApiRefusal {
    fn hint(&self) -> Option<Cow<'_, str>> {
        self.0.hint.as_deref().map(Cow::Borrowed)
    }
}

/// Prints according to the global flags. All text may be untrusted, so it is sanitized.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    pub(crate) json: bool,
    pub(crate) verbose: bool,
    quiet: bool,
    /// The styles of results.
    pub(crate) stdout: Palette,
    /// The styles of everything else.
    pub(crate) stderr: Palette,
    /// Whether stderr is a terminal with a cursor that can be moved.
    live: bool,
}

impl Printer {
    pub(crate) fn new(flags: &GlobalFlags, env: Env) -> Self {
        let capable = !flags.json && style::is_capable(env("TERM").as_deref());
        let stderr_capable = capable && io::stderr().is_terminal();
        let no_color = env("NO_COLOR");
        Self {
            json: flags.json,
            verbose: flags.verbose,
            quiet: flags.quiet,
            stdout: Palette::new(capable && io::stdout().is_terminal(), no_color.as_deref()),
            stderr: Palette::new(stderr_capable, no_color.as_deref()),
            live: stderr_capable && !flags.quiet,
        }
    }

    /// Prints a result as text.
    pub(crate) fn out(&self, text: &str) -> Result<()> {
        write_out(&sanitize(text))
    }

    /// Prints a result that was sanitized before it was styled.
    pub(crate) fn styled_out(&self, text: &str) -> Result<()> {
        write_out(text)
    }

    /// Prints a result unchanged, except to a terminal, where it is sanitized.
    pub(crate) fn verbatim(&self, text: &str) -> Result<()> {
        match io::stdout().is_terminal() {
            true => self.out(text),
            false => write_out(text),
        }
    }

    /// Prints a result as one JSON document, or as text.
    pub(crate) fn result<T: Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<()> {
        match self.json {
            true => write_out(&sanitize_json(serde_json::to_string_pretty(value)? + "\n")),
            false => self.out(&text(value)),
        }
    }

    /// Prints a JSON document with `--json`, otherwise nothing.
    pub(crate) fn document<T: Serialize>(&self, value: &T) -> Result<()> {
        self.result(value, |_| String::new())
    }

    /// Prints a list as JSON, or as a table with a row per item.
    pub(crate) fn list<T: Serialize, const N: usize>(
        &self,
        items: &[T],
        headings: [&str; N],
        row: impl FnMut(&T) -> [String; N],
    ) -> Result<()> {
        match self.json {
            true => self.document(&items),
            false => self.styled_out(&table(width(), self.stdout, headings, items.iter().map(row))),
        }
    }

    /// Prints one item of a stream as a line of JSON.
    pub(crate) fn item<T: Serialize>(&self, value: &T) -> Result<()> {
        write_out(&sanitize_json(serde_json::to_string(value)? + "\n"))
    }

    /// Prints a message to stderr.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        self.styled_note(&sanitize(text.as_ref()));
    }

    /// Prints a message that was sanitized before it was styled.
    pub(crate) fn styled_note(&self, text: &str) {
        self.write_stderr(format!("{text}\n"));
    }

    /// Prints a warning, also with `--json`.
    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        Self { json: false, ..*self }.marked(&self.stderr.warn("warning:"), text.as_ref());
    }

    /// Prints a message after a styled mark.
    fn marked(&self, mark: &str, text: &str) {
        self.styled_note(&format!("{mark} {}", sanitize(text)));
    }

    /// Prints a suggested next command.
    pub(crate) fn hint(&self, text: impl AsRef<str>) {
        self.marked(&self.stderr.info("hint:"), text.as_ref());
    }

    /// Prints a prompt for input, whatever the flags say and without a line end.
    pub(crate) fn prompt(&self, text: &str) {
        write_err(&sanitize(text));
    }

    /// Whether results may go through a pager: only if a user reads them on a terminal.
    pub(crate) fn pages(&self) -> bool {
        !self.json && self.live && io::stdout().is_terminal() && io::stdin().is_terminal()
    }

    /// Whether a user can be asked and reads what is printed.
    pub(crate) fn can_ask(&self) -> bool {
        confirm::can_ask() && !self.quiet && !self.json
    }

    /// Whether there is a live line: only on a terminal and without `--quiet`, `--json` and
    /// `--verbose`.
    pub(crate) fn is_live(&self) -> bool {
        self.live && !self.verbose
    }

    /// Shows on the live line what is going on. `elapsed` is the start value of its clock; without
    /// it there is none.
    pub(crate) fn live(&self, text: &str, elapsed: Option<Duration>) {
        if self.is_live() {
            let width = columns().saturating_sub(LIVE_MARGIN);
            let text: String = sanitize_line(text).chars().take(width).collect();
            live::show(&text, elapsed);
        }
    }

    /// Removes the live line.
    pub(crate) fn end_live(&self) {
        live::clear();
    }

    fn write_stderr(&self, text: String) {
        if !self.quiet && !self.json {
            write_err(&text);
        }
    }

    /// Prints an error with its causes and its hint, whatever the flags say; with `--json` as one
    /// line of JSON.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        live::clear();
        let text = match self.json {
            true => sanitize_json(format!("{}\n", error_document(error))),
            false => self.error_text(error),
        };
        write_err(&text);
    }

    fn error_text(&self, error: &anyhow::Error) -> String {
        let mut text = format!("{} {}\n", self.stderr.fail("error:"), sanitize(&error.to_string()));
        for cause in causes(error) {
            text += &format!("  cause: {}\n", sanitize(&cause));
        }
        if let Some(hint) = hint_of(error) {
            text += &format!("{} {}\n", self.stderr.info("hint:"), sanitize(&hint));
        }
        text
    }
}

#[derive(Debug, thiserror::Error)]
#[error("cannot print")]
struct StdoutError(#[source] io::Error);

fn write_out(text: &str) -> Result<()> {
    write_bytes(text.as_bytes())
}

/// Writes bytes to stdout unchanged.
pub(crate) fn write_bytes(bytes: &[u8]) -> Result<()> {
    Ok(live::suspend(|| {
        let mut out = io::stdout().lock();
        out.write_all(bytes).and_then(|()| out.flush()).map_err(StdoutError)
    })?)
}

fn write_err(text: &str) {
    // There is nowhere to report that stderr is closed.
    let _ = live::suspend(|| io::stderr().lock().write_all(text.as_bytes()));
}

/// The width of the terminal, or 100 without one.
pub(crate) fn columns() -> usize {
    let size =
        [rustix::termios::tcgetwinsize(io::stderr()), rustix::termios::tcgetwinsize(io::stdout())];
    let found = size
        .into_iter()
        .flatten()
        .map(|size| usize::from(size.ws_col))
        .find(|columns| *columns > 0);
    found.map_or(100, |columns| columns.max(40))
}

/// The causes of an error. Some libraries repeat the source in their own message.
fn causes(error: &anyhow::Error) -> Vec<String> {
    let mut last = error.to_string();
    let mut causes = Vec::new();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !last.contains(&cause) {
            causes.push(cause.clone());
            last = cause;
        }
    }
    causes
}

/// An error for programs; `code` is the API's, if the server refused the request.
fn error_document(error: &anyhow::Error) -> serde_json::Value {
    serde_json::json!({
        "error": error.to_string(),
        "causes": causes(error),
        "hint": hint_of(error),
        "code": error.downcast_ref::<ApiRefusal>().map(|refusal| &refusal.0.code),
    })
}

/// The outermost hint of an error.
pub(crate) fn hint_of(error: &anyhow::Error) -> Option<String> {
    // `downcast_ref` on the error itself also finds values added with `context`.
    let advice = error.downcast_ref::<Advice>().and_then(Hint::hint);
    let refused = || error.downcast_ref::<ApiRefusal>().and_then(Hint::hint);
    let cause = || error.chain().find_map(hint_of_cause);
    advice.or_else(refused).or_else(cause).map(Cow::into_owned)
}

/// The errors with hints that a cause can be.
fn hint_of_cause<'a>(cause: &'a (dyn Error + 'static)) -> Option<Cow<'a, str>> {
    fn hint<'a, E: Hint + Error + 'static>(
        cause: &'a (dyn Error + 'static),
    ) -> Option<Cow<'a, str>> {
        cause.downcast_ref::<E>()?.hint()
    }
    hint::<SessionError>(cause)
        .or_else(|| hint::<SandboxError>(cause))
        .or_else(|| hint::<StoreError>(cause))
        .or_else(|| hint::<ImportError>(cause))
        .or_else(|| hint::<EngineError>(cause))
        .or_else(|| hint::<RootlessError>(cause))
        .or_else(|| hint::<io::Error>(cause))
}

/// Whether the arguments are wrong.
pub(crate) fn is_wrong_usage(error: &anyhow::Error) -> bool {
    error.downcast_ref::<Advice>().is_some_and(|advice| advice.wrong_usage)
}

/// Whether the reader of stdout closed the pipe, which is not a failure.
pub(crate) fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<StdoutError>()
        .is_some_and(|error| error.0.kind() == io::ErrorKind::BrokenPipe)
}

/// `1 file`, `2 files`.
pub(crate) fn count(number: impl Into<u64>, noun: &str) -> String {
    let number = number.into();
    match number {
        1 => format!("1 {noun}"),
        _ if noun.ends_with('x') => format!("{number} {noun}es"),
        _ => format!("{number} {noun}s"),
    }
}

/// The time since `began`, such as `1.1s`.
pub(crate) fn human_elapsed(began: Instant) -> String {
    human_millis(u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX))
}

/// `214ms`, `1.1s`, `2m06s`, `3h20m`.
pub(crate) fn human_millis(millis: u64) -> String {
    match millis {
        0..1_000 => format!("{millis}ms"),
        1_000..60_000 => format!("{}.{}s", millis / 1000, millis % 1000 / 100),
        60_000..3_600_000 => format!("{}m{:02}s", millis / 60_000, millis % 60_000 / 1000),
        _ => format!("{}h{:02}m", millis / 3_600_000, millis % 3_600_000 / 60_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn durations_are_short_and_have_a_unit() {
        let shown: Vec<String> =
            [7, 1_149, 126_000, 12_000_000].into_iter().map(human_millis).collect();
        assert_eq!(shown, ["7ms", "1.1s", "2m06s", "3h20m"]);
    }

    #[test]
    fn hint_is_found_anywhere_in_the_chain() {
        let inside =
            Err::<(), _>(Advice::new("no server", "start one")).context("cannot list").unwrap_err();
        assert_eq!(hint_of(&inside).as_deref(), Some("start one"));
        let outside = io::Error::other("refused");
        let outside = anyhow::Error::new(outside)
            .context(Advice::new("no answer", "wait"))
            .context("cannot list");
        assert_eq!(hint_of(&outside).as_deref(), Some("wait"));
    }

    #[test]
    fn errors_for_programs_have_causes_and_hint() {
        let error = Err::<(), _>(Advice::new("no server", "start one")).context("cannot list");
        let document = error_document(&error.unwrap_err());
        let expected = serde_json::json!({
            "error": "cannot list", "causes": ["no server"], "hint": "start one", "code": null
        });
        assert_eq!(document, expected);
    }

    #[test]
    fn only_a_closed_stdout_is_ignored() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(is_broken_pipe(&anyhow::Error::new(StdoutError(broken())).context("cannot list")));
        assert!(!is_broken_pipe(&anyhow::Error::new(broken()).context("no answer")));
    }
}
