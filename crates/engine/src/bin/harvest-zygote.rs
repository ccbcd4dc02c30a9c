//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own.

use std::{path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    match std::env::args_os().nth(1) {
        Some(home) => harvest_engine::zygote::main(&PathBuf::from(home)),
        None => {
            eprintln!("usage: harvest-zygote HOME");
            ExitCode::from(2)
        }
    }
}
