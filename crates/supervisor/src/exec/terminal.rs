//! Runs a command on a new pseudo-terminal, relays input and output, and hangs up when the client
//! disconnects. Job control is left to the kernel and the shell.
//!
//! A hang-up sends SIGHUP to the shell and the foreground job, as closing a terminal window does.
//! After a grace period a remaining command is killed with all its descendants. If the shell exits
//! by itself, processes it left on purpose (`nohup`, a terminal multiplexer) keep running, as after
//! any command.

use std::{
    io,
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::bridge::{
    Command, Exit, Fault, FaultCode, MAX_DATA_BYTES, Reply, RequestId, StreamId, Terminal,
};
use tokio::{
    net::unix::pipe,
    sync::{Notify, watch},
    time::timeout,
};

use super::{CommandStreams, pump_in};
use crate::{
    connection::Connection,
    pipes::read_now,
    processes::{Child, ProcessSpec},
    pty::PtyMaster,
    sandbox::Sandbox,
    streams::Credit,
};

// Time for a shell to write its history after the hang-up.
const GRACE: Duration = Duration::from_secs(2);

// Enough for a prompt; the buffer grows with more output.
const INITIAL_BUFFER_BYTES: usize = 1024;

// The kernel's limit of unread output of a terminal: after its last read an exited command cannot
// have left more. Anything beyond comes from its descendants.
const MAX_UNREAD_BYTES: usize = 128 * 1024;

/// A command and its terminal. Hangs up when it is dropped before the command has exited.
struct TerminalSession {
    master: Option<Rc<PtyMaster>>,
    child: Option<Child>,
}

impl TerminalSession {
    async fn spawn(sandbox: &Sandbox, spec: ProcessSpec, size: &Terminal) -> Result<Self, Fault> {
        let system = |error: io::Error| {
            Fault::new(FaultCode::System, format!("cannot create a terminal: {error}"))
        };
        let (master, theirs) = PtyMaster::open(size, spec.uid).map_err(system)?;
        let clone = || theirs.try_clone().map_err(system);
        let stdio = [clone()?, clone()?, theirs];
        let child = sandbox.processes.start(spec, stdio).await?;
        Ok(Self { master: Some(Rc::new(master)), child: Some(child) })
    }

    fn ends(&self) -> Option<(pipe::Sender, pipe::Receiver)> {
        self.master.as_ref()?.ends().ok()
    }

    /// Hangs up; returns when the command has exited. If it had to be killed, its descendants have
    /// exited too.
    async fn hang_up(&mut self) {
        self.master.take();
        if let Some(child) = &mut self.child
            && timeout(GRACE, child.wait()).await.is_err()
        {
            child.kill().await;
        }
    }
}

impl Drop for TerminalSession {
    fn drop(&mut self) {
        if self.child.as_ref().is_some_and(|child| !child.has_exited()) {
            let mut session = Self { master: self.master.take(), child: self.child.take() };
            // When this session is dropped, the child has exited, so there is no second hang-up.
            tokio::task::spawn_local(async move { session.hang_up().await });
        }
    }
}

/// Runs a command on a new terminal until it exits or is killed.
pub(super) async fn run(
    connection: &Rc<Connection>,
    id: RequestId,
    spec: ProcessSpec,
    command: &Command,
    size: &Terminal,
    streams: CommandStreams,
    kill: &Notify,
) {
    let started_at = Instant::now();
    let oom_before = connection.sandbox.oom.read();
    let mut session = match TerminalSession::spawn(&connection.sandbox, spec, size).await {
        Ok(session) => session,
        Err(fault) => {
            CommandStreams::forget(connection, command);
            return connection.reject_exec(id, fault).await;
        }
    };
    let pid = session.child.as_ref().map_or(0, Child::pid);
    if let Some(master) = &session.master {
        connection.register_terminal(id, master);
    }
    connection.reply(id, Ok(Reply::Started { pid })).await;
    connection.end(command.stderr).await;
    let exit = relay(connection, &mut session, command, &streams, kill, oom_before).await;
    CommandStreams::forget(connection, command);
    let millis = u64::try_from(started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
    connection.exited(id, exit, millis).await;
}

async fn relay(
    connection: &Connection,
    session: &mut TerminalSession,
    command: &Command,
    streams: &CommandStreams,
    kill: &Notify,
    oom_before: u64,
) -> Exit {
    let Some((typed, screen)) = session.ends() else { return Exit::Killed };
    let Some(child) = &mut session.child else { return Exit::Killed };
    let (exit_sender, exited) = watch::channel(false);
    let shown = async {
        let wait = async {
            let end = child.wait().await;
            exit_sender.send_replace(true);
            end
        };
        tokio::join!(
            wait,
            pump_screen(connection, &screen, command.stdout, &streams.stdout, exited)
        )
        .0
    };
    let timed_out = async {
        match command.timeout_millis {
            Some(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
            None => std::future::pending().await,
        }
    };
    let exit = tokio::select! {
        end = shown => return connection.sandbox.exit(end, oom_before),
        () = timed_out => Exit::Timeout,
        () = kill.notified() => Exit::Killed,
        exit = pump_in(connection, Some(typed), command.stdin, streams.stdin.clone()) => exit,
    };
    drop(screen);
    session.hang_up().await;
    connection.end(command.stdout).await;
    exit
}

// Sends the terminal's output until the command has exited and nothing is left.
async fn pump_screen(
    connection: &Connection,
    screen: &pipe::Receiver,
    stream: StreamId,
    credit: &Credit,
    mut exited: watch::Receiver<bool>,
) {
    let mut buffer = vec![0u8; INITIAL_BUFFER_BYTES];
    let mut left = MAX_UNREAD_BYTES;
    while left > 0 {
        let allowed = credit.available(buffer.len()).await;
        let last = *exited.borrow();
        match read_now(screen, &mut buffer[..allowed], last) {
            Ok(count @ 1..) => {
                left = if last { left.saturating_sub(count) } else { left };
                credit.spend(count);
                connection.data(stream, &buffer[..count]).await;
                if count == buffer.len() && count < MAX_DATA_BYTES {
                    buffer.resize(count * 2, 0);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && !last => {
                tokio::select! {
                    _ = screen.readable() => {}
                    _ = exited.changed() => {}
                }
            }
            // The other end is closed (EIO), or the command has exited and nothing is left.
            Ok(_) | Err(_) => break,
        }
    }
    connection.end(stream).await;
}
