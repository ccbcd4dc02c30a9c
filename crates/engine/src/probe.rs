//! What this host can do for sandboxes, tried rather than guessed: each finding is the outcome of
//! doing the thing once, in a process that ends right afterwards. Changes nothing that stays.
//!
//! The risky trials need a process with one thread, which the caller may not be: the zygote's
//! command runs them when `--probe` comes before the home.

mod host;
mod place;
mod stack;
pub(crate) mod trial;

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

/// One thing a host has or lacks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Stays the same from release to release.
    pub id: &'static str,
    /// How bad it is.
    pub level: Level,
    /// What was found, in one line.
    pub found: String,
    /// What to do about it, in one line.
    pub fix: Option<String>,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// As it should be.
    Ok,
    /// Sandboxes run, with something less.
    Warn,
    /// No sandbox runs.
    Fail,
}

/// Every id a finding can have, in the order in which they are told.
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

// A healthy host takes a tenth of a second; a sick one may hang in a system call.
const PATIENCE: Duration = Duration::from_secs(10);

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

/// A finding on its way from one process to another.
#[derive(Deserialize)]
struct Told {
    id: String,
    level: Level,
    found: String,
    fix: Option<String>,
}

impl Engine {
    /// Tries what sandboxes need of this host. Starts no zygote and leaves nothing behind.
    #[must_use]
    pub fn probe(&self) -> Vec<Finding> {
        let mut findings = match ask(&self.config) {
            Ok(findings) => findings,
            Err(reason) => {
                let fix = "run `harvest doctor` again as the user that runs the server";
                vec![Finding::bad(
                    "probe",
                    Level::Fail,
                    format!("the host could not be tried: {reason}"),
                    fix,
                )]
            }
        };
        findings.extend(place::findings(&self.config));
        let place = |id: &str| FINDINGS.iter().position(|known| *known == id);
        findings.sort_by_key(|finding| place(finding.id));
        findings
    }
}

/// Has a process with one thread try the host.
fn ask(config: &Config) -> Result<Vec<Finding>, String> {
    let (program, arguments) = config.zygote.split_first().ok_or("no command for the zygote")?;
    let mut child = Command::new(program)
        .args(arguments)
        .arg("--probe")
        .arg(&config.home)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{}: {error}", program.display()))?;
    let said = read_until_closed(child.stdout.take(), Instant::now() + PATIENCE);
    if said.is_err() {
        let _ = child.kill();
    }
    let ended = child.wait();
    let text = said.map_err(|error| error.to_string())?;
    let told: Vec<Told> =
        serde_json::from_str(&text).map_err(|_| format!("the trial ended early ({ended:?})"))?;
    Ok(told.into_iter().filter_map(known).collect())
}

fn known(told: Told) -> Option<Finding> {
    let id = FINDINGS.into_iter().find(|id| *id == told.id)?;
    Some(Finding { id, level: told.level, found: told.found, fix: told.fix })
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

/// Tries the host and says the findings as JSON on standard output. The process must have one thread.
pub fn main(home: &Path) -> ExitCode {
    let findings = host::findings(home);
    let said = serde_json::to_vec(&findings).map_err(io::Error::from);
    match said.and_then(|bytes| io::stdout().write_all(&bytes)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_travels_and_an_unknown_one_is_left_out() {
        let sent = Finding::bad("overlay", Level::Warn, "slow", "wait");
        let text = serde_json::to_string(&sent).unwrap();
        assert_eq!(known(serde_json::from_str(&text).unwrap()), Some(sent));
        let other = text.replace("overlay", "underlay");
        assert_eq!(known(serde_json::from_str(&other).unwrap()), None);
    }
}
