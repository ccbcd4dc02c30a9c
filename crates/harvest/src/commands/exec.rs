//! `harvest exec`: a command in a session's sandbox; its output as it is, as `ssh` would give it, and its
//! own exit code.

use std::io::{Read, Write};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::{
    api::{ExecLine, ExecRequest},
    bridge::Exit,
};

use crate::{
    Invocation,
    cli::Exec,
    client::Client,
    printer::{Advice, write_bytes},
    resolve,
};

/// Ours failed, not the command.
const OURS: u8 = 125;

/// What fits into one request, in base64 and with room for the rest.
const MAX_STDIN_BYTES: u64 = 700 * 1024;

pub(crate) async fn run(here: &Invocation, args: Exec) -> Result<u8> {
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let mut lines = client.exec(&id, &request(args)?).await?;
    while let Some(line) = lines.json::<ExecLine>().await? {
        if here.print.json {
            here.print.item(&line)?;
        }
        match line {
            ExecLine::Stdout { data } if !here.print.json => write_bytes(&bytes(&data)?)?,
            ExecLine::Stderr { data } if !here.print.json => {
                // Nobody is left to tell when stderr is gone; the command's result still counts.
                let _ = std::io::stderr().lock().write_all(&bytes(&data)?);
            }
            ExecLine::Stdout { .. } | ExecLine::Stderr { .. } => {}
            ExecLine::Exited { exit, .. } => return Ok(code(exit)),
            ExecLine::Failed { code, message } => {
                here.print.error(&anyhow::anyhow!("{message}"));
                return Ok(failed(&code));
            }
        }
    }
    bail!("the server went away before the command ended")
}

fn request(args: Exec) -> Result<ExecRequest> {
    let mut env = std::collections::BTreeMap::new();
    for variable in args.env {
        let Some((name, value)) = variable.split_once('=') else {
            bail!(Advice::new(format!("`{variable}` is not a variable"), "write it as NAME=VALUE"));
        };
        env.insert(name.to_owned(), value.to_owned());
    }
    let stdin = if args.interactive { Some(read_stdin()?) } else { None };
    Ok(ExecRequest {
        argv: args.command,
        env,
        cwd: args.workdir,
        user: args.user,
        timeout_millis: args.timeout.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX)),
        stdin,
    })
}

fn read_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAX_STDIN_BYTES + 1)
        .read_to_end(&mut bytes)
        .context("cannot read standard input")?;
    if bytes.len() as u64 > MAX_STDIN_BYTES {
        let hint = "put it into the session's checkout and let the command read the file";
        bail!(Advice::new(format!("standard input is longer than {MAX_STDIN_BYTES} bytes"), hint));
    }
    Ok(BASE64_STANDARD.encode(bytes))
}

fn bytes(data: &str) -> Result<Vec<u8>> {
    BASE64_STANDARD.decode(data).context("the server sent output that is not base64")
}

/// The command's own code; shells' habits for the rest.
fn code(exit: Exit) -> u8 {
    match exit {
        Exit::Code(code) => u8::try_from(code & 0xff).unwrap_or(OURS),
        Exit::Signal(signal) => 128u8.wrapping_add(u8::try_from(signal & 0x7f).unwrap_or(0)),
        Exit::Timeout => 124,
        Exit::Oom | Exit::Killed => 137,
    }
}

/// A command that could not be started, as shells number it.
fn failed(code: &str) -> u8 {
    match code {
        "not_executable" | "denied" => 126,
        "not_found" => 127,
        _ => OURS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_the_commands_own_or_says_why_there_is_none() {
        let codes = [Exit::Code(0), Exit::Code(7), Exit::Code(256 + 3), Exit::Signal(15)].map(code);
        assert_eq!(codes, [0, 7, 3, 143]);
        assert_eq!([Exit::Timeout, Exit::Oom, Exit::Killed].map(code), [124, 137, 137]);
        assert_eq!(["not_found", "not_executable", "sandbox_lost"].map(failed), [127, 126, 125]);
    }
}
