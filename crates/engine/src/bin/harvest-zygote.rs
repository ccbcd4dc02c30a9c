//! Runs the zygote alone, for the engine's tests; the `harvest` binary has its own entry point.
//! Only this program can leave out a guard, so that tests can prove that their probes notice it.
//! With `--enter` it runs another program as root of a user namespace, as an unprivileged user's
//! engine does.

use std::{
    ffi::OsString,
    os::unix::process::CommandExt,
    path::PathBuf,
    process::{Command, ExitCode},
};

use harvest_engine::{DisabledFeature, Namespace, Plan, Step, zygote};
use harvest_proto::Hint;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match &arguments[..] {
        [enter, program, arguments @ ..] if enter == "--enter" => {
            run_in_user_namespace(program, arguments)
        }
        [home] => zygote::main(&PathBuf::from(home)),
        [without, lack, home] if without == "--without" && lack == "nftables" => {
            let disabled = [DisabledFeature::Nftables];
            zygote::main_altered(&PathBuf::from(home), &disabled, Box::new(|_| {}))
        }
        [probe, home] if probe == "--probe" => harvest_engine::probe::main(&PathBuf::from(home)),
        [leave_out, guards, home] if leave_out == "--leave-out" => {
            let guards = guards.to_string_lossy().into_owned();
            let alter =
                move |plan: &mut Plan| guards.split(',').for_each(|guard| remove(guard, plan));
            zygote::main_altered(&PathBuf::from(home), &[], Box::new(alter))
        }
        _ => {
            eprintln!(
                "usage: harvest-zygote [--probe | --without nftables | --leave-out GUARD,…] HOME"
            );
            ExitCode::from(2)
        }
    }
}

fn run_in_user_namespace(program: &OsString, arguments: &[OsString]) -> ExitCode {
    if let Err(error) = harvest_engine::rootless::enter() {
        let hint = error.hint().unwrap_or_default();
        eprintln!("{error}: {:?}\nhint: {hint}", std::error::Error::source(&error));
        return ExitCode::FAILURE;
    }
    eprintln!("{}", Command::new(program).args(arguments).exec());
    ExitCode::FAILURE
}

/// Removes the steps of this name, or the pid namespace.
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
