//! A command in a session's sandbox, by way of the server: what it reads and what it says, of any length.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_engine::guest::Output;
use harvest_proto::{
    api::{ExecRequest, STDERR, STDOUT, SocketIn, SocketOut},
    bridge::{Fault, FaultCode},
};

use super::{
    outcome::{Outcome, Sink},
    variables,
};
use crate::{
    Invocation,
    cli::Exec,
    client::Client,
    printer::Advice,
    resolve,
    socket::{self, Heard, Listener, Speaker},
};

/// A frame: what a pipe holds.
const READ_BYTES: usize = 64 * 1024;

pub(super) async fn run(here: &Invocation, args: Exec, place: &str, mut sink: Sink) -> Result<u8> {
    if args.code.is_some() || args.limits.any() || args.volumes.any() {
        let hint = "leave the session out for a fresh sandbox";
        bail!(Advice::new("a session's sandbox takes a command and has its own limits", hint));
    }
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, place).await?;
    let (with_stdin, request) = (args.stdin, request(args)?);
    let (mut speaker, mut listener) =
        socket::open(&client, &format!("/v1/sessions/{id}/exec")).await?;
    speaker.say(&SocketIn::Start(request)).await?;
    let outcome = {
        let mut feeding = std::pin::pin!(feed(&mut speaker, with_stdin));
        let mut hearing = std::pin::pin!(hear(&mut listener, &mut sink));
        tokio::select! {
            outcome = &mut hearing => outcome?,
            // All is sent; or it broke, and then why is better heard from the other side.
            _ = &mut feeding => hearing.await?,
        }
    };
    speaker.close().await;
    let sandbox = client.session(&id).await.ok().and_then(|session| session.sandbox);
    sink.finish(here.print, &outcome, sandbox.map(|sandbox| sandbox.to_string()).as_deref())
}

fn request(args: Exec) -> Result<ExecRequest> {
    Ok(ExecRequest {
        argv: args.command,
        env: variables(&args.env)?,
        cwd: args.workdir,
        user: args.user,
        timeout_millis: args.timeout.map(millis),
        ..ExecRequest::default()
    })
}

/// No time at all is no limit.
fn millis(time: Duration) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 { u64::MAX } else { millis }
}

/// Gives the command our standard input, or none.
async fn feed(speaker: &mut Speaker, with_stdin: bool) -> Result<()> {
    if with_stdin {
        let mut pieces = socket::pieces(std::io::stdin(), READ_BYTES);
        while let Some(piece) = pieces.recv().await {
            speaker.write(piece).await?;
        }
    }
    speaker.say(&SocketIn::End {}).await
}

async fn hear(listener: &mut Listener, sink: &mut Sink) -> Result<Outcome> {
    loop {
        match listener.hear().await? {
            Heard::Bytes(bytes) => match bytes.split_first() {
                Some((&STDOUT, bytes)) => sink.take(Output::Stdout, bytes)?,
                Some((&STDERR, bytes)) => sink.take(Output::Stderr, bytes)?,
                _ => bail!("the server sent output of nobody knows what"),
            },
            Heard::Said(SocketOut::Exited { exit, millis }) => {
                return Ok(Outcome::exited(exit, millis));
            }
            Heard::Said(SocketOut::Failed { code, message }) => {
                return Ok(Outcome::refused(&Fault::new(fault(&code), message)));
            }
        }
    }
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
