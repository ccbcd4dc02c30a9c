//! Writes log lines to stderr, which is a log file on the host. Never logs the content of prompts,
//! command output or files.

use std::{fmt, io::Write, process::ExitCode};

/// Ignores errors: a full disk under the log must not stop the supervisor.
pub(crate) fn line(message: fmt::Arguments<'_>) {
    let text = format!("supervisor: {message}\n");
    let _full_disk = std::io::stderr().write_all(text.as_bytes());
}

/// The exit code of a role; logs its error.
pub(crate) fn exit_code<E: fmt::Display>(role: &str, result: Result<(), E>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            line(format_args!("{role}{error}"));
            ExitCode::FAILURE
        }
    }
}
