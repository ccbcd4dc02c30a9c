//! Sends the command of `harvest exec`, with standard input of any length, and prints its output. A
//! fresh sandbox is removed however this process ends.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use base64::{Engine, prelude::BASE64_STANDARD};
use futures_util::{StreamExt, stream};
use harvest_engine::supervisor_client::Output;
use harvest_proto::{
    SandboxId, SessionId,
    api::{CreateSandbox, ExecLine, ExecRequest, SandboxLimits},
};
use harvest_server::in_process::{ByteStream, RequestBody};
use reqwest::Method;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use super::{
    outcome::{CommandOutcome, OutputSink},
    variables,
};
use crate::{
    Invocation,
    backend::Backend,
    cli::ExecArgs,
    client::Client,
    follow::Lines,
    images,
    printer::{Advice, is_broken_pipe},
    resolve,
    socket::read_chunks,
};

/// Content type: one JSON line with the command, followed by its standard input.
const EXEC_WITH_STDIN: &str = "application/vnd.harvest.exec";

/// The exit code of SIGPIPE, which a local command would get.
const BROKEN_PIPE: u8 = 128 + 13;

pub(super) async fn run(ctx: &Invocation, args: ExecArgs, sink: OutputSink) -> Result<u8> {
    let backend = match args.target.as_deref() {
        Some(target) if is_session(target) => Backend::from_client(Client::find(&ctx.config)?),
        _ => Backend::find(&ctx.config)?,
    };
    // Dropping the response kills the command and removes a fresh sandbox.
    let code = tokio::select! {
        code = exec(ctx, &backend, args, sink) => code,
        code = signal_exit_code() => code,
    };
    backend.wait_for_cleanup().await;
    match code {
        Err(error) if is_broken_pipe(&error) => Ok(BROKEN_PIPE),
        other => other,
    }
}

fn is_session(target: &str) -> bool {
    !target.starts_with("sbx_")
}

async fn exec(ctx: &Invocation, backend: &Backend, args: ExecArgs, sink: OutputSink) -> Result<u8> {
    let (began, with_stdin, target) = (Instant::now(), args.stdin, args.target.clone());
    if target.is_some()
        && (args.limits.limits() != SandboxLimits::default()
            || args.volumes.is_any_set()
            || args.net.is_any_set())
    {
        let hint = "omit the sandbox or session to use a fresh sandbox";
        let what = "limits, volumes and network of an existing sandbox cannot be changed";
        bail!(Advice::new(what, hint));
    }
    let (path, sandbox, session) = match (target.as_deref(), backend) {
        (Some(session), Backend::Remote { client, .. }) if is_session(session) => {
            let id = resolve::session(client, session).await?;
            (format!("/v1/sessions/{id}/exec"), None, Some((client, id)))
        }
        (Some(typed), _) => {
            let id = resolve::sandbox(backend, typed).await?;
            (format!("/v1/sandboxes/{id}/exec"), Some(id), None)
        }
        (None, _) => ("/v1/exec".to_owned(), None, None),
    };
    let (network, door) = crate::commands::sandbox::network(&args.net)?;
    let sandbox_order = match target {
        Some(_) => None,
        None => Some(Box::new(CreateSandbox {
            image: Some(images::ensure(backend, &args.image, ctx.print).await?),
            limits: args.limits.limits(),
            network,
            door,
            volumes: args.volumes.volumes.clone(),
            state: args.volumes.no_state.then_some(false),
            ..CreateSandbox::default()
        })),
    };
    let command = ExecRequest { sandbox: sandbox_order, ..request(args)? };
    let command = serde_json::to_vec(&command)?;
    let sent = match with_stdin {
        true => RequestBody::Stream(EXEC_WITH_STDIN, with_stdin_stream(command)),
        false => RequestBody::Json(command),
    };
    let lines = backend.lines(Method::POST, &path, sent).await?;
    RunningCommand { ctx, lines, sink, sandbox, session, began }.finish().await
}

/// Waits for a signal to exit; returns the exit code.
pub(crate) async fn signal_exit_code() -> Result<u8> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => 128 + 2,
        _ = terminate.recv() => 128 + 15,
        _ = hangup.recv() => 128 + 1,
    })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn request(args: ExecArgs) -> Result<ExecRequest> {
    Ok(ExecRequest {
        env: variables(&args.env)?,
        argv: args.command,
        code: args.code,
        // The API has the same words.
        lang: serde_json::from_value(json!(args.lang))?,
        cwd: args.workdir,
        user: args.user,
        timeout_millis: args.timeout.map(millis),
        ..ExecRequest::default()
    })
}

/// The command as one line, followed by standard input as it arrives.
fn with_stdin_stream(mut command: Vec<u8>) -> ByteStream {
    command.push(b'\n');
    let mut chunks = read_chunks(std::io::stdin(), 64 * 1024);
    let input = stream::poll_fn(move |context| chunks.poll_recv(context)).map(Ok);
    stream::iter([Ok(command)]).chain(input).boxed()
}

struct RunningCommand<'a> {
    ctx: &'a Invocation,
    lines: Lines,
    sink: OutputSink,
    sandbox: Option<SandboxId>,
    /// The session whose sandbox runs the command; only afterwards it is known which one that was.
    session: Option<(&'a Client, SessionId)>,
    began: Instant,
}

impl RunningCommand<'_> {
    async fn finish(mut self) -> Result<u8> {
        let outcome = loop {
            let Some(line) = self.lines.json::<ExecLine>().await? else {
                bail!("the response ended before the command finished");
            };
            if let Some(outcome) = self.handle(line)? {
                break outcome;
            }
        };
        if let Some((client, id)) = &self.session {
            self.sandbox = client.session(id).await.ok().and_then(|session| session.sandbox);
        }
        let sandbox = self.sandbox.map(|sandbox| sandbox.to_string());
        let code = self.sink.finish(self.ctx.print, &outcome, sandbox.as_deref())?;
        // The response ends once a fresh sandbox is removed; later lines do not change the result.
        while let Ok(Some(_)) = self.lines.json::<ExecLine>().await {}
        Ok(code)
    }

    fn handle(&mut self, line: ExecLine) -> Result<Option<CommandOutcome>> {
        Ok(match line {
            ExecLine::Started { sandbox, warnings } => {
                self.sandbox = Some(sandbox);
                for warning in warnings {
                    self.ctx.print.note(format!("warning: {warning}"));
                }
                None
            }
            ExecLine::Stdout { data } => {
                self.sink.write(Output::Stdout, &bytes(&data)?)?;
                None
            }
            ExecLine::Stderr { data } => {
                self.sink.write(Output::Stderr, &bytes(&data)?)?;
                None
            }
            ExecLine::Exited { exit, millis, reason } => {
                Some(CommandOutcome::exited(exit, millis).or_reason(reason))
            }
            ExecLine::Failed { code, message } if code == "sandbox_ended" => {
                Some(CommandOutcome::crashed(message, millis(self.began.elapsed())))
            }
            ExecLine::Failed { code, message } => Some(CommandOutcome::refused(&code, message)),
        })
    }
}

fn bytes(data: &str) -> Result<Vec<u8>> {
    BASE64_STANDARD.decode(data).context("the server sent output that is not base64")
}
