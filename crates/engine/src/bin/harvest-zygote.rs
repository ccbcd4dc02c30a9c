//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own. With
//! `--enter` it runs another program as an ordinary user's engine would run: as root of a user namespace.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode},
};

use harvest_engine::Lack;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [enter, program, arguments @ ..] if enter == "--enter" => run_inside(program, arguments),
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

fn run_inside(program: &OsString, arguments: &[OsString]) -> ExitCode {
    if let Err(error) = harvest_engine::rootless::enter() {
        eprintln!("{error}: {:?}\nhint: {}", std::error::Error::source(&error), error.hint());
        return ExitCode::FAILURE;
    }
    eprintln!("{}", Command::new(program).args(arguments).exec());
    ExitCode::FAILURE
}
