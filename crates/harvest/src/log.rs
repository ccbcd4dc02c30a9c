//! Sets up the log on stderr, as text or JSON lines. Known secrets are redacted before a line is
//! written.

use std::{
    io::{self, Write},
    sync::{PoisonError, RwLock},
};

use anyhow::{Context, Result};
use harvest_proto::{Secret, redact::Redactor};
use tracing::Subscriber;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use crate::{
    config::{Config, LogFormat},
    live,
};

static SECRETS: RwLock<Redactor> = RwLock::new(Redactor::new());

/// Installs the log; the setting `log` (HARVEST_LOG) is its filter.
pub(crate) fn start(config: &Config, verbose: bool) -> Result<()> {
    let filter = if verbose && config.log == "warn" { "info" } else { &config.log };
    let filter = EnvFilter::try_new(filter)
        .with_context(|| format!("`{filter}` in HARVEST_LOG is not a log filter"))?;
    if let Some(token) = &config.token {
        redact(token);
    }
    tracing::subscriber::set_global_default(subscriber(filter, config.log_format, io::stderr))
        .context("the log is already installed")
}

fn subscriber<W>(filter: EnvFilter, format: LogFormat, out: W) -> Box<dyn Subscriber + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(RedactingWriter(out));
    match format {
        LogFormat::Json => Box::new(log.json().flatten_event(true).with_span_list(false).finish()),
        LogFormat::Text => Box::new(log.finish()),
    }
}

/// Redacts this value in every later log line.
pub(crate) fn redact(secret: &Secret<String>) {
    // A panic while the lock is held leaves the list intact.
    SECRETS.write().unwrap_or_else(PoisonError::into_inner).add(secret.expose());
}

struct RedactingWriter<W>(W);

impl<'w, W: MakeWriter<'w>> MakeWriter<'w> for RedactingWriter<W> {
    type Writer = RedactingWriter<W::Writer>;

    fn make_writer(&'w self) -> Self::Writer {
        RedactingWriter(self.0.make_writer())
    }
}

impl<W: Write> Write for RedactingWriter<W> {
    /// The subscriber writes one line per call. Write errors, for example on a full disk, are
    /// ignored: the subscriber would report them to the same stream and panic.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let clean = {
            let known = SECRETS.read().unwrap_or_else(PoisonError::into_inner);
            known.redact(&String::from_utf8_lossy(bytes))
        };
        let _ = live::suspend(|| self.0.write_all(clean.as_bytes()));
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

    #[derive(Clone, Default)]
    struct LogBuffer(Arc<Mutex<Vec<u8>>>);

    impl Write for LogBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(format: LogFormat) -> String {
        let lines = LogBuffer::default();
        let out = lines.clone();
        let filter = EnvFilter::new("trace");
        tracing::subscriber::with_default(subscriber(filter, format, move || out.clone()), || {
            let span = tracing::error_span!(
                "request",
                id = "req_1",
                url = "http://me:planted-1@git.example/x"
            );
            let _inside = span.enter();
            tracing::trace!(value = "planted-2\"quoted", "a planted-3-value in the message");
            tracing::trace!(header = "authorization: Bearer planted-4", key = ?Some("hvt_0123456789abcdef"));
        });
        let written = lines.0.lock().unwrap().clone();
        String::from_utf8(written).unwrap()
    }

    #[test]
    fn secrets_are_redacted_in_both_formats() {
        redact(&Secret::new("planted-2\"quoted".into()));
        redact(&Secret::new("planted-3-value".into()));
        for format in [LogFormat::Text, LogFormat::Json] {
            let text = logged(format);
            assert!(!text.contains("planted") && !text.contains("0123456789abcdef"), "{text}");
            assert!(text.contains("git.example/x") && text.contains("in the message"), "{text}");
        }
    }

    #[test]
    fn failed_log_write_is_ignored() {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let mut out = RedactingWriter(full);
        assert_eq!(out.write(b"a line\n").unwrap(), 7);
        out.flush().unwrap();
    }

    #[test]
    fn json_line_contains_its_request_span() {
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
