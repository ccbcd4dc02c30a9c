//! `harvest shell`: connects this terminal to a session's sandbox or a standalone sandbox. Every
//! key is forwarded, Ctrl-C too; the terminal's mode is restored in every case.

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result, bail};
use harvest_proto::api::{SocketIn, SocketOut};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{SignalKind, signal};

use super::exec::{exit_code, signal_exit_code};
use crate::{
    Invocation,
    backend::Backend,
    cli::ShellArgs,
    client,
    printer::Advice,
    resolve,
    socket::{self, Incoming, SocketReader, SocketWriter},
};

const READ_BYTES: usize = 4096;

pub(crate) async fn run(ctx: &Invocation, args: ShellArgs) -> Result<u8> {
    require_terminal(&args)?;
    if args.session.starts_with("sbx_") {
        return in_sandbox(&Backend::find(&ctx.config)?, &args).await;
    }
    let (client, id) = ctx.session(&args.session).await?;
    let path = format!("/v1/sessions/{id}/pty?{}", query(&args)?);
    attach_terminal(socket::open(&client, &path).await?).await
}

/// A shell in a standalone sandbox.
pub(crate) async fn in_sandbox(backend: &Backend, args: &ShellArgs) -> Result<u8> {
    require_terminal(args)?;
    let id = resolve::sandbox(backend, &args.session).await?;
    attach_terminal(backend.socket(&format!("/v1/sandboxes/{id}/pty?{}", query(args)?)).await?)
        .await
}

fn require_terminal(args: &ShellArgs) -> Result<()> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        let hint =
            format!("`harvest exec {} -- COMMAND` runs a command without a terminal", args.session);
        bail!(Advice::new("standard input and output must be a terminal", hint));
    }
    Ok(())
}

async fn attach_terminal((writer, reader): (SocketWriter, SocketReader)) -> Result<u8> {
    // Only now: earlier errors are printed in the terminal's normal mode.
    let _raw_mode = RawMode::enable()?;
    forward(writer, reader).await
}

fn query(args: &ShellArgs) -> Result<String> {
    let (rows, cols) = size()?;
    let (rows, cols) = (rows.to_string(), cols.to_string());
    let term = std::env::var("TERM").ok().filter(|term| is_valid_term(term));
    let mut pairs = vec![("rows", rows.as_str()), ("cols", cols.as_str())];
    let optional = [("term", &term), ("user", &args.user), ("cwd", &args.workdir)];
    pairs.extend(optional.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?))));
    pairs.extend(args.command.iter().map(|argument| ("argv", argument.as_str())));
    Ok(client::query(&pairs))
}

/// Whether the server accepts this value of `TERM`.
fn is_valid_term(term: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    (1..=64).contains(&term.len()) && term.bytes().all(is_allowed)
}

/// Rows and columns; 24 by 80 if the terminal does not know.
fn size() -> Result<(u16, u16)> {
    let size = tcgetwinsize(std::io::stdout()).context("cannot read the terminal's size")?;
    let or = |side: u16, default: u16| if side == 0 { default } else { side.min(4096) };
    Ok((or(size.ws_row, 24), or(size.ws_col, 80)))
}

/// Returns the exit code of the command, or of a signal to this process.
async fn forward(mut writer: SocketWriter, mut reader: SocketReader) -> Result<u8> {
    let code = tokio::select! {
        code = show_output(&mut reader) => code,
        failed = forward_input(&mut writer) => Err(failed),
        code = signal_exit_code() => code,
    };
    writer.close().await;
    code
}

/// Prints the output until the command exits; returns its exit code.
async fn show_output(reader: &mut SocketReader) -> Result<u8> {
    loop {
        match reader.next().await? {
            Incoming::Bytes(bytes) => show(&bytes)?,
            Incoming::Message(SocketOut::Exited { exit, .. }) => return Ok(exit_code(exit)),
            Incoming::Message(SocketOut::Failed { message, .. }) => bail!(message),
        }
    }
}

/// Forwards keys and window sizes; returns only on failure.
async fn forward_input(writer: &mut SocketWriter) -> anyhow::Error {
    let passed = async {
        let mut resized =
            signal(SignalKind::window_change()).context("cannot listen for signals")?;
        let mut keys = socket::read_chunks(std::io::stdin(), READ_BYTES);
        loop {
            tokio::select! {
                Some(bytes) = keys.recv() => writer.write(bytes).await?,
                Some(()) = resized.recv() => {
                    let (rows, cols) = size()?;
                    writer.send(&SocketIn::Resize { rows, cols }).await?;
                }
            }
        }
    };
    match passed.await {
        Ok(never) => never,
        Err(error) => error,
    }
}

fn show(bytes: &[u8]) -> Result<()> {
    let mut screen = std::io::stdout().lock();
    screen.write_all(bytes).and_then(|()| screen.flush()).context("cannot write to the terminal")
}

/// The terminal's raw mode. Dropping it restores the previous mode, also on a panic.
struct RawMode(Termios);

impl RawMode {
    fn enable() -> Result<Self> {
        let before = tcgetattr(std::io::stdin()).context("cannot read the terminal's mode")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Drain, &raw)
            .context("cannot set the terminal's mode")?;
        Ok(Self(before))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // Fails only when the terminal is gone.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
