//! Checks for the host programs that Harvest calls.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use harvest_proto::api::{Finding, FindingLevel};

/// A finding per program, with a stable id and a fix when it is missing.
#[must_use]
pub fn program_findings() -> Vec<Finding> {
    let backend = output_of("git", "--exec-path")
        .filter(|path| Path::new(path).join("git-http-backend").exists())
        .map(|_| "found (used by the local forge)".to_owned());
    let mmdebstrap = output_of("mmdebstrap", "--version");
    let mmdebstrap = mmdebstrap.map(|text| text.lines().next().unwrap_or("").to_owned());
    let no_backend = "git http-backend was not found";
    let no_mmdebstrap = "mmdebstrap was not found; it is needed to bootstrap images";
    let (fail, warn) = (FindingLevel::Fail, FindingLevel::Warn);
    // Each with its level, text and fix when it is missing.
    [
        ("git", output_of("git", "--version"), fail, "git was not found", "install git"),
        ("git_http_backend", backend, warn, no_backend, "install the complete git package"),
        ("mmdebstrap", mmdebstrap, warn, no_mmdebstrap, "install mmdebstrap"),
    ]
    .map(|(id, found, level, missing, fix)| {
        let (level, fix) = match found {
            Some(_) => (FindingLevel::Ok, None),
            None => (level, Some(fix.to_owned())),
        };
        let found = found.unwrap_or_else(|| missing.to_owned());
        Finding { id: id.to_owned(), level, found, fix }
    })
    .to_vec()
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
