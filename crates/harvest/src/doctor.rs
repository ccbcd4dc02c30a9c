//! What this machine lacks: what the engine finds by trying, and the programs the rest of Harvest calls.
//! Each has a stable id and a way to mend it.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use harvest_engine::probe::{Finding, Level};

use crate::{config::Config, printer::hint_of, wire};

/// Everything there is to find, the engine's own first.
pub(crate) fn findings(config: &Config) -> Vec<Finding> {
    let mut findings = match wire::open_engine(config) {
        Ok(engine) => engine.probe(),
        Err(error) => {
            let fix = hint_of(&error).unwrap_or_else(|| "mend what it says, then ask again".to_owned());
            vec![Finding { id: "engine", level: Level::Fail, found: format!("{error:#}"), fix: Some(fix) }]
        }
    };
    findings.extend([git(), http_backend(), mmdebstrap()]);
    findings
}

fn ok(id: &'static str, found: impl Into<String>) -> Finding {
    Finding { id, level: Level::Ok, found: found.into(), fix: None }
}

fn bad(id: &'static str, level: Level, found: &str, fix: &str) -> Finding {
    Finding { id, level, found: found.to_owned(), fix: Some(fix.to_owned()) }
}

/// What a program prints; nothing when it is not there.
fn printed(program: &str, argument: &str) -> Option<String> {
    let output =
        Command::new(program).arg(argument).stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn git() -> Finding {
    match printed("git", "--version") {
        Some(version) => ok("git", version),
        None => bad("git", Level::Fail, "git was not found", "install git"),
    }
}

fn http_backend() -> Finding {
    let found =
        printed("git", "--exec-path").is_some_and(|path| Path::new(&path).join("git-http-backend").exists());
    match found {
        true => ok("git_http_backend", "there, for the local forge"),
        false => {
            let found = "git http-backend was not found";
            bad("git_http_backend", Level::Warn, found, "install the whole of git")
        }
    }
}

fn mmdebstrap() -> Finding {
    match printed("mmdebstrap", "--version") {
        Some(version) => ok("mmdebstrap", version.lines().next().unwrap_or("").to_owned()),
        None => bad(
            "mmdebstrap",
            Level::Warn,
            "mmdebstrap was not found; images are bootstrapped with it",
            "install mmdebstrap",
        ),
    }
}
