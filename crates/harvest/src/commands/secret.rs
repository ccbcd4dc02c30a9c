//! `harvest secret`: secrets go in and are used by the gateway; nothing shows them again.

use std::io::{BufRead, IsTerminal, Read};

use anyhow::{Context, Result, bail};
use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

use crate::{Invocation, cli::Secret, client::Client, printer::Advice};

pub(crate) async fn run(here: &Invocation, verb: &Secret) -> Result<u8> {
    let client = Client::find(&here.config)?;
    match verb {
        Secret::Set { name } => {
            client
                .secret_set(name, &read_value(here, name)?)
                .await
                .with_context(|| format!("cannot store {name}"))?;
            here.print.note(format!("Stored {name}"));
        }
        Secret::Ls => {
            let names = client.secrets().await?;
            here.print.result(&names, |names| names.iter().map(|name| format!("{name}\n")).collect())?;
        }
        Secret::Rm { name } => {
            client.secret_delete(name).await?;
            here.print.note(format!("Forgot {name}"));
        }
    }
    Ok(0)
}

/// From a pipe to its end, or one line typed without an echo. Never an argument: those show in `ps`.
fn read_value(here: &Invocation, name: &str) -> Result<harvest_proto::Secret<String>> {
    let mut value = String::new();
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        here.print.raw_note(&format!("{name}: "));
        let before = tcgetattr(&stdin).context("cannot silence the terminal")?;
        let mut silent = before.clone();
        silent.local_modes.remove(LocalModes::ECHO);
        tcsetattr(&stdin, OptionalActions::Flush, &silent).context("cannot silence the terminal")?;
        let read = stdin.lock().read_line(&mut value);
        let restored = tcsetattr(&stdin, OptionalActions::Flush, &before);
        here.print.note("");
        read.context("cannot read the value")?;
        restored.context("cannot restore the terminal; `stty echo` does")?;
    } else {
        stdin.lock().read_to_string(&mut value).context("cannot read the value")?;
    }
    let value = value.trim_end_matches(['\n', '\r']);
    if value.is_empty() {
        bail!(Advice::new("the value is empty", format!("pipe it in: `harvest secret set {name} < FILE`")));
    }
    Ok(harvest_proto::Secret::new(value.to_owned()))
}
