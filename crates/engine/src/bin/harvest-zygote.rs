//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own. It alone
//! knows how to leave a guard out, so that the tests can show that their probes find an open way. With
//! `--enter` it runs another program as an ordinary user's engine would run: as root of a user namespace.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode},
};

use harvest_engine::{Lack, Namespace, Plan, Step, zygote};

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [enter, program, arguments @ ..] if enter == "--enter" => run_inside(program, arguments),
        [home] => zygote::main(&PathBuf::from(home)),
        [without, lack, home] if without == "--without" && lack == "nftables" => {
            zygote::main_without(&PathBuf::from(home), &[Lack::Nftables])
        }
        [probe, home] if probe == "--probe" => harvest_engine::probe::main(&PathBuf::from(home)),
        [leave_out, guards, home] if leave_out == "--leave-out" => {
            let guards = guards.to_string_lossy().into_owned();
            let alter =
                move |plan: &mut Plan| guards.split(',').for_each(|guard| remove(guard, plan));
            zygote::main_altered(&PathBuf::from(home), Box::new(alter))
        }
        _ => {
            eprintln!(
                "usage: harvest-zygote [--probe | --without nftables | --leave-out GUARD,…] HOME"
            );
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

/// Leaves out the steps of this name, or the pid namespace.
fn remove(guard: &str, plan: &mut Plan) {
    if guard == "pid_namespace" {
        for step in &mut plan.steps {
            if let Step::Clone { namespaces, .. } = step {
                namespaces.retain(|namespace| *namespace != Namespace::Pid);
            }
        }
        return;
    }
    plan.steps.retain(|step| serde_json::to_value(step).is_ok_and(|step| step["step"] != guard));
}
