//! Shows long results in the user's pager, on a terminal only.

use std::{
    io::{self, Write},
    process::{Child, Command, Stdio},
};

use anyhow::{Context, Result};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    config::{Env, process_env},
    printer::Printer,
};

/// The options of `less`: print what fits on one screen and quit, pass colours, keep the screen.
const LESS: &str = "FRX";

/// Prints sanitized text, through the pager if stdout is a terminal.
pub(crate) fn show(print: Printer, text: &str) -> Result<()> {
    // Ctrl-C is for the pager: if this process ended, the shell would take the terminal back.
    let _ignored = signal(SignalKind::interrupt());
    let pager = command(&process_env).filter(|_| print.pages()).and_then(spawn);
    let Some(mut child) = pager else { return print.styled_out(text) };
    let mut input = child.stdin.take().context("the pager has no standard input")?;
    match input.write_all(text.as_bytes()) {
        // The user has left the pager before its end.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
        written => written.context("cannot write to the pager")?,
    }
    drop(input);
    child.wait().context("cannot wait for the pager")?;
    Ok(())
}

/// The pager's shell command: `HARVEST_PAGER`, `PAGER`, else `less`. None if it is empty or `cat`.
fn command(env: Env) -> Option<String> {
    let chosen = env("HARVEST_PAGER").or_else(|| env("PAGER")).unwrap_or_else(|| "less".to_owned());
    Some(chosen).filter(|command| !["", "cat"].contains(&command.trim()))
}

/// A pager that cannot be started is left out.
fn spawn(command: String) -> Option<Child> {
    let is_installed = |program: &str| {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        program.contains('/') || std::env::split_paths(&paths).any(|at| at.join(program).is_file())
    };
    let program = command.split_whitespace().next()?;
    if !is_installed(program) {
        return None;
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]).stdin(Stdio::piped());
    if std::env::var_os("LESS").is_none() {
        shell.env("LESS", LESS);
    }
    shell.spawn().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_variable_takes_precedence_over_pager() {
        let chosen = |pairs: &'static [(&str, &str)]| {
            command(&|name| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(chosen(&[]).as_deref(), Some("less"));
        assert_eq!(chosen(&[("PAGER", "more")]).as_deref(), Some("more"));
        assert_eq!(chosen(&[("PAGER", "more"), ("HARVEST_PAGER", "bat -p")]).unwrap(), "bat -p");
        assert_eq!(chosen(&[("PAGER", "more"), ("HARVEST_PAGER", "")]), None);
        assert_eq!(chosen(&[("PAGER", "cat")]), None);
    }
}
