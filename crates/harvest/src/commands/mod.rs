//! One file per verb. Each calls the server (or, for what needs none, the machine) and prints.

mod api;
mod archive;
mod attach;
mod background;
mod completion;
mod config;
mod cp;
mod df;
mod diff;
mod doctor;
mod events;
mod exec;
mod fork;
mod gc;
mod held;
mod image;
mod logs;
mod ls;
mod pause;
mod pr;
mod queue;
mod quickstart;
mod repo;
mod restore;
mod resume;
mod rm;
mod run;
mod sandbox;
mod secret;
mod send;
mod shell;
mod show;
mod snapshot;
mod status;
mod stop;
mod terminate;
mod token;
mod turns;
mod up;
mod volume;
pub(crate) mod watch;
pub(crate) mod zygote;

use anyhow::Result;

pub(crate) use completion::run as complete;
pub(crate) use doctor::line as check_line;
pub(crate) use pr::text as pull_text;
pub(crate) use repo::build as build_repository;

use crate::{
    Invocation,
    cli::{Command, Sandbox},
};

/// The work failed.
pub(crate) const FAILED: u8 = 1;

/// Carries a verb out; the answer is the exit code.
pub(crate) async fn run(here: &Invocation, command: Option<Command>) -> Result<u8> {
    let Some(command) = command else { return status::run(here).await };
    match command {
        Command::Quickstart(args) => quickstart::run(here, &args).await,
        Command::Up(args) => up::run(here, args).await,
        Command::Down => background::down(here).await,
        Command::Doctor => doctor::run(here),
        Command::Run(args) => run::run(here, args).await,
        Command::Ls(args) => ls::run(here, args).await,
        Command::Show(args) => show::run(here, &args).await,
        Command::Attach(args) => attach::run(here, &args).await,
        Command::Send(args) => send::run(here, args).await,
        Command::Queue(verb) => queue::run(here, &verb).await,
        Command::Stop(args) => stop::run(here, &args).await,
        Command::Pause(args) => pause::run(here, &args).await,
        Command::Resume(args) => resume::run(here, &args).await,
        Command::Fork(args) => fork::run(here, args).await,
        Command::Restore(args) => restore::run(here, &args).await,
        Command::Terminate(args) => terminate::run(here, &args).await,
        Command::Archive(args) => archive::run(here, &args).await,
        Command::Rm(args) => rm::run(here, &args).await,
        Command::Turns(args) => turns::run(here, &args).await,
        Command::Diff(args) => diff::run(here, &args).await,
        Command::Events(args) => events::run(here, &args).await,
        Command::Logs(args) => logs::run(here, &args).await,
        Command::Exec(args) => exec::run(here, *args).await,
        Command::Cp(args) => cp::run(here, args).await,
        Command::Shell(args) => shell::run(here, args).await,
        Command::Pr(verb) => pr::run(here, &verb).await,
        Command::Repo(verb) => repo::run(here, verb).await,
        Command::Secret(verb) => secret::run(here, &verb).await,
        Command::Token(verb) => token::run(here, verb).await,
        Command::Api(args) => api::run(here, args).await,
        Command::Completion(_) => unreachable!("main prints it before anything is configured"),
        Command::Config(args) => config::run(here, &args),
        Command::Image(verb) => image::run(here, verb).await,
        Command::Sandbox(verb) => sandbox::run(here, verb).await,
        Command::Snapshot(verb) => snapshot::run(here, &verb).await,
        Command::Volume(verb) => volume::run(here, verb).await,
        Command::Df => df::run(here).await,
        Command::Gc(args) => gc::run(here, &args).await,
        Command::Zygote(_) => unreachable!("main runs the zygote before there is a runtime"),
    }
}

/// The exit code of an error of our own: `exec` must not be taken for the command's.
pub(crate) fn failure_code(command: Option<&Command>) -> u8 {
    match command {
        Some(Command::Exec(_) | Command::Shell(_) | Command::Sandbox(Sandbox::Shell(_))) => 125,
        _ => FAILED,
    }
}

/// Whether a verb serves others; one that only asks is done with one thread.
pub(crate) fn serves(command: Option<&Command>) -> bool {
    matches!(command, Some(Command::Up(_) | Command::Quickstart(_)))
}
