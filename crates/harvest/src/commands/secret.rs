//! `harvest secret`: stores, lists and removes secrets. Values are never shown again.

use std::io::{BufRead, IsTerminal};

use anyhow::{Context, Result, bail};
use harvest_gateway::vault::SecretName;
use harvest_proto::Secret;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    Invocation,
    cli::SecretCommand,
    client::{Client, path_segment},
    printer::Advice,
};

pub(crate) async fn run(ctx: &Invocation, verb: &SecretCommand) -> Result<u8> {
    let client = Client::find(&ctx.config)?;
    match verb {
        SecretCommand::Set { name } => {
            client
                .secret_set(name, &read_value(ctx, name).await?)
                .await
                .with_context(|| format!("cannot store {name}"))?;
            ctx.print.document(&json!({ "stored": name }))?;
            ctx.print.note(format!("Stored {name}"));
        }
        SecretCommand::Ls => {
            let names: Vec<String> = client.all("/v1/secrets").await?;
            ctx.print
                .result(&names, |names| names.iter().map(|name| format!("{name}\n")).collect())?;
        }
        SecretCommand::Rm { name } => {
            client.delete(&format!("/v1/secrets/{}", path_segment(name)?)).await?;
            ctx.print.document(&json!({ "removed": name }))?;
            ctx.print.note(format!("Removed {name}"));
        }
    }
    Ok(0)
}

/// Reads the value from a pipe, or one typed line without echo. Not from an argument: those are
/// visible in `ps`.
async fn read_value(ctx: &Invocation, name: &str) -> Result<Secret<String>> {
    // Checked before the user types the value.
    name.parse::<SecretName>().map_err(|error| {
        Advice::new(
            format!("`{name}` is not a valid name for a secret"),
            format!("{error}, such as ANTHROPIC_API_KEY"),
        )
    })?;
    let value = match std::io::stdin().is_terminal() {
        true => read_typed(ctx, name).await?,
        false => std::io::read_to_string(std::io::stdin()).context("cannot read the value")?,
    };
    let value = value.trim_end_matches(['\n', '\r']);
    if value.is_empty() {
        bail!(Advice::new(
            "the value is empty",
            format!("pipe it in: `harvest secret set {name} < FILE`")
        ));
    }
    Ok(Secret::new(value.to_owned()))
}

/// Restores the terminal's echo in every case, also on Ctrl-C.
async fn read_typed(ctx: &Invocation, name: &str) -> Result<String> {
    let stdin = std::io::stdin();
    let mut interrupted = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminated = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let before = tcgetattr(&stdin).context("cannot turn off the terminal's echo")?;
    let mut silent = before.clone();
    silent.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&stdin, OptionalActions::Flush, &silent)
        .context("cannot turn off the terminal's echo")?;
    ctx.print.prompt(&format!("{name} (not shown): "));
    let typed = tokio::task::spawn_blocking(|| {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map(|_| line)
    });
    let typed = tokio::select! {
        typed = typed => Some(typed),
        _ = interrupted.recv() => None,
        _ = terminated.recv() => None,
    };
    tcsetattr(&stdin, OptionalActions::Flush, &before)
        .context("cannot turn the terminal's echo on again; run `stty echo`")?;
    ctx.print.prompt("\n");
    match typed {
        Some(typed) => typed?.context("cannot read the value"),
        None => bail!("interrupted; nothing was stored"),
    }
}
