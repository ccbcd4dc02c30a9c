//! `harvest up`: runs the server until SIGINT or SIGTERM.

use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;

use crate::{
    Invocation,
    cli::UpArgs,
    commands::background,
    identity, known_secrets,
    printer::human_elapsed,
    server_process::{self, RunningServer, ShutdownMode},
};

pub(crate) async fn run(ctx: &Invocation, args: UpArgs) -> Result<u8> {
    if args.detach {
        return background::up(ctx, &args).await;
    }
    if args.detached {
        // A new session: closing the terminal must not stop the server.
        rustix::process::setsid().context("cannot detach from the terminal")?;
    }
    let began = Instant::now();
    let config = &ctx.config;
    let options = server_process::ServerOptions {
        listen: args.listen.unwrap_or(config.listen),
        hosts: config.hosts.iter().cloned().chain(args.hosts).collect(),
        script: vec![],
        host_registries: true,
    };
    if !options.listen.ip().is_loopback() {
        ctx.print.warn(format!(
            "other machines can reach {}, and tokens cross the network in plain http",
            options.listen
        ));
        ctx.print.hint("listen on 127.0.0.1 behind a proxy that adds TLS");
    }
    let server = RunningServer::start(config, options).await.context("cannot start the server")?;
    let time = human_elapsed(began);
    ctx.print.note(format!("Listening on {} after {}", server.url(), time));
    if let Some(token) = server.new_token() {
        ctx.print.note(format!(
            "Token {token} (shown once; stored in {})",
            config.token_file().display()
        ));
    }
    if identity::configured(config).is_none() {
        ctx.print.note("Git knows no user.name and user.email here: requests must name an author");
        ctx.print.hint(
            "`git config --global user.name NAME` and `git config --global user.email EMAIL`",
        );
    }
    let taken: Vec<_> = known_secrets::in_environment(config).into_keys().collect();
    if !taken.is_empty() {
        ctx.print.note(format!("From the environment: {}", taken.join(", ")));
    }
    if let Some(problem) = known_secrets::misnamed() {
        ctx.print.warn(problem);
    }
    ctx.print.hint(
        "in another terminal: `harvest run -r REPOSITORY \"PROMPT\"`; Ctrl-C stops the server",
    );
    if ctx.print.json {
        ctx.print.item(
            &json!({ "url": server.url(), "pid": std::process::id(), "home": config.home }),
        )?;
    }
    server_process::shutdown_signal().await?;
    let mode = if args.keep { ShutdownMode::LeaveRunning } else { ShutdownMode::SuspendSessions };
    ctx.print.note(match mode {
        ShutdownMode::LeaveRunning => {
            "Stopping; sandboxes keep running and the next `harvest up` adopts them; Ctrl-C again stops at once"
        }
        ShutdownMode::SuspendSessions => {
            "Stopping; sandboxes are saved, and the next `harvest up` continues running turns; Ctrl-C again stops at once and leaves sandboxes running"
        }
    });
    let began = Instant::now();
    server.shut_down(mode).await?;
    let time = human_elapsed(began);
    ctx.print.note(format!("Stopped in {time}"));
    Ok(0)
}
