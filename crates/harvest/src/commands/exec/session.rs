//! `harvest exec` in a session's sandbox, over a WebSocket: standard input and output of any
//! length.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_engine::supervisor_client::Output;
use harvest_proto::{
    api::{ExecRequest, STDERR, STDOUT, SocketIn, SocketOut},
    bridge::{Fault, FaultCode},
};

use super::{
    outcome::{CommandOutcome, OutputSink},
    variables,
};
use crate::{
    Invocation,
    cli::ExecArgs,
    client::Client,
    printer::Advice,
    resolve,
    socket::{self, Incoming, SocketReader, SocketWriter},
};

/// Linux's default pipe capacity, so one read empties a full pipe.
const READ_BYTES: usize = 64 * 1024;

pub(super) async fn run(
    ctx: &Invocation,
    args: ExecArgs,
    typed: &str,
    mut sink: OutputSink,
) -> Result<u8> {
    if args.code.is_some() || args.limits.is_any_set() || args.volumes.is_any_set() {
        let hint = "omit the session to use a fresh sandbox";
        bail!(Advice::new(
            "--code, limits and volumes are not available in a session's sandbox",
            hint
        ));
    }
    let client = Client::find(&ctx.config)?;
    let id = resolve::session(&client, typed).await?;
    let (with_stdin, request) = (args.stdin, request(args)?);
    let (mut writer, mut reader) =
        socket::open(&client, &format!("/v1/sessions/{id}/exec")).await?;
    writer.send(&SocketIn::Start(request)).await?;
    let outcome = {
        let mut feeding = std::pin::pin!(feed(&mut writer, with_stdin));
        let mut receiving = std::pin::pin!(receive(&mut reader, &mut sink));
        tokio::select! {
            outcome = &mut receiving => outcome?,
            // All input is sent, or sending failed: the server's message tells why.
            _ = &mut feeding => receiving.await?,
        }
    };
    writer.close().await;
    let sandbox = client.session(&id).await.ok().and_then(|session| session.sandbox);
    sink.finish(ctx.print, &outcome, sandbox.map(|sandbox| sandbox.to_string()).as_deref())
}

fn request(args: ExecArgs) -> Result<ExecRequest> {
    Ok(ExecRequest {
        argv: args.command,
        env: variables(&args.env)?,
        cwd: args.workdir,
        user: args.user,
        timeout_millis: args.timeout.map(millis),
        ..ExecRequest::default()
    })
}

/// A timeout of zero is no limit.
fn millis(time: Duration) -> u64 {
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    if millis == 0 { u64::MAX } else { millis }
}

/// Sends standard input to the command, or its end.
async fn feed(writer: &mut SocketWriter, with_stdin: bool) -> Result<()> {
    if with_stdin {
        let mut pieces = socket::read_chunks(std::io::stdin(), READ_BYTES);
        while let Some(piece) = pieces.recv().await {
            writer.write(piece).await?;
        }
    }
    writer.send(&SocketIn::End {}).await
}

async fn receive(reader: &mut SocketReader, sink: &mut OutputSink) -> Result<CommandOutcome> {
    loop {
        match reader.next().await? {
            Incoming::Bytes(bytes) => match bytes.split_first() {
                Some((&STDOUT, bytes)) => sink.write(Output::Stdout, bytes)?,
                Some((&STDERR, bytes)) => sink.write(Output::Stderr, bytes)?,
                _ => bail!("the server sent output of an unknown stream"),
            },
            Incoming::Message(SocketOut::Exited { exit, millis }) => {
                return Ok(CommandOutcome::exited(exit, millis));
            }
            Incoming::Message(SocketOut::Failed { code, message }) => {
                return Ok(CommandOutcome::refused(&Fault::new(fault(&code), message)));
            }
        }
    }
}

pub(super) fn bytes(data: &str) -> Result<Vec<u8>> {
    BASE64_STANDARD.decode(data).context("the server sent output that is not base64")
}

/// Maps the API's error code of a command that could not start.
pub(super) fn fault(code: &str) -> FaultCode {
    match code {
        "not_executable" => FaultCode::NotExecutable,
        "denied" => FaultCode::Denied,
        "not_found" => FaultCode::NotFound,
        _ => FaultCode::System,
    }
}
