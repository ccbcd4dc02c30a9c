//! Checks for the host programs that Harvest calls.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use harvest_proto::api::{Finding, FindingLevel};

/// A finding per program, with a stable id and a fix when it is missing.
#[must_use]
pub fn program_findings() -> Vec<Finding> {
    vec![git(), http_backend(), mmdebstrap()]
}

fn ok(id: &str, found: impl Into<String>) -> Finding {
    Finding { id: id.to_owned(), level: FindingLevel::Ok, found: found.into(), fix: None }
}

fn bad(id: &str, level: FindingLevel, found: &str, fix: &str) -> Finding {
    Finding { id: id.to_owned(), level, found: found.to_owned(), fix: Some(fix.to_owned()) }
}

/// A program's output; `None` when it is missing or fails.
fn output_of(program: &str, argument: &str) -> Option<String> {
    let output = Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn git() -> Finding {
    match output_of("git", "--version") {
        Some(version) => ok("git", version),
        None => bad("git", FindingLevel::Fail, "git was not found", "install git"),
    }
}

fn http_backend() -> Finding {
    let found = output_of("git", "--exec-path")
        .is_some_and(|path| Path::new(&path).join("git-http-backend").exists());
    match found {
        true => ok("git_http_backend", "found (used by the local forge)"),
        false => {
            let found = "git http-backend was not found";
            bad("git_http_backend", FindingLevel::Warn, found, "install the complete git package")
        }
    }
}

fn mmdebstrap() -> Finding {
    match output_of("mmdebstrap", "--version") {
        Some(version) => ok("mmdebstrap", version.lines().next().unwrap_or("").to_owned()),
        None => bad(
            "mmdebstrap",
            FindingLevel::Warn,
            "mmdebstrap was not found; it is needed to bootstrap images",
            "install mmdebstrap",
        ),
    }
}
