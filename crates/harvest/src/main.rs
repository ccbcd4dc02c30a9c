//! The harvest binary: parse, load the configuration, run the verb, turn its result into an exit code.
#![forbid(unsafe_code)]

mod cli;
mod client;
mod commands;
mod config;
mod copy;
mod database;
mod desk;
mod doctor;
mod far;
mod follow;
mod images;
mod inputs;
mod log;
mod plain;
mod printer;
mod publish;
mod quickstart;
mod recipes;
#[cfg(test)]
mod reference;
mod render;
mod resolve;
mod socket;
mod supervisor;
mod whole;
mod wire;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use cli::{Cli, Command, Global};
use config::{Config, process_env};
use printer::Printer;

/// What a verb is given: what was configured, and where to print.
pub(crate) struct Invocation {
    pub(crate) config: Config,
    pub(crate) flags: Global,
    pub(crate) print: Printer,
}

fn main() -> ExitCode {
    // Only a process without threads can become root of a user namespace, so it comes first. Who cannot
    // is told by the engine, should it be needed.
    let _told_by_the_engine = harvest_engine::rootless::enter();
    let cli = Cli::parse_from(cli::arguments(std::env::args_os()));
    // The zygote forks sandboxes: it must never have had a second thread, so it comes before everything.
    if let Some(Command::Zygote(zygote)) = &cli.command {
        return commands::zygote::main(&zygote.at, zygote.probe);
    }
    let print = Printer::new(&cli.global, &process_env);
    let ours = commands::failure_code(cli.command.as_ref());
    match start(cli, print) {
        Ok(code) => ExitCode::from(code),
        Err(error) if printer::reader_left(&error) => ExitCode::SUCCESS,
        Err(error) => {
            print.error(&error);
            ExitCode::from(ours)
        }
    }
}

fn start(cli: Cli, print: Printer) -> Result<u8> {
    if let Some(Command::Completion(shell)) = &cli.command {
        return commands::complete(shell);
    }
    let config = Config::load(&cli.global, &process_env)?;
    log::start(&config, cli.global.verbose)?;
    // Everything that speaks TLS uses this one; a second call would only find the first.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = match commands::serves(cli.command.as_ref()) {
        true => tokio::runtime::Builder::new_multi_thread(),
        false => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build().context("cannot start the runtime")?;
    let code = runtime
        .block_on(commands::run(&Invocation { config, flags: cli.global, print }, cli.command));
    // What still reads from a terminal cannot be cancelled, and nothing waits for it.
    runtime.shutdown_background();
    code
}
