//! What a build reports: lines for the client that waits for it, and the log that is stored.

use std::{
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
};

use harvest_gateway::DoorObserver;
use harvest_proto::{EventBody, api::BuildLine, event::PhaseStatus};
use tokio::sync::mpsc;

// A longer log loses its middle: how it began and how it ended say most.
const MAX_LOG_BYTES: usize = 64 * 1024;

/// Where a build reports: the client, if it is still connected, and the log that is stored.
pub(super) struct BuildReport {
    progress: mpsc::UnboundedSender<BuildLine>,
    log: Arc<Mutex<String>>,
}

impl BuildReport {
    pub(super) fn new(progress: mpsc::UnboundedSender<BuildLine>) -> Self {
        Self { progress, log: Arc::default() }
    }

    /// Sends the last line.
    pub(super) fn end(&self, line: BuildLine) {
        let _ = self.progress.send(line);
    }

    pub(super) fn progress(&self, message: &str) {
        self.note(message);
        // The client may have disconnected.
        let _ = self.progress.send(BuildLine::Progress { message: message.to_owned() });
    }

    pub(super) fn event(&self, event: &EventBody) {
        match event {
            EventBody::BootPhase { phase, status: PhaseStatus::Started, .. } => {
                let name = serde_json::to_string(phase).unwrap_or_default();
                self.progress(name.trim_matches('"'));
            }
            EventBody::InstallStep { folder, manager, command, millis, failure, tail } => {
                let ended = failure.as_deref().unwrap_or("done");
                self.note(&format!("{command} in {folder}: {ended} ({millis} ms)\n{tail}"));
                let _ = self.progress.send(BuildLine::InstallStep {
                    folder: folder.clone(),
                    manager: manager.clone(),
                    command: command.clone(),
                    millis: *millis,
                    failure: failure.clone(),
                    tail: tail.clone(),
                });
            }
            EventBody::RepositoryConfig { config, .. } => {
                let declared = serde_json::to_string(config).unwrap_or_default();
                self.note(&format!(".harvest/config.toml: {declared}"));
            }
            EventBody::Warning { message } => self.warn(message.clone()),
            _ => {}
        }
    }

    pub(super) fn warn(&self, message: String) {
        self.note(&format!("warning: {message}"));
        let _ = self.progress.send(BuildLine::Warning { message });
    }

    /// Reports the connections that the network policy refuses.
    pub(super) fn refusal_observer(&self) -> DoorObserver {
        let (progress, log) = (self.progress.clone(), Arc::clone(&self.log));
        Box::new(move |event| {
            if let EventBody::EgressRefused { name, reason, hint } = event {
                let how = hint.as_ref().map(|hint| format!("; {hint}")).unwrap_or_default();
                append(&log, &format!("refused a connection to {name}: {reason}{how}"));
                let _ = progress.send(BuildLine::EgressRefused { name, reason, hint });
            }
        })
    }

    pub(super) fn note(&self, text: &str) {
        append(&self.log, text);
    }

    pub(super) fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn append(log: &Mutex<String>, text: &str) {
    let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = writeln!(log, "{}", text.trim_end());
    if log.len() > MAX_LOG_BYTES {
        let head = log.floor_char_boundary(MAX_LOG_BYTES / 4);
        let tail = log.ceil_char_boundary(log.len() - MAX_LOG_BYTES / 2);
        log.replace_range(head..tail, "\n…\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_log_keeps_its_beginning_and_end() {
        let (progress, _lines) = mpsc::unbounded_channel();
        let report = BuildReport::new(progress);
        report.note("first");
        (0..5000).for_each(|line| report.note(&format!("line {line} with an ä")));
        report.note("last");
        let log = report.log();
        assert!(log.len() <= MAX_LOG_BYTES + 100, "{}", log.len());
        assert!(log.starts_with("first\nline 0") && log.ends_with("last\n"), "{log}");
    }

    #[test]
    fn refused_connections_are_in_the_log() {
        let (progress, lines) = mpsc::unbounded_channel();
        let report = BuildReport::new(progress);
        // A build of the schedule has no client.
        drop(lines);
        report.refusal_observer()(EventBody::EgressRefused {
            name: "example.org".to_owned(),
            reason: "no rule allows it".to_owned(),
            hint: Some("`harvest net allow -r acme/app example.org`".to_owned()),
        });
        let log = report.log();
        assert!(log.contains("example.org: no rule") && log.contains("`harvest net"), "{log}");
    }
}
