//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own.

use std::{path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [home] => harvest_engine::zygote::main(&PathBuf::from(home)),
        [probe, home] if probe == "--probe" => harvest_engine::probe::main(&PathBuf::from(home)),
        _ => {
            eprintln!("usage: harvest-zygote [--probe] HOME");
            ExitCode::from(2)
        }
    }
}
