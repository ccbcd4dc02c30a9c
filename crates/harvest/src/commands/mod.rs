//! One file per verb. Each calls the server, or the engine if it needs no server, and prints.

mod answers;
mod api;
mod archive;
mod artifacts;
mod attach;
mod background;
mod backup;
mod budget;
mod completion;
mod config;
mod cp;
mod df;
mod diff;
mod doctor;
mod events;
mod exec;
mod first_start;
mod fork;
mod gc;
mod help;
mod image;
mod logs;
mod ls;
mod mcp;
mod memory;
mod models;
mod net;
mod pause;
mod pr;
mod pull;
mod queue;
mod quickstart;
mod repo;
mod restore;
mod resume;
mod retention_report;
mod rm;
mod run;
mod sandbox;
mod schedule;
mod secret;
mod send;
mod shell;
mod show;
mod snapshot;
mod stats;
mod status;
mod stop;
mod sync;
mod terminate;
mod token;
mod turns;
mod up;
mod user;
mod verify;
mod volume;
pub(crate) mod watch;
pub(crate) mod zygote;

use anyhow::Result;

pub(crate) use completion::run as complete;
pub(crate) use doctor::line as check_line;
pub(crate) use help::{help, version};
pub(crate) use pr::text as pull_request_text;
pub(crate) use repo::build as build_repository;

use crate::{
    Invocation,
    cli::{Command, SandboxCommand},
};

/// The exit code of a failure.
pub(crate) const FAILED: u8 = 1;

/// The exit code when a followed session waits for an answer that cannot be typed here.
pub(crate) const NEEDS_INPUT: u8 = 3;

/// Runs a verb; returns the exit code.
pub(crate) async fn run(ctx: &Invocation, command: Option<Command>) -> Result<u8> {
    let Some(command) = command else { return status::run(ctx).await };
    match command {
        Command::Quickstart(args) => quickstart::run(ctx, &args).await,
        Command::Up(args) => up::run(ctx, args).await,
        Command::Down => background::down(ctx).await,
        Command::Doctor => doctor::run(ctx).await,
        Command::Run(args) => run::run(ctx, args).await,
        Command::Ls(args) => ls::run(ctx, args).await,
        Command::Show(args) => show::run(ctx, &args).await,
        Command::Attach(args) => attach::run(ctx, &args).await,
        Command::Send(args) => send::run(ctx, args).await,
        Command::Artifacts(args) => artifacts::run(ctx, args).await,
        Command::Queue(verb) => queue::run(ctx, &verb).await,
        Command::Stop(args) => stop::run(ctx, &args).await,
        Command::Pause(args) => pause::run(ctx, &args).await,
        Command::Resume(args) => resume::run(ctx, &args).await,
        Command::Fork(args) => fork::run(ctx, args).await,
        Command::Restore(args) => restore::run(ctx, &args).await,
        Command::Sync(args) => sync::run(ctx, &args).await,
        Command::Pull(args) => pull::run(ctx, &args).await,
        Command::Terminate(args) => terminate::run(ctx, &args).await,
        Command::Archive(args) => archive::run(ctx, &args).await,
        Command::Rm(args) => rm::run(ctx, &args).await,
        Command::Turns(args) => turns::run(ctx, &args).await,
        Command::Diff(args) => diff::run(ctx, &args).await,
        Command::Events(args) => events::run(ctx, &args).await,
        Command::Logs(args) => logs::run(ctx, &args).await,
        Command::Exec(args) => exec::run(ctx, *args).await,
        Command::Cp(args) => cp::run(ctx, args).await,
        Command::Shell(args) => shell::run(ctx, args).await,
        Command::Pr(verb) => pr::run(ctx, &verb).await,
        Command::Verify(args) => verify::run(ctx, &args).await,
        Command::Repo(verb) => repo::run(ctx, verb).await,
        Command::Schedule(verb) => schedule::run(ctx, verb).await,
        Command::Secret(verb) => secret::run(ctx, &verb).await,
        Command::Models => models::run(ctx).await,
        Command::Budget(args) => budget::run(ctx, args).await,
        Command::Stats(args) => stats::run(ctx, &args).await,
        Command::Memory(verb) => memory::run(ctx, verb).await,
        Command::Net(verb) => net::run(ctx, &verb).await,
        Command::Token(verb) => token::run(ctx, verb).await,
        Command::User(verb) => user::run(ctx, verb).await,
        Command::Api(args) => api::run(ctx, args).await,
        Command::Mcp => mcp::run(ctx).await,
        Command::Completion(_) | Command::Help(_) | Command::Version => {
            unreachable!("main handles it before the configuration is loaded")
        }
        Command::Config(args) => config::run(ctx, &args),
        Command::Image(verb) => image::run(ctx, verb).await,
        Command::Sandbox(verb) => sandbox::run(ctx, verb).await,
        Command::Snapshot(verb) => snapshot::run(ctx, &verb).await,
        Command::Volume(verb) => volume::run(ctx, verb).await,
        Command::Backup(verb) => backup::run(ctx, &verb).await,
        Command::Df => df::run(ctx).await,
        Command::Gc(args) => gc::run(ctx, &args).await,
        Command::Zygote(_) => unreachable!("main handles it before the runtime starts"),
    }
}

/// The exit code of Harvest's own errors: for `exec` it differs from the command's exit codes.
pub(crate) fn failure_code(command: Option<&Command>) -> u8 {
    match command {
        Some(Command::Exec(_) | Command::Shell(_) | Command::Sandbox(SandboxCommand::Shell(_))) => {
            125
        }
        Some(Command::Verify(_)) => verify::NOT_RUN,
        _ => FAILED,
    }
}

/// Whether a verb runs a server; all others need only one thread.
pub(crate) fn serves(command: Option<&Command>) -> bool {
    matches!(command, Some(Command::Up(_) | Command::Quickstart(_)))
}
