//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own. With
//! `enter` it runs another program as an ordinary user's engine would run: as root of a user namespace.

use std::{
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode},
};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    match arguments.next() {
        Some(word) if word == "enter" => {
            if let Err(error) = harvest_engine::rootless::enter() {
                eprintln!("{error}: {:?}\nhint: {}", std::error::Error::source(&error), error.hint());
                return ExitCode::FAILURE;
            }
            let error = Command::new(arguments.next().unwrap_or_default()).args(arguments).exec();
            eprintln!("{error}");
            ExitCode::FAILURE
        }
        Some(home) => harvest_engine::zygote::main(&PathBuf::from(home)),
        None => {
            eprintln!("usage: harvest-zygote HOME");
            ExitCode::from(2)
        }
    }
}
