//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own.

use harvest_engine::Lack;
use std::{path::PathBuf, process::ExitCode};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [home] => harvest_engine::zygote::main(&PathBuf::from(home)),
        [without, lack, home] if without == "--without" && lack == "nftables" => {
            harvest_engine::zygote::main_without(&PathBuf::from(home), &[Lack::Nftables])
        }
        [probe, home] if probe == "--probe" => harvest_engine::probe::main(&PathBuf::from(home)),
        _ => {
            eprintln!("usage: harvest-zygote [--probe | --without nftables] HOME");
            ExitCode::from(2)
        }
    }
}
