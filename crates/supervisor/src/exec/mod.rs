//! Runs a command for a connection: pipes, flow control, timeout, exit.

mod terminal;

use std::{
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::bridge::{
    Command, Exit, Fault, FaultCode, MAX_DATA_BYTES, Reply, RequestId, StreamId,
};
use tokio::{
    io::AsyncWriteExt,
    net::unix::pipe,
    sync::{Notify, watch},
};

use crate::{
    connection::Connection,
    pipes::{MAX_PIPE_BYTES, Pipes, discard_output, pipes, read_now},
    processes::{Child, ProcessSpec},
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
    if command.argv.first().is_none_or(String::is_empty) {
        return Err(Fault::new(FaultCode::Invalid, "`argv` is empty"));
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
    spec.env.extend(command.env.clone());
    spec.terminal = command.terminal.is_some();
    let term = command.terminal.as_ref().and_then(|terminal| terminal.term.clone());
    spec.env.extend(term.map(|term| ("TERM".to_owned(), term)));
    let kill = connection.register_command(id)?;
    // Opened before the task runs: stdin may follow the request at once.
    let opened = CommandStreams::open(connection, &command);
    let streams = opened.inspect_err(|_| connection.unregister_kill(id))?;
    let shared = Rc::clone(connection);
    if command.detached && command.terminal.is_none() {
        let guard = sandbox.detached.register();
        tokio::task::spawn_local(async move {
            run(&shared, id, spec, &command, streams, &kill).await;
            drop(guard);
        });
        return Ok(());
    }
    connection.spawn(async move {
        match &command.terminal {
            Some(size) => terminal::run(&shared, id, spec, &command, size, streams, &kill).await,
            None => run(&shared, id, spec, &command, streams, &kill).await,
        }
    });
    Ok(())
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

async fn run(
    connection: &Rc<Connection>,
    id: RequestId,
    spec: ProcessSpec,
    command: &Command,
    streams: CommandStreams,
    kill: &Notify,
) {
    let started_at = Instant::now();
    let oom_before = connection.sandbox.oom.read();
    let (mut child, pipes) = match spawn(&connection.sandbox, spec, streams.stdin.is_some()).await {
        Ok(started) => started,
        Err(fault) => {
            CommandStreams::forget(connection, command);
            return connection.reject_exec(id, fault).await;
        }
    };
    connection.reply(id, Ok(Reply::Started { pid: child.pid() })).await;
    let (exit_sender, exited) = watch::channel(false);
    let timeout = command.timeout_millis.map(Duration::from_millis);
    let wait = async {
        let exit = supervise(&connection.sandbox, &mut child, timeout, kill, oom_before).await;
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
    let exit = tokio::select! {
        exit = outputs => exit,
        exit = pump_in(connection, pipes.stdin, command.stdin, streams.stdin) => exit,
    };
    CommandStreams::forget(connection, command);
    let millis = u64::try_from(started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
    connection.exited(id, exit, millis).await;
}

async fn supervise(
    sandbox: &Sandbox,
    child: &mut Child,
    timeout: Option<Duration>,
    kill: &Notify,
    oom_before: u64,
) -> Exit {
    let timed_out = async {
        match timeout {
            Some(timeout) => tokio::time::sleep(timeout).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        exit = child.wait() => sandbox.exit(exit, oom_before),
        () = timed_out => {
            child.kill().await;
            Exit::Timeout
        }
        () = kill.notified() => {
            child.kill().await;
            Exit::Killed
        }
    }
}

/// Starts a command with pipes.
pub(crate) async fn spawn(
    sandbox: &Sandbox,
    spec: ProcessSpec,
    with_stdin: bool,
) -> Result<(Child, Pipes), Fault> {
    let created = pipes(spec.uid, spec.gid, with_stdin);
    let (ours, theirs) = created
        .map_err(|error| Fault::new(FaultCode::System, format!("cannot create a pipe: {error}")))?;
    let child = sandbox.processes.start(spec, theirs).await?;
    Ok((child, ours))
}

/// Sends the command's output until it has exited and the pipe is empty. Descendants may hold the
/// pipe open: their output is discarded, because closing the pipe would kill them.
///
/// True when there was more than `limit` bytes; then the pipe is closed, which ends the command.
pub(crate) async fn pump_out(
    connection: &Connection,
    receiver: pipe::Receiver,
    (stream, credit): (StreamId, &Credit),
    mut limit: usize,
    exited: &watch::Receiver<bool>,
) -> bool {
    let mut exited = exited.clone();
    let mut buffer = vec![0u8; INITIAL_BUFFER_BYTES];
    let (mut left, mut truncated) = (MAX_PIPE_BYTES, false);
    loop {
        let allowed = credit.available(buffer.len()).await;
        let last = *exited.borrow();
        if left == 0 || connection.is_closed() {
            tokio::task::spawn_local(discard_output(receiver));
            break;
        }
        match read_now(&receiver, &mut buffer[..allowed], last) {
            Ok(0) => break,
            Ok(count) => {
                left = if last { left.saturating_sub(count) } else { left };
                let sent = count.min(limit);
                limit -= sent;
                credit.spend(sent);
                connection.data(stream, &buffer[..sent]).await;
                truncated = sent < count;
                if truncated {
                    break;
                }
                if count == buffer.len() && count < MAX_DATA_BYTES {
                    buffer.resize(count * 2, 0);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock && last => {
                tokio::task::spawn_local(discard_output(receiver));
                break;
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                tokio::select! {
                    _ = receiver.readable() => {}
                    _ = exited.changed() => {}
                }
            }
            Err(_) => break,
        }
    }
    connection.end(stream).await;
    truncated
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
