//! Checks what this host can do for sandboxes: each finding is the result of doing the thing once,
//! in a process that exits right afterwards. Leaves no changes behind.
//!
//! The risky checks need a single-threaded process, which the caller may not be: the zygote's
//! command runs them when `--probe` precedes the home.

mod host;
mod paths;
mod stack;

use std::{
    io::{self, Read, Write},
    os::fd::AsFd,
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};

use crate::{Engine, home::Config};

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stable identifier.
    pub id: &'static str,
    /// How severe it is.
    pub level: Level,
    /// The result, in one line.
    pub found: String,
    /// How to fix it, in one line.
    pub fix: Option<String>,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Sandboxes run with a restriction.
    Warn,
    /// Sandboxes cannot run.
    Fail,
}

/// The ids of all findings, in display order.
pub const FINDINGS: [&str; 19] = [
    "probe",
    "privileges",
    "kernel",
    "kernel_calls",
    "namespaces",
    "user_namespace_limit",
    "unprivileged_user_namespaces",
    "lsm",
    "id_mapped_mounts",
    "overlay",
    "cgroups",
    "seccomp",
    "redirect",
    "loop_devices",
    "inotify",
    "supervisor",
    "store",
    "disk_home",
    "disk_cache",
];

// A healthy host takes 0.1 s; a broken one may hang in a system call.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

impl Finding {
    pub(crate) fn ok(id: &'static str, found: impl Into<String>) -> Self {
        Self { id, level: Level::Ok, found: found.into(), fix: None }
    }

    pub(crate) fn bad(
        id: &'static str,
        level: Level,
        found: impl Into<String>,
        fix: impl Into<String>,
    ) -> Self {
        Self { id, level, found: found.into(), fix: Some(fix.into()) }
    }
}

/// A finding as sent by the probing process.
#[derive(Deserialize)]
struct FindingMessage {
    id: String,
    level: Level,
    found: String,
    fix: Option<String>,
}

impl Engine {
    /// Checks what sandboxes need from this host. Starts no zygote and leaves nothing behind.
    #[must_use]
    pub fn probe(&self) -> Vec<Finding> {
        let mut findings = match ask(&self.config) {
            Ok(findings) => findings,
            Err(reason) => {
                let fix = "run `harvest doctor` again as the user that runs the server";
                vec![Finding::bad(
                    "probe",
                    Level::Fail,
                    format!("cannot check this host: {reason}"),
                    fix,
                )]
            }
        };
        findings.extend(paths::findings(&self.config));
        let position = |id: &str| FINDINGS.iter().position(|known| *known == id);
        findings.sort_by_key(|finding| position(finding.id));
        findings
    }
}

/// Runs the checks in a single-threaded process.
fn ask(config: &Config) -> Result<Vec<Finding>, String> {
    let (program, arguments) =
        config.zygote.split_first().ok_or("no zygote command is configured")?;
    let mut child = Command::new(program)
        .args(arguments)
        .arg("--probe")
        .arg(&config.home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    let output = read_until_closed(child.stdout.take(), Instant::now() + PROBE_TIMEOUT);
    if output.is_err() {
        let _ = child.kill();
    }
    let ended = child.wait();
    let text = output.map_err(|error| error.to_string())?;
    let messages: Vec<FindingMessage> =
        serde_json::from_str(&text).map_err(|_| format!("the probe ended early ({ended:?})"))?;
    Ok(messages.into_iter().filter_map(known).collect())
}

fn known(message: FindingMessage) -> Option<Finding> {
    let id = FINDINGS.into_iter().find(|id| *id == message.id)?;
    Some(Finding { id, level: message.level, found: message.found, fix: message.fix })
}

fn read_until_closed(from: Option<impl Read + AsFd>, end: Instant) -> io::Result<String> {
    let mut from = from.ok_or(io::ErrorKind::BrokenPipe)?;
    let mut text = String::new();
    let mut piece = [0u8; 8192];
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        let ready = poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&left))?;
        if ready == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match from.read(&mut piece)? {
            0 => return Ok(text),
            count => text.push_str(&String::from_utf8_lossy(&piece[..count])),
        }
    }
}

/// Runs the checks and prints the findings as JSON on standard output. The process must be
/// single-threaded.
pub fn main(home: &Path) -> ExitCode {
    let findings = host::findings(home);
    let output = serde_json::to_vec(&findings).map_err(io::Error::from);
    match output.and_then(|bytes| io::stdout().write_all(&bytes)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_roundtrip_and_unknown_ids_are_dropped() {
        let sent = Finding::bad("overlay", Level::Warn, "slow", "wait");
        let text = serde_json::to_string(&sent).unwrap();
        assert_eq!(known(serde_json::from_str(&text).unwrap()), Some(sent));
        let other = text.replace("overlay", "underlay");
        assert_eq!(known(serde_json::from_str(&other).unwrap()), None);
    }
}
