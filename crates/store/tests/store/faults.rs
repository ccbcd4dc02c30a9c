//! Crashes, full disks and lost connections in the middle of writes.

mod disk;
mod kills;
mod server;

use std::process::Command;

use harvest_store::StoreError;

/// Runs an ignored test of this program in a new process: one to be killed, or one with another
/// disk.
fn run_ignored(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command
}

/// The error with its causes.
fn error_chain(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
