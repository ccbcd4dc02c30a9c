//! `harvest shell`: this terminal in a session's sandbox, or in one of one's own. Every key goes there, ctrl-c too; this terminal is as it
//! was again however it ends.

use std::io::{IsTerminal, Write};

use anyhow::{Context, Result, bail};
use harvest_proto::api::{SocketIn, SocketOut};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    Invocation,
    cli::Shell,
    client::{self, Client},
    desk::Desk,
    printer::Advice,
    resolve,
    socket::{self, Heard, Listener, Speaker},
};

/// What is read from the keyboard at once; a paste takes several.
const READ_BYTES: usize = 4096;

pub(crate) async fn run(here: &Invocation, args: Shell) -> Result<u8> {
    needs_terminal(&args)?;
    if args.session.starts_with("sbx_") {
        return in_sandbox(&Desk::find(&here.config)?, &args).await;
    }
    let client = Client::find(&here.config)?;
    let id = resolve::session(&client, &args.session).await?;
    let path = format!("/v1/sessions/{id}/pty?{}", query(&args)?);
    talk(socket::open(&client, &path).await?).await
}

/// A shell in a sandbox of one's own.
pub(crate) async fn in_sandbox(desk: &Desk, args: &Shell) -> Result<u8> {
    needs_terminal(args)?;
    let id = resolve::sandbox(desk, &args.session).await?;
    talk(desk.socket(&format!("/v1/sandboxes/{id}/pty?{}", query(args)?)).await?).await
}

/// Without a terminal here there is nothing to turn into one there.
fn needs_terminal(args: &Shell) -> Result<()> {
    if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
        let hint = format!("`harvest exec {} -- COMMAND` runs a command without one", args.session);
        bail!(Advice::new("a shell needs a terminal on its standard input and output", hint));
    }
    Ok(())
}

async fn talk((speaker, listener): (Speaker, Listener)) -> Result<u8> {
    // Only now: what went wrong before was said to a terminal as people know it.
    let raw = Raw::set()?;
    let ended = carry(speaker, listener).await;
    drop(raw);
    match ended? {
        Ended::Said(SocketOut::Exited { exit, .. }) => Ok(super::exec::exit_code(exit)),
        Ended::Said(SocketOut::Failed { message, .. }) => bail!(message),
        Ended::Signal(code) => Ok(code),
    }
}

/// How a shell ended.
enum Ended {
    Said(SocketOut),
    /// Somebody ended us; the code says how.
    Signal(u8),
}

fn query(args: &Shell) -> Result<String> {
    let (rows, cols) = size()?;
    let (rows, cols) = (rows.to_string(), cols.to_string());
    let term = std::env::var("TERM").ok().filter(|term| sound(term));
    let mut words = vec![("rows", rows.as_str()), ("cols", cols.as_str())];
    let given = [("term", &term), ("user", &args.user), ("cwd", &args.workdir)];
    words.extend(given.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?))));
    words.extend(args.command.iter().map(|word| ("argv", word.as_str())));
    Ok(client::query(&words))
}

/// What a server takes for the name of a terminal.
fn sound(term: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    (1..=64).contains(&term.len()) && term.bytes().all(plain)
}

/// Rows and columns; a terminal that does not know has the size of old.
fn size() -> Result<(u16, u16)> {
    let size = tcgetwinsize(std::io::stdout()).context("cannot ask the terminal for its size")?;
    let or = |side: u16, otherwise: u16| if side == 0 { otherwise } else { side.min(4096) };
    Ok((or(size.ws_row, 24), or(size.ws_col, 80)))
}

async fn carry(mut speaker: Speaker, mut listener: Listener) -> Result<Ended> {
    let listen = |kind| signal(kind).context("cannot listen for signals");
    let mut interrupted = listen(SignalKind::interrupt())?;
    let mut terminated = listen(SignalKind::terminate())?;
    let mut hung_up = listen(SignalKind::hangup())?;
    let ended = tokio::select! {
        ended = watch(&mut listener) => ended?,
        failed = speak(&mut speaker) => return Err(failed),
        _ = interrupted.recv() => Ended::Signal(128 + 2),
        _ = terminated.recv() => Ended::Signal(128 + 15),
        _ = hung_up.recv() => Ended::Signal(128 + 1),
    };
    speaker.close().await;
    Ok(ended)
}

/// Shows what comes until the end is said.
async fn watch(listener: &mut Listener) -> Result<Ended> {
    loop {
        match listener.hear().await? {
            Heard::Bytes(bytes) => show(&bytes)?,
            Heard::Said(said) => return Ok(Ended::Said(said)),
        }
    }
}

/// Passes keys and sizes on; comes back only when that fails.
async fn speak(speaker: &mut Speaker) -> anyhow::Error {
    let passed = async {
        let mut resized =
            signal(SignalKind::window_change()).context("cannot listen for signals")?;
        let mut keys = socket::pieces(std::io::stdin(), READ_BYTES);
        loop {
            tokio::select! {
                Some(bytes) = keys.recv() => speaker.write(bytes).await?,
                Some(()) = resized.recv() => {
                    let (rows, cols) = size()?;
                    speaker.say(&SocketIn::Resize { rows, cols }).await?;
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

/// A terminal that passes every key on. It is as it was again when this is dropped, by a panic too.
struct Raw(Termios);

impl Raw {
    fn set() -> Result<Self> {
        let before =
            tcgetattr(std::io::stdin()).context("cannot ask the terminal how it is set")?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Drain, &raw)
            .context("cannot set the terminal")?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // When the terminal is gone, there is nothing to put back.
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Now, &self.0);
    }
}
