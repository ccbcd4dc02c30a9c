//! A command in a sandbox of one's own, or in a fresh one: whatever becomes of this process, a fresh one goes
//! too.

use std::{
    io::Read,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use futures_util::{StreamExt, stream};
use harvest_engine::guest::Output;
use harvest_proto::{
    SandboxId,
    api::{
        ExecLine,
        machines::{ExecOnce, RunCommand},
    },
    bridge::Fault,
};
use harvest_server::here::{Pieces, Sent};
use reqwest::Method;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::mpsc,
};

use super::{
    outcome::{Outcome, Sink},
    session::{bytes, fault},
    variables,
};
use crate::{
    Invocation,
    cli::Exec,
    desk::Desk,
    follow::Lines,
    images,
    printer::{Advice, reader_left},
    resolve,
};

/// A command's line, and behind it what the command reads.
const WITH_INPUT: &str = "application/vnd.harvest.exec";

/// SIGPIPE, which the command would have got from a pipe of its own.
const READER_LEFT: u8 = 128 + 13;

pub(super) async fn run(here: &Invocation, args: Exec, sink: Sink) -> Result<u8> {
    let desk = Desk::find(&here.config)?;
    // Who drops the answer kills the command, and with it goes a fresh sandbox.
    let code = tokio::select! {
        code = carry_out(here, &desk, args, sink) => code,
        code = asked_to_end() => code,
    };
    desk.settle().await;
    match code {
        Err(error) if reader_left(&error) => Ok(READER_LEFT),
        other => other,
    }
}

async fn carry_out(here: &Invocation, desk: &Desk, args: Exec, sink: Sink) -> Result<u8> {
    let began = Instant::now();
    let with_stdin = args.stdin;
    let (path, command, sandbox) = match &args.place {
        Some(_) if args.limits.any() || args.volumes.any() => {
            let hint = "leave the sandbox out for a fresh one";
            bail!(Advice::new("a sandbox has the limits and volumes it was made with", hint));
        }
        Some(place) => {
            let id = resolve::sandbox(desk, place).await?;
            (format!("/v1/sandboxes/{id}/exec"), serde_json::to_vec(&run_command(args)?)?, Some(id))
        }
        None => {
            let image = images::ensure(desk, &args.image, here.print).await?;
            ("/v1/exec".to_owned(), serde_json::to_vec(&once(args, image)?)?, None)
        }
    };
    let sent = match with_stdin {
        true => Sent::Stream(WITH_INPUT, with_input(command)),
        false => Sent::Json(command),
    };
    let lines = desk.lines(Method::POST, &path, sent).await?;
    Following { here, lines, sink, sandbox, began }.finish().await
}

/// Answers the exit code when a signal asks this process to end.
async fn asked_to_end() -> Result<u8> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let mut interrupt = listen(SignalKind::interrupt())?;
    let mut terminate = listen(SignalKind::terminate())?;
    let mut hangup = listen(SignalKind::hangup())?;
    Ok(tokio::select! {
        _ = interrupt.recv() => 130,
        _ = terminate.recv() => 143,
        _ = hangup.recv() => 129,
    })
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn run_command(args: Exec) -> Result<RunCommand> {
    Ok(RunCommand {
        env: variables(&args.env)?,
        argv: args.command,
        code: args.code,
        lang: args.lang.map(Into::into),
        cwd: args.workdir,
        user: args.user,
        timeout_millis: args.timeout.map(millis),
        stdin: None,
    })
}

fn once(args: Exec, image: String) -> Result<ExecOnce> {
    let (limits, network) = (args.limits.limits(), args.net.network());
    let (volumes, state) = (args.volumes.volumes.clone(), Some(!args.volumes.no_state));
    let RunCommand { argv, code, lang, env, cwd, user, timeout_millis, stdin } = run_command(args)?;
    let (image, from) = (Some(image), None);
    Ok(ExecOnce {
        image,
        from,
        limits,
        network,
        volumes,
        state,
        argv,
        code,
        lang,
        env,
        cwd,
        user,
        timeout_millis,
        stdin,
    })
}

/// The command's line, then our standard input as it comes.
fn with_input(mut command: Vec<u8>) -> Pieces {
    command.push(b'\n');
    let (pieces, waiting) = mpsc::channel(2);
    // Nobody waits for it: it may be reading from a terminal when the command has long ended.
    std::thread::spawn(move || feed(&pieces));
    let input =
        stream::unfold(
            waiting,
            |mut waiting| async move { Some((waiting.recv().await?, waiting)) },
        );
    stream::iter([Ok(command)]).chain(input).boxed()
}

fn feed(pieces: &mpsc::Sender<std::io::Result<Vec<u8>>>) {
    let mut stdin = std::io::stdin().lock();
    let mut buffer = vec![0u8; 64 * 1024];
    loop {
        let piece = match stdin.read(&mut buffer) {
            Ok(length @ 1..) => Ok(buffer[..length].to_vec()),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            // What cannot be read has ended, as for any program that reads it.
            Ok(0) | Err(_) => return,
        };
        // The command is over: whoever follows it knows.
        if pieces.blocking_send(piece).is_err() {
            return;
        }
    }
}

/// A command that runs.
struct Following<'a> {
    here: &'a Invocation,
    lines: Lines,
    sink: Sink,
    sandbox: Option<SandboxId>,
    began: Instant,
}

impl Following<'_> {
    async fn finish(mut self) -> Result<u8> {
        let outcome = loop {
            let Some(line) = self.lines.json::<ExecLine>().await? else {
                bail!("the answer ended before the command did");
            };
            if let Some(outcome) = self.take(line)? {
                break outcome;
            }
        };
        let sandbox = self.sandbox.map(|sandbox| sandbox.to_string());
        let code = self.sink.finish(self.here.print, &outcome, sandbox.as_deref())?;
        // The answer ends when the fresh sandbox is gone; the command's result counts, whatever comes.
        while let Ok(Some(_)) = self.lines.json::<ExecLine>().await {}
        Ok(code)
    }

    fn take(&mut self, line: ExecLine) -> Result<Option<Outcome>> {
        Ok(match line {
            ExecLine::Started { sandbox, warnings } => {
                self.sandbox = Some(sandbox);
                for warning in warnings {
                    self.here.print.note(format!("warning: {warning}"));
                }
                None
            }
            ExecLine::Stdout { data } => {
                self.sink.take(Output::Stdout, &bytes(&data)?)?;
                None
            }
            ExecLine::Stderr { data } => {
                self.sink.take(Output::Stderr, &bytes(&data)?)?;
                None
            }
            ExecLine::Exited { exit, millis, reason } => Some(match reason {
                Some(reason) => Outcome::exited(exit, millis).because(reason),
                None => Outcome::exited(exit, millis),
            }),
            ExecLine::Failed { code, message } if code == "sandbox_ended" => {
                Some(Outcome::crashed(message, millis(self.began.elapsed())))
            }
            ExecLine::Failed { code, message } => {
                Some(Outcome::refused(&Fault::new(fault(&code), message)))
            }
        })
    }
}
