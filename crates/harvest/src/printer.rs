//! Everything that is printed: results to stdout, the rest to stderr, errors with causes and a hint.

use std::io::{self, IsTerminal, Write};

use anyhow::Result;
use harvest_engine::rootless::RootlessError;
use harvest_proto::api::Problem;
use harvest_session::StoreError;
use serde::Serialize;

use crate::{
    cli::Global,
    config::Env,
    plain::{plain, plain_json, plain_line},
};

/// An error with what to do next.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub(crate) struct Advice {
    message: String,
    hint: String,
}

impl Advice {
    pub(crate) fn new(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self { message: message.into(), hint: hint.into() }
    }
}

/// The server said no.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.detail)]
pub(crate) struct Refused(pub(crate) Problem);

/// Where and how to print. What is printed may come from anywhere, so everything passes [`plain`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    pub(crate) json: bool,
    pub(crate) verbose: bool,
    quiet: bool,
    /// Whether results may be coloured, and whether the rest may.
    color_out: bool,
    color: bool,
}

impl Printer {
    pub(crate) fn new(flags: &Global, env: Env) -> Self {
        let color = env("NO_COLOR").is_none() && !flags.json;
        Self {
            json: flags.json,
            verbose: flags.verbose,
            quiet: flags.quiet,
            color_out: color && io::stdout().is_terminal(),
            color: color && io::stderr().is_terminal(),
        }
    }

    /// A result, as text.
    pub(crate) fn out(&self, text: &str) -> Result<()> {
        write_out(&plain(text))
    }

    /// A result that a program may want as it is: only a terminal gets it without what acts on terminals.
    pub(crate) fn exact(&self, text: &str) -> Result<()> {
        match io::stdout().is_terminal() {
            true => self.out(text),
            false => write_out(text),
        }
    }

    /// A result behind a coloured word.
    pub(crate) fn marked_out(&self, mark: &str, color: &str, text: &str) -> Result<()> {
        write_out(&(paint(self.color_out, mark, color) + &plain(text)))
    }

    /// A result: one JSON document, or what `text` makes of it.
    pub(crate) fn result<T: Serialize>(
        &self,
        value: &T,
        text: impl FnOnce(&T) -> String,
    ) -> Result<()> {
        match self.json {
            true => write_out(&plain_json(serde_json::to_string_pretty(value)? + "\n")),
            false => self.out(&text(value)),
        }
    }

    /// One item of a stream, as a line of JSON.
    pub(crate) fn item<T: Serialize>(&self, value: &T) -> Result<()> {
        write_out(&plain_json(serde_json::to_string(value)? + "\n"))
    }

    /// What was done, for people.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        self.aside(format!("{}\n", plain(text.as_ref())));
    }

    /// What a person must hear of even when a program reads the result.
    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        Self { json: false, ..*self }.marked("warning:", "33", &format!(" {}", text.as_ref()));
    }

    /// What was done, behind a coloured word.
    pub(crate) fn marked(&self, mark: &str, color: &str, text: &str) {
        self.aside(format!("{}{}\n", paint(self.color, mark, color), plain(text)));
    }

    /// What to do next.
    pub(crate) fn hint(&self, text: impl AsRef<str>) {
        self.marked("hint:", "36", &format!(" {}", text.as_ref()));
    }

    /// What a person is asked for. Printed whatever the flags say, without a line end.
    pub(crate) fn ask(&self, text: &str) {
        let _ = io::stderr().lock().write_all(plain(text).as_bytes());
    }

    /// Whether a line may move: somebody watches, and nothing else is said meanwhile.
    pub(crate) fn moves(&self) -> bool {
        !self.quiet && !self.json && !self.verbose && io::stderr().is_terminal()
    }

    /// Puts a line in the place of the last one that moved; an empty one takes it away.
    pub(crate) fn moving(&self, text: &str) {
        if self.moves() {
            let line: String = plain_line(text).chars().take(columns() - 1).collect();
            self.aside(format!("\r\x1b[K{line}"));
        }
    }

    fn aside(&self, text: String) {
        if !self.quiet && !self.json {
            // Nobody is left to tell when stderr is gone.
            let _ = io::stderr().lock().write_all(text.as_bytes());
        }
    }

    /// An error with its causes and its hint. Printed whatever the flags say.
    pub(crate) fn error(&self, error: &anyhow::Error) {
        let mut text =
            format!("{} {}\n", paint(self.color, "error:", "31"), plain(&error.to_string()));
        let mut said = error.to_string();
        for cause in error.chain().skip(1).map(ToString::to_string) {
            // Some libraries repeat their source in their own message.
            if !said.contains(&cause) {
                text += &format!("  cause: {}\n", plain(&cause));
                said = cause;
            }
        }
        if let Some(hint) = hint_of(error) {
            text += &format!("{} {}\n", paint(self.color, "hint:", "36"), plain(&hint));
        }
        let _ = io::stderr().lock().write_all(text.as_bytes());
    }
}

/// Our own stdout could not be written to.
#[derive(Debug, thiserror::Error)]
#[error("cannot print")]
struct Unprinted(#[source] io::Error);

fn write_out(text: &str) -> Result<()> {
    write_bytes(text.as_bytes())
}

/// Bytes to stdout as they are: what a command of the person's own prints.
pub(crate) fn write_bytes(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    Ok(out.write_all(bytes).and_then(|()| out.flush()).map_err(Unprinted)?)
}

fn paint(colors: bool, text: &str, color: &str) -> String {
    match colors {
        true => format!("\x1b[{color}m{text}\x1b[0m"),
        false => text.to_owned(),
    }
}

/// How wide the screen is; where there is none, as wide as a line may well be.
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

/// The hint nearest to the person.
pub(crate) fn hint_of(error: &anyhow::Error) -> Option<String> {
    // Asked of the whole: what `context` added is found only so.
    let advice = error.downcast_ref::<Advice>().map(|advice| advice.hint.clone());
    let refused = || error.downcast_ref::<Refused>().and_then(|refused| refused.0.hint.clone());
    let rootless =
        || error.chain().find_map(|cause| Some(cause.downcast_ref::<RootlessError>()?.hint()));
    let full = || error.chain().any(is_full).then(|| MAKE_ROOM.to_owned());
    advice.or_else(refused).or_else(|| rootless().map(str::to_owned)).or_else(full)
}

const MAKE_ROOM: &str =
    "the disk is full: `harvest df` shows what takes room here, `harvest gc` frees some";

fn is_full(cause: &(dyn std::error::Error + 'static)) -> bool {
    let system = |error: &io::Error| error.kind() == io::ErrorKind::StorageFull;
    cause.downcast_ref::<StoreError>().is_some_and(StoreError::is_full)
        || cause.downcast_ref::<io::Error>().is_some_and(system)
}

/// Whether the reader of our stdout went away, which is no failure of ours.
pub(crate) fn reader_left(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<Unprinted>()
        .is_some_and(|error| error.0.kind() == io::ErrorKind::BrokenPipe)
}

/// Rows under headings, columns as wide as they need to be. The last column is not padded.
pub(crate) fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|cell| plain_line(cell)).collect()).collect();
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([headings[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: &[String]| {
        let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
    };
    let head: Vec<String> = headings.iter().map(|heading| (*heading).to_owned()).collect();
    std::iter::once(line(&head)).chain(rows.iter().map(|row| line(row))).collect()
}

/// `214ms`, `1.1s`, `2m06s`, `3h20m`.
pub(crate) fn took(millis: u64) -> String {
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
    fn times_are_short_and_never_lose_their_unit() {
        let shown: Vec<String> = [7, 1_149, 126_000, 12_000_000].into_iter().map(took).collect();
        assert_eq!(shown, ["7ms", "1.1s", "2m06s", "3h20m"]);
    }

    #[test]
    fn a_hint_is_found_wherever_it_is_in_the_chain() {
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
    fn only_our_own_stdout_can_make_an_error_pass_silently() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(reader_left(&anyhow::Error::new(Unprinted(broken())).context("cannot list")));
        assert!(!reader_left(&anyhow::Error::new(broken()).context("no answer")));
    }

    #[test]
    fn a_cell_stays_on_its_line() {
        let rows = [vec!["a\nb".into(), "\x1b[31mred".into()]];
        assert_eq!(table(&["ID", "TITLE"], &rows), "ID   TITLE\na b  red\n");
    }

    #[test]
    fn a_table_lines_up() {
        let rows = [vec!["a".into(), "long cell".into()], vec!["bbb".into(), "c".into()]];
        assert_eq!(table(&["ID", "TITLE"], &rows), "ID   TITLE\na    long cell\nbbb  c\n");
    }
}
