//! The static program inside the sandbox: pid 1 and whatever pid 1 starts of itself.
//!
//! One file, five roles: without an argument it is the supervisor; `nursery` and `launcher` are
//! the small processes between it and the commands, `terminal` is what a command with a terminal is
//! until it runs (see [`processes`]); `scripted-agent` is an agent like any other, which happens to come
//! along (see [`agents::scripted`]).
#![forbid(unsafe_code)]

mod agents;
mod birth;
mod blobs;
mod boot;
mod bridge;
mod capture;
mod cgroup;
mod connection;
mod cut;
mod detached;
mod door;
mod exec;
mod files;
mod git;
mod log;
mod outbox;
mod passing;
mod processes;
mod reaper;
mod run;
mod still;
mod streams;
mod supervisor;
mod terminal;
mod turn;
mod users;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let role = arguments.next();
    if role.as_deref() == Some(agents::scripted::ROLE) {
        return agents::scripted::program::main(arguments.next().as_deref());
    }
    // Nobody inside may look into this process: it holds the bridge and the door.
    if let Err(error) =
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
    {
        log::line(format_args!("cannot become undumpable: {error}"));
    }
    match role.as_deref() {
        None => run::main(),
        Some("nursery") => processes::nursery::main(arguments.next().as_deref()),
        Some("launcher") => processes::launcher::main(arguments.next().as_deref()),
        Some("terminal") => processes::controlled::main(),
        Some(other) => {
            log::line(format_args!("unknown role `{other}`"));
            ExitCode::from(2)
        }
    }
}
