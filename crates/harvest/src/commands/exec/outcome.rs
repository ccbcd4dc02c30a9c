//! How a command ended, in every form in which it is told: exit code, status word, JSON document.

use std::io::Write;

use anyhow::Result;
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_engine::guest::Output;
use harvest_proto::bridge::{Exit, Fault, FaultCode};
use serde::Serialize;

use super::ends::Ends;
use crate::printer::{Printer, write_bytes};

/// Ours failed, not the command.
const OURS: u8 = 125;

/// How it went, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Status {
    /// Exit code 0.
    Success,
    /// Another exit code, a signal, or there was nothing to run.
    Error,
    /// The time limit.
    Timeout,
    /// The memory limit.
    Oom,
    /// Its sandbox, or we, failed under it.
    Crashed,
}

/// How a command ended.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) code: u8,
    pub(super) status: Status,
    pub(super) millis: u64,
    /// Why, where the command's own output cannot say it.
    pub(super) error: Option<String>,
}

impl Outcome {
    pub(super) fn exited(exit: Exit, millis: u64) -> Self {
        let (code, status, error) = match exit {
            Exit::Code(0) => (0, Status::Success, None),
            Exit::Code(code) => (u8::try_from(code & 0xff).unwrap_or(OURS), Status::Error, None),
            Exit::Signal(signal) => {
                let code = 128u8.wrapping_add(u8::try_from(signal & 0x7f).unwrap_or(0));
                (code, Status::Error, None)
            }
            Exit::Timeout => {
                (124, Status::Timeout, Some("timeout: the command and all it started were killed"))
            }
            Exit::Oom => (137, Status::Oom, Some("oom: the memory limit was reached")),
            Exit::Killed => (137, Status::Error, Some("killed")),
        };
        Self { code, status, millis, error: error.map(str::to_owned) }
    }

    /// The same, for a reason somebody else knows.
    pub(super) fn because(self, reason: String) -> Self {
        Self { error: self.error.or(Some(reason)), ..self }
    }

    /// It could not be started; shells number the reasons.
    pub(super) fn refused(fault: &Fault) -> Self {
        let (code, status) = match fault.code {
            FaultCode::NotExecutable | FaultCode::Denied => (126, Status::Error),
            FaultCode::NotFound => (127, Status::Error),
            _ => (OURS, Status::Crashed),
        };
        Self { code, status, millis: 0, error: Some(fault.message.clone()) }
    }

    /// The sandbox went away under it, as the server says.
    pub(super) fn crashed(message: String, millis: u64) -> Self {
        Self { code: OURS, status: Status::Crashed, millis, error: Some(message) }
    }

    /// We failed before there was anything to tell.
    pub(super) fn ours(error: &anyhow::Error) -> Self {
        Self { code: OURS, status: Status::Crashed, millis: 0, error: Some(format!("{error:#}")) }
    }
}

/// Where a command's output goes.
#[derive(Debug)]
pub(super) enum Sink {
    /// To our own, as it comes.
    Through,
    /// Into a document.
    Kept { stdout: Ends, stderr: Ends },
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Document<'a> {
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

impl Sink {
    pub(super) fn new(json: bool) -> Self {
        match json {
            true => Self::Kept { stdout: Ends::default(), stderr: Ends::default() },
            false => Self::Through,
        }
    }

    pub(super) fn take(&mut self, output: Output, bytes: &[u8]) -> Result<()> {
        match (self, output) {
            (Self::Through, Output::Stdout) => write_bytes(bytes)?,
            // Nobody is left to tell when stderr is gone; the command's result still counts.
            (Self::Through, Output::Stderr) => drop(std::io::stderr().lock().write_all(bytes)),
            (Self::Kept { stdout, .. }, Output::Stdout) => stdout.push(bytes),
            (Self::Kept { stderr, .. }, Output::Stderr) => stderr.push(bytes),
        }
        Ok(())
    }

    /// Tells the end; the exit code is the command's own.
    pub(super) fn finish(
        self,
        print: Printer,
        outcome: &Outcome,
        sandbox: Option<&str>,
    ) -> Result<u8> {
        match self {
            Self::Through => {
                if let Some(error) = &outcome.error {
                    print.error(&anyhow::anyhow!("{error}"));
                }
            }
            Self::Kept { stdout, stderr } => {
                let truncated = stdout.is_truncated() || stderr.is_truncated();
                let ((stdout, stdout_base64), (stderr, stderr_base64)) =
                    (told(stdout), told(stderr));
                #[expect(clippy::cast_precision_loss, reason = "no command runs for 285,000 years")]
                let duration_secs = outcome.millis as f64 / 1000.0;
                let document = Document {
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
                print.result(&document, |_| String::new())?;
            }
        }
        Ok(outcome.code)
    }
}

/// As text; beside it as it was, when that is no text.
fn told(ends: Ends) -> (String, Option<String>) {
    match String::from_utf8(ends.bytes()) {
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
    fn the_exit_code_is_the_commands_own_or_says_why_there_is_none() {
        let told = |exit| {
            let outcome = Outcome::exited(exit, 1);
            (outcome.code, outcome.status)
        };
        assert_eq!(told(Exit::Code(0)), (0, Status::Success));
        assert_eq!(told(Exit::Code(7)), (7, Status::Error));
        assert_eq!(told(Exit::Code(256 + 3)), (3, Status::Error));
        assert_eq!(told(Exit::Signal(15)), (143, Status::Error));
        assert_eq!(told(Exit::Timeout), (124, Status::Timeout));
        assert_eq!(told(Exit::Oom), (137, Status::Oom));
        let refused = |code| Outcome::refused(&Fault::new(code, "x")).code;
        assert_eq!(
            [FaultCode::NotFound, FaultCode::NotExecutable, FaultCode::System].map(refused),
            [127, 126, 125]
        );
        assert_eq!(Outcome::crashed("killed".into(), 0).code, 125);
    }

    #[test]
    fn what_is_no_text_is_there_as_it_was_as_well() {
        let mut ends = Ends::default();
        ends.push(b"a\xffb");
        assert_eq!(told(ends), ("a\u{fffd}b".to_owned(), Some(BASE64_STANDARD.encode(b"a\xffb"))));
        let mut ends = Ends::default();
        ends.push("ä".as_bytes());
        assert_eq!(told(ends), ("ä".to_owned(), None));
    }
}
