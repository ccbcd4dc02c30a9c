//! Runs a command for a connection: pipes, flow control, timeout, exit.

use std::{
    os::fd::{AsFd, OwnedFd},
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::bridge::{
    Command, Exit, Fault, FaultCode, MAX_DATA_BYTES, Reply, RequestId, StreamId,
};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{
    io::AsyncWriteExt,
    net::unix::pipe,
    sync::{Notify, watch},
};

use crate::{
    connection::Connection,
    processes::{Child, ProcessSpec},
    streams::{Credit, Inbox},
    supervisor::Supervisor,
    terminal,
};

// Most commands write little: buffers start small and grow while reads fill them.
const INITIAL_BUFFER_BYTES: usize = 4 * 1024;

/// Checks a command and runs it as a task.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    command: Command,
    kill: Rc<Notify>,
) -> Result<(), Fault> {
    let supervisor = &connection.supervisor;
    if command.argv.first().is_none_or(String::is_empty) {
        return Err(Fault::new(FaultCode::Invalid, "`argv` is empty"));
    }
    let user = supervisor.user(command.user.as_deref())?;
    let cwd = command.cwd.as_deref().unwrap_or(&supervisor.launch.workdir);
    let cwd = if cwd.is_empty() { "/" } else { cwd };
    if command.cwd.is_none() {
        // The image's working directory may not exist in its layers. If it cannot be created, the
        // start fails with a clear error.
        let _ = std::fs::create_dir_all(cwd);
    }
    let mut spec = supervisor.process_spec(command.argv.clone(), &user, cwd);
    spec.env.extend(command.env.clone());
    spec.terminal = command.terminal.is_some();
    let term = command.terminal.as_ref().and_then(|terminal| terminal.term.clone());
    spec.env.extend(term.map(|term| ("TERM".to_owned(), term)));
    // Opened before the task runs: stdin may follow the request at once.
    let streams = CommandStreams::open(connection, &command)?;
    let shared = Rc::clone(connection);
    if command.detached && command.terminal.is_none() {
        let guard = supervisor.detached.register();
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
pub(crate) struct CommandStreams {
    pub(crate) stdin: Option<Rc<Inbox>>,
    pub(crate) stdout: Rc<Credit>,
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

    pub(crate) fn forget(connection: &Connection, command: &Command) {
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
    let oom_before = connection.supervisor.oom.read();
    let (mut child, pipes) =
        match spawn(&connection.supervisor, spec, streams.stdin.is_some()).await {
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
        let exit = supervise(&connection.supervisor, &mut child, timeout, kill, oom_before).await;
        exit_sender.send_replace(true);
        exit
    };
    let outputs = async {
        tokio::join!(
            wait,
            pump_out(connection, pipes.stdout, command.stdout, &streams.stdout, exited.clone()),
            pump_out(connection, pipes.stderr, command.stderr, &streams.stderr, exited.clone()),
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
    supervisor: &Supervisor,
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
        exit = child.wait() => supervisor.exit(exit, oom_before),
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

/// The supervisor's ends of a command's pipes.
pub(crate) struct Pipes {
    pub(crate) stdin: Option<pipe::Sender>,
    pub(crate) stdout: pipe::Receiver,
    pub(crate) stderr: pipe::Receiver,
}

/// Creates a command's pipes: the supervisor's ends and the command's.
pub(crate) fn pipes(
    spec: &ProcessSpec,
    with_stdin: bool,
) -> std::io::Result<(Pipes, [OwnedFd; 3])> {
    let (stdin, their_stdin) = if with_stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(pipe::Sender::from_owned_fd(ours)?), theirs)
    } else {
        (None, dev_null()?)
    };
    let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    for pipe in
        [&their_stdin, &their_stdout, &their_stderr].into_iter().skip(usize::from(!with_stdin))
    {
        // Opening /dev/stdout by name checks the pipe's owner.
        let (uid, gid) = (rustix::fs::Uid::from_raw(spec.uid), rustix::fs::Gid::from_raw(spec.gid));
        let _only_by_path = rustix::fs::fchown(pipe, Some(uid), Some(gid));
    }
    let ours = Pipes {
        stdin,
        stdout: pipe::Receiver::from_owned_fd(stdout)?,
        stderr: pipe::Receiver::from_owned_fd(stderr)?,
    };
    Ok((ours, [their_stdin, their_stdout, their_stderr]))
}

/// The inherited `/dev/null`: root inside may have replaced the file.
pub(crate) fn dev_null() -> std::io::Result<OwnedFd> {
    std::io::stdin().as_fd().try_clone_to_owned()
}

async fn spawn(
    supervisor: &Supervisor,
    spec: ProcessSpec,
    with_stdin: bool,
) -> Result<(Child, Pipes), Fault> {
    let created = pipes(&spec, with_stdin);
    let (ours, theirs) = created
        .map_err(|error| Fault::new(FaultCode::System, format!("cannot create a pipe: {error}")))?;
    let child = supervisor.processes.start(spec, theirs).await?;
    Ok((child, ours))
}

// Sends the command's output until it has exited and the pipe is empty. Descendants may hold the
// pipe open: their output is discarded, because closing the pipe would kill them.
async fn pump_out(
    connection: &Connection,
    receiver: pipe::Receiver,
    stream: StreamId,
    credit: &Credit,
    mut exited: watch::Receiver<bool>,
) {
    let mut buffer = vec![0u8; INITIAL_BUFFER_BYTES];
    let mut left = MAX_PIPE_BYTES;
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
                credit.spend(count);
                connection.data(stream, &buffer[..count]).await;
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
}

// The capacity of a pipe (`fs.pipe-max-size`): after its last read an exited command cannot have
// left more. Anything beyond comes from its descendants.
const MAX_PIPE_BYTES: usize = 1 << 20;

/// Reads what an exited writer left in a pipe, and no more.
pub(crate) fn read_rest(receiver: &pipe::Receiver, mut take: impl FnMut(&[u8])) {
    let (mut buffer, mut left) = ([0u8; 8192], MAX_PIPE_BYTES);
    while left > 0
        && let Ok(count @ 1..) = read_now(receiver, &mut buffer, true)
    {
        take(&buffer[..count]);
        left = left.saturating_sub(count);
    }
}

/// Reads without waiting. With `last` it bypasses the runtime, whose readiness state may lag
/// behind.
pub(crate) fn read_now(
    receiver: &pipe::Receiver,
    buffer: &mut [u8],
    last: bool,
) -> std::io::Result<usize> {
    if last { Ok(rustix::io::read(receiver, buffer)?) } else { receiver.try_read(buffer) }
}

// Limits discarded output to 13 MB per second: a faster writer blocks instead of keeping pid 1
// busy, whose CPU time the sandbox's limits do not cover.
const DISCARD_BYTES: usize = 64 * 1024;
const DISCARD_INTERVAL: Duration = Duration::from_millis(5);

/// Reads and discards until the other end is closed.
pub(crate) async fn discard_output(receiver: pipe::Receiver) {
    loop {
        let read = receiver.try_read(&mut vec![0u8; DISCARD_BYTES]);
        match read {
            Ok(0) => return,
            Ok(_) => tokio::time::sleep(DISCARD_INTERVAL).await,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if receiver.readable().await.is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

// Never returns: it is cancelled when the command exits. Input that the command does not read any
// more is dropped, so that the client does not stall.
pub(crate) async fn pump_in(
    connection: &Connection,
    mut sender: Option<pipe::Sender>,
    stream: Option<StreamId>,
    inbox: Option<Rc<Inbox>>,
) -> Exit {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_output_is_read_up_to_pipe_capacity() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _entered = runtime.enter();
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let receiver = pipe::Receiver::from_owned_fd(ours).unwrap();
        let refill = |bytes: usize| rustix::io::write(&theirs, &vec![0; bytes]).unwrap();
        refill(4096);
        let mut read = 0;
        // The writer is as fast as the reader: the pipe is never empty.
        read_rest(&receiver, |bytes| {
            read += bytes.len();
            assert!(read <= MAX_PIPE_BYTES + 8192, "reading is unbounded");
            refill(bytes.len());
        });
        assert!(read >= MAX_PIPE_BYTES);
    }
}
