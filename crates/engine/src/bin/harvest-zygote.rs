//! Runs the zygote by itself, for the engine's own tests; the `harvest` binary brings its own. It alone
//! knows how to leave a guard out, so that the tests can show that their probes find an open way.

use std::{path::PathBuf, process::ExitCode};

use harvest_engine::{Namespace, Plan, Step, zygote};

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    let Some(home) = words.pop().map(PathBuf::from) else {
        eprintln!("usage: harvest-zygote [GUARD-TO-LEAVE-OUT]... HOME");
        return ExitCode::from(2);
    };
    zygote::main_altered(&home, Box::new(move |plan| words.iter().for_each(|guard| leave_out(plan, guard))))
}

/// Leaves out the steps of this name, or the namespace of this name.
fn leave_out(plan: &mut Plan, guard: &str) {
    if guard == "pid_namespace" {
        for step in &mut plan.steps {
            if let Step::Clone { namespaces, .. } = step {
                namespaces.retain(|namespace| *namespace != Namespace::Pid);
            }
        }
        return;
    }
    plan.steps.retain(|step| {
        serde_json::to_value(step).is_ok_and(|step| step["step"].as_str().is_some_and(|name| name != guard))
    });
}
