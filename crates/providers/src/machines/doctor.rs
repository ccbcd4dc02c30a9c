//! The programs of the host that Harvest calls besides its own.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use harvest_proto::api::machines::{Finding, FindingLevel};

/// Whether each is there, with a stable id and a way to mend it.
#[must_use]
pub fn programs() -> Vec<Finding> {
    vec![git(), http_backend(), mmdebstrap()]
}

fn ok(id: &str, found: impl Into<String>) -> Finding {
    Finding { id: id.to_owned(), level: FindingLevel::Ok, found: found.into(), fix: None }
}

fn bad(id: &str, level: FindingLevel, found: &str, fix: &str) -> Finding {
    Finding { id: id.to_owned(), level, found: found.to_owned(), fix: Some(fix.to_owned()) }
}

/// What a program prints; nothing when it is not there.
fn printed(program: &str, argument: &str) -> Option<String> {
    let output = Command::new(program)
        .arg(argument)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn git() -> Finding {
    match printed("git", "--version") {
        Some(version) => ok("git", version),
        None => bad("git", FindingLevel::Fail, "git was not found", "install git"),
    }
}

fn http_backend() -> Finding {
    let found = printed("git", "--exec-path")
        .is_some_and(|path| Path::new(&path).join("git-http-backend").exists());
    match found {
        true => ok("git_http_backend", "there, for the local forge"),
        false => {
            let found = "git http-backend was not found";
            bad("git_http_backend", FindingLevel::Warn, found, "install the whole of git")
        }
    }
}

fn mmdebstrap() -> Finding {
    match printed("mmdebstrap", "--version") {
        Some(version) => ok("mmdebstrap", version.lines().next().unwrap_or("").to_owned()),
        None => bad(
            "mmdebstrap",
            FindingLevel::Warn,
            "mmdebstrap was not found; images are bootstrapped with it",
            "install mmdebstrap",
        ),
    }
}
