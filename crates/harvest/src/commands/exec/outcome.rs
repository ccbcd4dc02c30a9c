//! The outcome of a command as exit code, status and JSON document.

use std::io::Write;

use anyhow::Result;
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_engine::supervisor_client::Output;
use harvest_proto::bridge::Exit;
use serde::Serialize;

use super::head_tail::HeadTail;
use crate::printer::{Printer, write_bytes};

/// The exit code of Harvest's own failures.
const INTERNAL_ERROR: u8 = 125;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    Success,
    /// Another exit code, a signal, or the command could not start.
    Error,
    Timeout,
    Oom,
    /// The sandbox or Harvest failed.
    Crashed,
}

#[derive(Debug, Clone)]
pub(super) struct CommandOutcome {
    pub(super) code: u8,
    pub(super) status: Status,
    pub(super) millis: u64,
    /// The reason, if the command's output cannot contain it.
    pub(super) error: Option<String>,
}

impl CommandOutcome {
    pub(super) fn exited(exit: Exit, millis: u64) -> Self {
        let (code, status, error) = match exit {
            Exit::Code(0) => (0, Status::Success, None),
            Exit::Code(code) => {
                (u8::try_from(code & 0xff).unwrap_or(INTERNAL_ERROR), Status::Error, None)
            }
            Exit::Signal(signal) => {
                let code = 128u8.wrapping_add(u8::try_from(signal & 0x7f).unwrap_or(0));
                (code, Status::Error, None)
            }
            Exit::Timeout => (
                124,
                Status::Timeout,
                Some(
                    "timeout: the command and its children were killed; `--timeout` sets the limit",
                ),
            ),
            Exit::Oom => (
                137,
                Status::Oom,
                Some("oom: the memory limit was reached; `--memory` sets it for a new sandbox"),
            ),
            Exit::Killed => (137, Status::Error, Some("killed")),
        };
        Self { code, status, millis, error: error.map(str::to_owned) }
    }

    /// Adds a reason unless there is one.
    pub(super) fn or_reason(self, reason: Option<String>) -> Self {
        Self { error: self.error.or(reason), ..self }
    }

    /// The command could not be started; the exit codes are those of a shell. `code` is the API's
    /// error code.
    pub(super) fn refused(code: &str, message: String) -> Self {
        let (code, status) = match code {
            "not_executable" | "denied" => (126, Status::Error),
            "not_found" => (127, Status::Error),
            _ => (INTERNAL_ERROR, Status::Crashed),
        };
        Self { code, status, millis: 0, error: Some(message) }
    }

    /// The sandbox ended while the command ran.
    pub(super) fn crashed(message: String, millis: u64) -> Self {
        Self { code: INTERNAL_ERROR, status: Status::Crashed, millis, error: Some(message) }
    }

    /// Harvest failed before the command ran.
    pub(super) fn internal_error(error: &anyhow::Error) -> Self {
        Self::crashed(format!("{error:#}"), 0)
    }
}

#[derive(Debug)]
pub(super) enum OutputSink {
    /// To this process's own output.
    PassThrough,
    /// Into a JSON document.
    Buffered { stdout: HeadTail, stderr: HeadTail },
}

#[derive(Debug, Serialize)]
struct ExecDocument<'a> {
    returncode: u8,
    status: Status,
    stdout: String,
    stderr: String,
    duration_secs: f64,
    sandbox_id: Option<&'a str>,
    truncated: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    stdout_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stderr_base64: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
}

impl OutputSink {
    pub(super) fn new(json: bool) -> Self {
        match json {
            true => Self::Buffered { stdout: HeadTail::default(), stderr: HeadTail::default() },
            false => Self::PassThrough,
        }
    }

    pub(super) fn write(&mut self, output: Output, bytes: &[u8]) -> Result<()> {
        match (self, output) {
            (Self::PassThrough, Output::Stdout) => write_bytes(bytes)?,
            // A closed stderr does not change the command's result.
            (Self::PassThrough, Output::Stderr) => drop(std::io::stderr().lock().write_all(bytes)),
            (Self::Buffered { stdout, .. }, Output::Stdout) => stdout.push(bytes),
            (Self::Buffered { stderr, .. }, Output::Stderr) => stderr.push(bytes),
        }
        Ok(())
    }

    /// Prints the outcome; returns the exit code.
    pub(super) fn finish(
        self,
        print: Printer,
        outcome: &CommandOutcome,
        sandbox: Option<&str>,
    ) -> Result<u8> {
        match self {
            Self::PassThrough => {
                if let Some(error) = &outcome.error {
                    print.error(&anyhow::anyhow!("{error}"));
                }
            }
            Self::Buffered { stdout, stderr } => {
                let truncated = stdout.is_truncated() || stderr.is_truncated();
                let ((stdout, stdout_base64), (stderr, stderr_base64)) =
                    (as_text(stdout), as_text(stderr));
                #[expect(clippy::cast_precision_loss, reason = "no command runs for 285,000 years")]
                let duration_secs = outcome.millis as f64 / 1000.0;
                let document = ExecDocument {
                    returncode: outcome.code,
                    status: outcome.status,
                    stdout,
                    stderr,
                    duration_secs,
                    sandbox_id: sandbox,
                    truncated,
                    stdout_base64,
                    stderr_base64,
                    error: outcome.error.as_deref(),
                };
                print.document(&document)?;
            }
        }
        Ok(outcome.code)
    }
}

/// The output as text, and as base64 if it is not UTF-8.
fn as_text(output: HeadTail) -> (String, Option<String>) {
    match String::from_utf8(output.bytes()) {
        Ok(text) => (text, None),
        Err(error) => {
            let bytes = error.into_bytes();
            (String::from_utf8_lossy(&bytes).into_owned(), Some(BASE64_STANDARD.encode(&bytes)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_codes_follow_shell_conventions() {
        let code_and_status = |exit| {
            let outcome = CommandOutcome::exited(exit, 1);
            (outcome.code, outcome.status)
        };
        assert_eq!(code_and_status(Exit::Code(0)), (0, Status::Success));
        assert_eq!(code_and_status(Exit::Code(7)), (7, Status::Error));
        assert_eq!(code_and_status(Exit::Code(256 + 3)), (3, Status::Error));
        assert_eq!(code_and_status(Exit::Signal(15)), (143, Status::Error));
        assert_eq!(code_and_status(Exit::Timeout), (124, Status::Timeout));
        assert_eq!(code_and_status(Exit::Oom), (137, Status::Oom));
        let refused = |code| CommandOutcome::refused(code, "x".into()).code;
        assert_eq!(["not_found", "not_executable", "system"].map(refused), [127, 126, 125]);
        assert_eq!(CommandOutcome::crashed("killed".into(), 0).code, 125);
    }

    #[test]
    fn non_utf8_output_is_also_base64() {
        let mut output = HeadTail::default();
        output.push(b"a\xffb");
        assert_eq!(
            as_text(output),
            ("a\u{fffd}b".to_owned(), Some(BASE64_STANDARD.encode(b"a\xffb")))
        );
        let mut output = HeadTail::default();
        output.push("ä".as_bytes());
        assert_eq!(as_text(output), ("ä".to_owned(), None));
    }
}
