//! The log: to stderr, as lines for people or as JSON, with every secret covered before it is written.
//! What is logged is decided where it happens.

use std::{
    io::{self, IsTerminal, Write},
    sync::{PoisonError, RwLock},
};

use anyhow::{Context, Result};
use harvest_proto::{Secret, redact::Redaction};
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use crate::config::{Config, LogFormat, process_env};

/// One log per process, so one list of what must not be in it.
static KNOWN: RwLock<Redaction> = RwLock::new(Redaction::new());

/// Begins to log; `HARVEST_LOG` says what.
pub(crate) fn start(config: &Config, verbose: bool) -> Result<()> {
    let filter = if verbose && config.log == "warn" { "info" } else { &config.log };
    let filter = EnvFilter::try_new(filter)
        .with_context(|| format!("`{filter}` in HARVEST_LOG is not a log filter"))?;
    if let Some(token) = &config.token {
        learn(token);
    }
    let ansi = io::stderr().is_terminal() && process_env("NO_COLOR").is_none();
    tracing::subscriber::set_global_default(subscriber(filter, config.log_format, ansi, io::stderr))
        .context("the log was started twice")
}

/// What writes lines of this format to `out`.
fn subscriber<W>(
    filter: EnvFilter,
    format: LogFormat,
    ansi: bool,
    out: W,
) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Covered(out));
    match format {
        LogFormat::Json => Box::new(log.json().flatten_event(true).with_span_list(false).finish()),
        LogFormat::Text => Box::new(log.with_ansi(ansi).finish()),
    }
}

/// This value must not be in the log from now on.
pub(crate) fn learn(secret: &Secret<String>) {
    // Nobody panics while holding it; were it so, what it holds is whole all the same.
    KNOWN.write().unwrap_or_else(PoisonError::into_inner).learn(secret.expose());
}

/// A way out on which secrets are covered.
struct Covered<W>(W);

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for Covered<W> {
    type Writer = Covered<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        Covered(self.0.make_writer())
    }
}

impl<W: Write> Write for Covered<W> {
    /// One call is one whole line: that is how the subscriber writes. A line that cannot be written, on a full
    /// disk for one, is lost and disturbs nobody: told of the failure, the subscriber would print it to the same
    /// place, and panic in the middle of whatever was being logged.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let clean = {
            let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
            known.cover(&String::from_utf8_lossy(bytes))
        };
        let _ = self.0.write_all(clean.as_bytes());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// What was written.
    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat) -> String {
        let lines = Lines::default();
        let out = lines.clone();
        let filter = EnvFilter::new("trace");
        tracing::subscriber::with_default(
            subscriber(filter, format, false, move || out.clone()),
            || {
                let span = tracing::error_span!(
                    "request",
                    id = "req_1",
                    url = "http://me:planted-1@git.example/x"
                );
                let _inside = span.enter();
                tracing::trace!(value = "planted-2\"quoted", "a planted-3-value in the message");
                tracing::trace!(header = "authorization: Bearer planted-4", key = ?Some("hvt_0123456789abcdef"));
            },
        );
        let written = lines.0.lock().unwrap().clone();
        String::from_utf8(written).unwrap()
    }

    #[test]
    fn planted_secrets_are_in_no_line_at_any_level_and_in_neither_format() {
        learn(&Secret::new("planted-2\"quoted".into()));
        learn(&Secret::new("planted-3-value".into()));
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = logged(format);
            assert!(!text.contains("planted") && !text.contains("0123456789abcdef"), "{text}");
            assert!(text.contains("git.example/x") && text.contains("in the message"), "{text}");
        }
    }

    #[test]
    fn a_log_that_cannot_be_written_fails_nobody() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut out = Covered(full);
        assert_eq!(out.write(b"a line\n").unwrap(), 7);
        out.flush().unwrap();
    }

    #[test]
    fn a_json_line_is_one_object_with_the_request_it_belongs_to() {
        let text = logged(LogFormat::Json);
        assert_eq!(text.lines().count(), 2);
        for line in text.lines() {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            assert_eq!(
                (line["level"].as_str(), line["span"]["id"].as_str()),
                (Some("TRACE"), Some("req_1"))
            );
        }
    }
}
