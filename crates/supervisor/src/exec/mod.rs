//! Runs a command for a connection: pipes, flow control, timeout, exit.

mod terminal;

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::bridge::{Command, Exit, Fault, MAX_DATA_BYTES, Reply, RequestId, StreamId};
use tokio::{
    io::AsyncWriteExt,
    net::unix::pipe,
    sync::{Notify, watch},
};

use crate::{
    connection::Connection,
    meminfo::Meminfo,
    pipes::{MAX_PIPE_BYTES, Pipes, discard_output, pipes, read_now},
    processes::{Child, ProcessSpec, StdioFds},
    sandbox::Sandbox,
    streams::{Credit, Inbox},
};

// Most commands write little: buffers start small and grow while reads fill them.
const INITIAL_BUFFER_BYTES: usize = 4 * 1024;

/// Checks a command and runs it as a task.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    command: Command,
) -> Result<(), Fault> {
    let sandbox = &connection.sandbox;
    let spec = process_spec(sandbox, &command)?;
    let kill = connection.register_command(id)?;
    // Opened before the task runs: stdin may follow the request at once.
    let opened = CommandStreams::open(connection, &command);
    let streams = opened.inspect_err(|_| connection.unregister_kill(id))?;
    let detached = command.detached && command.terminal.is_none();
    let guard = detached.then(|| sandbox.detached.register());
    // The command finds the memory as it is now, not as it was up to a second ago.
    sandbox.meminfo.iter().for_each(Meminfo::refresh);
    let (shared, oom_before) = (Rc::clone(connection), sandbox.oom.read());
    let task = async move {
        let started_at = Instant::now();
        let execution =
            Execution { connection: &shared, id, command: &command, streams, kill, oom_before };
        let ended = match &command.terminal {
            Some(size) => terminal::run(execution, spec, size).await,
            None => execution.run(spec).await,
        };
        CommandStreams::forget(&shared, &command);
        let millis = u64::try_from(started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        shared.exited(id, ended, millis).await;
        drop(guard);
    };
    if detached {
        tokio::task::spawn_local(task);
    } else {
        connection.spawn(task);
    }
    Ok(())
}

fn process_spec(sandbox: &Sandbox, command: &Command) -> Result<ProcessSpec, Fault> {
    if command.argv.first().is_none_or(String::is_empty) {
        return Err(Fault::invalid("`argv` is empty"));
    }
    let user = sandbox.user(command.user.as_deref())?;
    let cwd = command.cwd.as_deref().unwrap_or(&sandbox.launch.workdir);
    let cwd = if cwd.is_empty() { "/" } else { cwd };
    if command.cwd.is_none() {
        // The image's working directory may not exist in its layers. If it cannot be created, the
        // start fails with a clear error.
        let _ = std::fs::create_dir_all(cwd);
    }
    let mut spec = sandbox.process_spec(command.argv.clone(), &user, cwd);
    for (name, value) in sandbox.shell_env.borrow().clone() {
        spec.env.entry(name).or_insert(value);
    }
    spec.env.extend(command.env.clone());
    spec.terminal = command.terminal.is_some();
    spec.undumpable = command.undumpable;
    let term = command.terminal.as_ref().and_then(|terminal| terminal.term.clone());
    spec.env.extend(term.map(|term| ("TERM".to_owned(), term)));
    Ok(spec)
}

/// The command's streams on the bridge.
struct CommandStreams {
    stdin: Option<Rc<Inbox>>,
    stdout: Rc<Credit>,
    stderr: Rc<Credit>,
}

impl CommandStreams {
    fn open(connection: &Connection, command: &Command) -> Result<Self, Fault> {
        let stdout = connection.open_outgoing(command.stdout)?;
        let opened = connection.open_outgoing(command.stderr).and_then(|stderr| {
            let stdin = command.stdin.map(|stdin| connection.open_incoming(stdin)).transpose();
            stdin.inspect_err(|_| connection.forget(command.stderr)).map(|stdin| (stderr, stdin))
        });
        match opened {
            Ok((stderr, stdin)) => Ok(Self { stdin, stdout, stderr }),
            Err(fault) => {
                connection.forget(command.stdout);
                Err(fault)
            }
        }
    }

    fn forget(connection: &Connection, command: &Command) {
        for stream in command.stdin.into_iter().chain([command.stdout, command.stderr]) {
            connection.forget(stream);
        }
    }
}

/// A command that a client runs.
struct Execution<'a> {
    connection: &'a Connection,
    id: RequestId,
    command: &'a Command,
    streams: CommandStreams,
    kill: Rc<Notify>,
    oom_before: u64,
}

impl Execution<'_> {
    // Fails when the command could not be started.
    async fn run(self, spec: ProcessSpec) -> Result<Exit, Fault> {
        let Self { connection, command, streams, .. } = self;
        let sandbox = &connection.sandbox;
        let (mut child, pipes) = match command.with_agent {
            true => spawn_with_agent(sandbox, spec).await?,
            false => spawn(sandbox, spec, streams.stdin.is_some()).await?,
        };
        connection.reply(self.id, Ok(Reply::Started { pid: child.pid() })).await;
        let (exit_sender, exited) = watch::channel(false);
        let timeout = command.timeout_millis.map(Duration::from_millis);
        let killed = self.kill.notified();
        let wait = async {
            let exit = supervise(sandbox, &mut child, timeout, killed, self.oom_before).await;
            exit_sender.send_replace(true);
            exit
        };
        let all = usize::MAX;
        let outputs = async {
            tokio::join!(
                wait,
                pump_out(connection, pipes.stdout, (command.stdout, &streams.stdout), all, &exited),
                pump_out(connection, pipes.stderr, (command.stderr, &streams.stderr), all, &exited),
            )
            .0
        };
        Ok(tokio::select! {
            exit = outputs => exit,
            exit = pump_in(connection, pipes.stdin, command.stdin, streams.stdin) => exit,
        })
    }
}

/// Waits for the exit of a command; kills it after `timeout` or when `killed` completes.
pub(crate) async fn supervise(
    sandbox: &Sandbox,
    child: &mut Child,
    timeout: Option<Duration>,
    killed: impl Future<Output = ()>,
    oom_before: u64,
) -> Exit {
    let exit = tokio::select! {
        exit = child.wait() => return sandbox.exit(exit, oom_before),
        () = expired(timeout) => Exit::Timeout,
        () = killed => Exit::Killed,
    };
    child.kill().await;
    exit
}

async fn expired(timeout: Option<Duration>) {
    match timeout {
        Some(timeout) => tokio::time::sleep(timeout).await,
        None => std::future::pending().await,
    }
}

/// Starts a command with pipes.
pub(crate) async fn spawn(
    sandbox: &Sandbox,
    spec: ProcessSpec,
    with_stdin: bool,
) -> Result<(Child, Pipes), Fault> {
    let (ours, theirs) = pipes_of(&spec, with_stdin)?;
    let child = sandbox.processes.start(spec, theirs).await?;
    Ok((child, ours))
}

/// Starts a command with pipes in the agent's cgroup, without stdin.
async fn spawn_with_agent(sandbox: &Sandbox, spec: ProcessSpec) -> Result<(Child, Pipes), Fault> {
    let (ours, theirs) = pipes_of(&spec, false)?;
    let joins = &sandbox.agent_group.joins;
    Ok((sandbox.processes.start_joined(spec, theirs, joins).await?, ours))
}

fn pipes_of(spec: &ProcessSpec, with_stdin: bool) -> Result<(Pipes, StdioFds), Fault> {
    let created = pipes(spec.uid, spec.gid, with_stdin);
    created.map_err(|error| Fault::system(format!("cannot create a pipe: {error}")))
}

/// Sends the command's output until it has exited and the pipe is empty. Descendants may hold the
/// pipe open: their output is discarded, because closing the pipe would kill them.
///
/// True when there was more than `limit` bytes; then the pipe is closed, which ends the command.
pub(crate) async fn pump_out(
    connection: &Connection,
    receiver: pipe::Receiver,
    (stream, credit): (StreamId, &Credit),
    limit: usize,
    exited: &watch::Receiver<bool>,
) -> bool {
    let limits = (limit, MAX_PIPE_BYTES);
    let end = pump(connection, &receiver, (stream, credit), limits, exited).await;
    match end {
        OutputEnd::HeldOpen => drop(tokio::task::spawn_local(discard_output(receiver))),
        OutputEnd::Closed | OutputEnd::Truncated => drop(receiver),
    }
    connection.end(stream).await;
    end == OutputEnd::Truncated
}

/// Why no more output is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OutputEnd {
    Closed,
    /// The command has exited or the client is gone, and others may still write.
    HeldOpen,
    Truncated,
}

// Sends at most `limit` bytes, and at most about `left` of them after the exit.
async fn pump(
    connection: &Connection,
    receiver: &pipe::Receiver,
    (stream, credit): (StreamId, &Credit),
    (mut limit, mut left): (usize, usize),
    exited: &watch::Receiver<bool>,
) -> OutputEnd {
    let mut exited = exited.clone();
    let mut buffer = vec![0u8; INITIAL_BUFFER_BYTES];
    loop {
        let allowed = credit.available(buffer.len()).await;
        let last = *exited.borrow();
        if left == 0 || connection.is_closed() {
            return OutputEnd::HeldOpen;
        }
        match read_now(receiver, &mut buffer[..allowed], last) {
            Ok(0) => return OutputEnd::Closed,
            Ok(count) => {
                left = if last { left.saturating_sub(count) } else { left };
                let sent = count.min(limit);
                limit -= sent;
                credit.spend(sent);
                connection.data(stream, &buffer[..sent]).await;
                if sent < count {
                    return OutputEnd::Truncated;
                }
                if count == buffer.len() && count < MAX_DATA_BYTES {
                    buffer.resize(count * 2, 0);
                }
            }
            Err(error) if error.kind() != std::io::ErrorKind::WouldBlock => {
                return OutputEnd::Closed;
            }
            Err(_) if last => return OutputEnd::HeldOpen,
            Err(_) => tokio::select! {
                _ = receiver.readable() => {}
                _ = exited.changed() => {}
            },
        }
    }
}

/// Never returns: it is cancelled when the command exits. Input that the command does not read any
/// more is dropped, so that the client does not stall.
pub(crate) async fn pump_in<T>(
    connection: &Connection,
    mut sender: Option<pipe::Sender>,
    stream: Option<StreamId>,
    inbox: Option<Rc<Inbox>>,
) -> T {
    if let (Some(stream), Some(inbox)) = (stream, inbox) {
        while let Some(bytes) = inbox.take().await {
            if let Some(open) = &mut sender
                && open.write_all(&bytes).await.is_err()
            {
                sender = None;
            }
            let bytes = inbox.grant_back(bytes.len());
            connection.send(harvest_proto::bridge::FromSupervisor::Credit { stream, bytes }).await;
        }
    }
    drop(sender);
    std::future::pending().await
}
