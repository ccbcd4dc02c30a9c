//! The static program inside the sandbox: pid 1 and its helper processes.
//!
//! One binary with six roles. Without an argument it is the supervisor; `spawner` and `launcher`
//! are the processes between it and the commands, and `exec` prepares a child before it executes a
//! command (see [`processes`]); `git` runs the git commands of a request (see
//! [`git::program`]); `scripted-agent` is the built-in agent (see [`agents::scripted`]).
#![forbid(unsafe_code)]

mod agents;
mod app;
mod blobs;
mod boot;
mod bridge;
mod capture;
mod cgroup;
mod connection;
mod detached;
mod door;
mod exec;
mod fd_passing;
mod files;
mod freeze;
mod git;
mod install;
mod launch;
mod log;
mod meminfo;
mod outbox;
mod pipes;
mod processes;
mod pty;
mod reaper;
mod resolve;
mod run;
mod sandbox;
mod settings;
mod streams;
mod sync;
mod truncate;
mod turn;
mod users;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next();
    if role.as_deref() == Some(agents::scripted::ROLE) {
        return agents::scripted::program::main(arguments.next().as_deref());
    }
    // Processes inside must not be able to trace this one: it holds the bridge and the door.
    if let Err(error) =
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
    {
        log::line(format_args!("cannot become undumpable: {error}"));
    }
    if matches!(role.as_deref(), None | Some("spawner" | "launcher")) {
        refuse_prlimit();
    }
    match role.as_deref() {
        None => run::main(),
        Some("spawner") => processes::spawner::main(arguments.next().as_deref()),
        Some("launcher") => processes::launcher::main(arguments.next().as_deref()),
        Some(processes::exec_role::ROLE) => processes::exec_role::main(),
        Some(git::program::ROLE) => {
            let (checkout, job) = (arguments.next(), arguments.next());
            git::program::main(checkout.as_deref(), job.as_deref())
        }
        Some(other) => {
            log::line(format_args!("unknown role `{other}`"));
            ExitCode::from(2)
        }
    }
}

// Not the group of root, and in every sandbox: `nogroup` on most systems.
const SAVED_GROUP: u32 = 65_534;

/// Keeps root inside from setting limits of this process, for example of its CPU time, which would
/// kill it. Without SYS_RESOURCE, prlimit requires that the three group ids of the target are equal
/// to the caller's; the saved one serves no other purpose. An exec resets it.
fn refuse_prlimit() {
    let group = rustix::process::Gid::from_raw(SAVED_GROUP);
    if let Err(error) = rustix::thread::set_thread_res_gid(None, None, Some(group)) {
        log::line(format_args!("cannot refuse prlimit: {error}"));
    }
}
