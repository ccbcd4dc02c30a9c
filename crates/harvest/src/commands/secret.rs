//! `harvest secret`: secrets go in and are used by the gateway; nothing shows them again.

use std::io::{BufRead, IsTerminal};

use anyhow::{Context, Result, bail};
use harvest_gateway::vault::SecretName;
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::{Invocation, cli::Secret, client::Client, printer::Advice};

pub(crate) async fn run(here: &Invocation, verb: &Secret) -> Result<u8> {
    let client = Client::find(&here.config)?;
    match verb {
        Secret::Set { name } => {
            client
                .secret_set(name, &read_value(here, name).await?)
                .await
                .with_context(|| format!("cannot store {name}"))?;
            here.print.result(&json!({ "stored": name }), |_| String::new())?;
            here.print.note(format!("Stored {name}"));
        }
        Secret::Ls => {
            let names = client.secrets().await?;
            here.print
                .result(&names, |names| names.iter().map(|name| format!("{name}\n")).collect())?;
        }
        Secret::Rm { name } => {
            client.secret_delete(name).await?;
            here.print.result(&json!({ "forgotten": name }), |_| String::new())?;
            here.print.note(format!("Forgot {name}"));
        }
    }
    Ok(0)
}

/// From a pipe to its end, or one line typed without an echo. Never an argument: those show in `ps`.
async fn read_value(here: &Invocation, name: &str) -> Result<harvest_proto::Secret<String>> {
    // Before anybody types a secret for nothing.
    name.parse::<SecretName>().map_err(|error| {
        Advice::new(
            format!("`{name}` cannot be stored"),
            format!("{error}, such as ANTHROPIC_API_KEY"),
        )
    })?;
    let value = match std::io::stdin().is_terminal() {
        true => read_typed(here, name).await?,
        false => std::io::read_to_string(std::io::stdin()).context("cannot read the value")?,
    };
    let value = value.trim_end_matches(['\n', '\r']);
    if value.is_empty() {
        bail!(Advice::new(
            "the value is empty",
            format!("pipe it in: `harvest secret set {name} < FILE`")
        ));
    }
    Ok(harvest_proto::Secret::new(value.to_owned()))
}

/// The terminal gets its echo back whatever happens meanwhile, ctrl-c included.
async fn read_typed(here: &Invocation, name: &str) -> Result<String> {
    let stdin = std::io::stdin();
    let mut interrupted = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminated = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let before = tcgetattr(&stdin).context("cannot silence the terminal")?;
    let mut silent = before.clone();
    silent.local_modes.remove(LocalModes::ECHO);
    tcsetattr(&stdin, OptionalActions::Flush, &silent).context("cannot silence the terminal")?;
    here.print.ask(&format!("{name} (not shown): "));
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
        .context("the echo is off; `stty echo` turns it on")?;
    here.print.ask("\n");
    match typed {
        Some(typed) => typed?.context("cannot read the value"),
        None => bail!("interrupted; nothing was stored"),
    }
}
