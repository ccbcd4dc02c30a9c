//! A command in a session's sandbox, by way of the server.

use std::io::Read;

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_engine::guest::Output;
use harvest_proto::{
    api::{ExecLine, ExecRequest},
    bridge::{Fault, FaultCode},
};

use super::{
    outcome::{Outcome, Sink},
    variables,
};
use crate::{Invocation, cli::Exec, client::Client, printer::Advice, resolve};

/// What fits into one request, in base64 and with room for the rest.
const MAX_STDIN_BYTES: u64 = 700 * 1024;

pub(super) async fn run(here: &Invocation, args: Exec, place: &str, mut sink: Sink) -> Result<u8> {
    if args.code.is_some() || args.limits.any() || args.volumes.any() {
        let hint = "leave the session out for a fresh sandbox";
        bail!(Advice::new("a session's sandbox takes a command and has its own limits", hint));
    }
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, place).await?;
    let mut lines = client.exec(&id, &request(args)?).await?;
    while let Some(line) = lines.json::<ExecLine>().await? {
        let outcome = match line {
            ExecLine::Stdout { data } => {
                sink.take(Output::Stdout, &bytes(&data)?)?;
                continue;
            }
            ExecLine::Stderr { data } => {
                sink.take(Output::Stderr, &bytes(&data)?)?;
                continue;
            }
            ExecLine::Started { .. } => continue,
            ExecLine::Exited { exit, millis, .. } => Outcome::exited(exit, millis),
            ExecLine::Failed { code, message } => Outcome::refused(&Fault::new(fault(&code), message)),
        };
        let sandbox = client.session(&id).await.ok().and_then(|session| session.sandbox);
        return sink.finish(here.print, &outcome, sandbox.map(|sandbox| sandbox.to_string()).as_deref());
    }
    bail!("the server went away before the command ended")
}

fn request(args: Exec) -> Result<ExecRequest> {
    let stdin = if args.stdin { Some(read_stdin()?) } else { None };
    Ok(ExecRequest {
        argv: args.command,
        env: variables(&args.env)?,
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

pub(super) fn bytes(data: &str) -> Result<Vec<u8>> {
    BASE64_STANDARD.decode(data).context("the server sent output that is not base64")
}

/// The server's word for why a command did not run, as the supervisor would have put it.
pub(super) fn fault(code: &str) -> FaultCode {
    match code {
        "not_executable" => FaultCode::NotExecutable,
        "denied" => FaultCode::Denied,
        "not_found" => FaultCode::NotFound,
        _ => FaultCode::System,
    }
}
