//! The harvest binary: parses arguments, loads the configuration, runs the verb and turns its
//! result into an exit code.
#![forbid(unsafe_code)]

mod atomic_write;
mod attachments;
mod backend;
mod backup;
mod blob_fetch;
mod bundle;
mod cli;
mod client;
mod commands;
mod config;
mod confirm;
mod copy;
mod database;
mod doctor;
mod follow;
mod identity;
mod images;
mod in_process_doors;
mod inputs;
mod known_secrets;
mod live;
mod local_repository;
mod log;
mod pager;
mod printer;
mod prompt_input;
mod publish;
mod quickstart;
mod recipes;
#[cfg(test)]
mod reference;
mod remote_fs;
mod render;
mod resolve;
mod sanitize;
mod server_process;
mod socket;
mod style;
mod supervisor;
mod table;

use std::process::ExitCode;

use anyhow::{Context, Result};
use harvest_proto::SessionId;

use cli::{Cli, Command, GlobalFlags};
use client::Client;
use config::{Config, process_env};
use printer::Printer;

/// What every verb gets: configuration, global flags and printer.
pub(crate) struct Invocation {
    pub(crate) config: Config,
    pub(crate) flags: GlobalFlags,
    pub(crate) print: Printer,
}

impl Invocation {
    /// The server, and the session that a user means.
    pub(crate) async fn session(&self, typed: &str) -> Result<(Client, SessionId)> {
        let client = Client::find(&self.config)?;
        let id = resolve::session(&client, typed).await?;
        Ok((client, id))
    }
}

fn main() -> ExitCode {
    // Only a single-threaded process can enter a user namespace, so this comes first. The engine
    // reports a failure when it needs the namespace.
    let _ = harvest_engine::rootless::enter();
    let cli = cli::parse(std::env::args_os());
    // The zygote forks sandboxes, so it must never have had a second thread.
    if let Some(Command::Zygote(zygote)) = &cli.command {
        return commands::zygote::main(&zygote.at, zygote.probe);
    }
    let print = Printer::new(&cli.global, &process_env);
    let failure_code = commands::failure_code(cli.command.as_ref());
    match start(cli, print) {
        Ok(code) => ExitCode::from(code),
        Err(error) if printer::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            print.error(&error);
            ExitCode::from(if printer::is_wrong_usage(&error) { 2 } else { failure_code })
        }
    }
}

fn start(cli: Cli, print: Printer) -> Result<u8> {
    match &cli.command {
        Some(Command::Completion(shell)) => return commands::complete(shell),
        Some(Command::Help(args)) => return commands::help(&args.path),
        Some(Command::Version) => return commands::version(print),
        _ => {}
    }
    let config = Config::load(&cli.global, &process_env)?;
    log::start(&config, cli.global.verbose)?;
    // The process-wide TLS provider; an error only means that it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = match commands::serves(cli.command.as_ref()) {
        true => tokio::runtime::Builder::new_multi_thread(),
        false => tokio::runtime::Builder::new_current_thread(),
    };
    let runtime = builder.enable_all().build().context("cannot start the runtime")?;
    let code = runtime
        .block_on(commands::run(&Invocation { config, flags: cli.global, print }, cli.command));
    // A verb that Ctrl-C has ended early leaves its live line.
    live::clear();
    // A blocking read from the terminal cannot be cancelled: do not wait for it.
    runtime.shutdown_background();
    code
}
