//! What is left when something dies or runs out in the middle.

mod disk;
mod kills;
mod server;

use std::process::Command;

use harvest_store::StoreError;

/// This test program once more, to run one test that is left out otherwise: a process to be killed, or one
/// that sees another disk.
fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture"]);
    command
}

/// What a person would be shown.
fn chain(error: &StoreError) -> String {
    let mut words = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        words = format!("{words}: {cause}");
        source = cause.source();
    }
    words
}
