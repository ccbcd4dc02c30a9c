//! Diagnostics: one line each to stderr, which is a log file on the host. Never the content of a
//! prompt, a command's output or a file.

use std::{fmt, io::Write};

/// Writes a line; a full disk under the log must not stop a supervisor.
pub(crate) fn line(message: fmt::Arguments<'_>) {
    let text = format!("supervisor: {message}\n");
    let _full_disk = std::io::stderr().write_all(text.as_bytes());
}
