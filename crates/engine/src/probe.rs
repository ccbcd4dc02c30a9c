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

pub use harvest_proto::api::{Finding, FindingLevel as Level};

use crate::{Engine, home::Config, syscall};

/// The ids of all findings, in display order.
pub const FINDINGS: [&str; 21] = [
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
    "tracing",
    "redirect",
    "loop_devices",
    "inotify",
    "host_tables",
    "supervisor",
    "store",
    "disk_home",
    "disk_cache",
];

// A healthy host takes 0.1 s; a broken one may hang in a system call.
const PROBE_TIMEOUT: Duration = Duration::from_secs(10);

fn ok(id: &str, found: impl Into<String>) -> Finding {
    Finding { id: id.to_owned(), level: Level::Ok, found: found.into(), fix: None }
}

fn bad(id: &str, level: Level, found: impl Into<String>, fix: &str) -> Finding {
    Finding { level, fix: Some(fix.to_owned()), ..ok(id, found) }
}

fn warn(id: &str, found: impl Into<String>, fix: &str) -> Finding {
    bad(id, Level::Warn, found, fix)
}

fn fail(id: &str, found: impl Into<String>, fix: &str) -> Finding {
    bad(id, Level::Fail, found, fix)
}

impl Engine {
    /// Checks what sandboxes need from this host. Starts no zygote and leaves nothing behind.
    #[must_use]
    pub fn probe(&self) -> Vec<Finding> {
        let mut findings = ask(&self.config).unwrap_or_else(|reason| {
            let fix = "run `harvest doctor` again as the user that runs the server";
            vec![fail("probe", format!("cannot check this host: {reason}"), fix)]
        });
        findings.extend(paths::findings(&self.config));
        findings.sort_by_key(|finding| FINDINGS.iter().position(|known| *known == finding.id));
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
    parse(&text).map_err(|_| format!("the probe ended early ({ended:?})"))
}

/// The known findings; the probing program may be of another version.
fn parse(text: &str) -> serde_json::Result<Vec<Finding>> {
    let mut findings: Vec<Finding> = serde_json::from_str(text)?;
    findings.retain(|finding| FINDINGS.contains(&finding.id.as_str()));
    Ok(findings)
}

fn read_until_closed(from: Option<impl Read + AsFd>, end: Instant) -> io::Result<String> {
    let mut from = from.ok_or(io::ErrorKind::BrokenPipe)?;
    let mut text = String::new();
    let mut piece = [0u8; 8192];
    loop {
        if !syscall::is_readable(&from, end.saturating_duration_since(Instant::now()))? {
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
        let sent = vec![warn("overlay", "slow", "wait")];
        let text = serde_json::to_string(&sent).unwrap();
        assert_eq!(parse(&text).unwrap(), sent);
        assert_eq!(parse(&text.replace("overlay", "underlay")).unwrap(), []);
    }
}
