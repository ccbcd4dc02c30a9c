//! Runs a command on a new pseudo-terminal, relays input and output, and hangs up when the client
//! disconnects. Job control is left to the kernel and the shell.
//!
//! A hang-up sends SIGHUP to the shell and the foreground job, as closing a terminal window does.
//! After a grace period a remaining command is killed with all its descendants. If the shell exits
//! by itself, processes it left on purpose (`nohup`, a terminal multiplexer) keep running, as after
//! any command.

use std::{io, rc::Rc, time::Duration};

use harvest_proto::bridge::{Exit, Fault, Reply, Terminal};
use tokio::{net::unix::pipe, sync::watch, time::timeout};

use super::{Execution, expired, pump, pump_in};
use crate::{
    processes::{Child, ProcessSpec},
    pty::PtyMaster,
    sandbox::Sandbox,
};

// Time for a shell to write its history after the hang-up.
const GRACE: Duration = Duration::from_secs(2);

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
        let system = |error: io::Error| Fault::system(format!("cannot create a terminal: {error}"));
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

/// Runs a command on a new terminal until it exits or is killed. Fails when it could not be
/// started.
pub(super) async fn run(
    execution: Execution<'_>,
    spec: ProcessSpec,
    size: &Terminal,
) -> Result<Exit, Fault> {
    let Execution { connection, id, command, .. } = execution;
    let mut session = TerminalSession::spawn(&connection.sandbox, spec, size).await?;
    let pid = session.child.as_ref().map_or(0, Child::pid);
    if let Some(master) = &session.master {
        connection.register_terminal(id, master);
    }
    connection.reply(id, Ok(Reply::Started { pid })).await;
    connection.end(command.stderr).await;
    Ok(relay(execution, &mut session).await)
}

async fn relay(execution: Execution<'_>, session: &mut TerminalSession) -> Exit {
    let Execution { connection, command, streams, kill, oom_before, .. } = execution;
    let Some((typed, screen)) = session.ends() else { return Exit::Killed };
    let Some(child) = &mut session.child else { return Exit::Killed };
    let (exit_sender, exited) = watch::channel(false);
    let shown = async {
        let wait = async {
            let end = child.wait().await;
            exit_sender.send_replace(true);
            end
        };
        let (limits, to) = ((usize::MAX, MAX_UNREAD_BYTES), (command.stdout, &*streams.stdout));
        let (end, _) = tokio::join!(wait, pump(connection, &screen, to, limits, &exited));
        connection.end(command.stdout).await;
        end
    };
    let exit = tokio::select! {
        end = shown => return connection.sandbox.exit(end, oom_before),
        () = expired(command.timeout_millis.map(Duration::from_millis)) => Exit::Timeout,
        () = kill.notified() => Exit::Killed,
        exit = pump_in(connection, Some(typed), command.stdin, streams.stdin) => exit,
    };
    drop(screen);
    session.hang_up().await;
    connection.end(command.stdout).await;
    exit
}
