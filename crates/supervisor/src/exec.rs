//! Runs a command for a connection: pipes, credit, time limit, exit.

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
    processes::{Child, Order},
    streams::{Credit, Inbox},
    supervisor::Supervisor,
    terminal,
};

// Most commands say little: buffers start small and grow while reads fill them.
const FIRST_READ_BYTES: usize = 4 * 1024;

/// Checks a command and runs it beside everything else.
pub(crate) fn start(
    connection: &Rc<Connection>,
    id: RequestId,
    command: Command,
    kill: Rc<Notify>,
) -> Result<(), Fault> {
    let supervisor = &connection.supervisor;
    if command.argv.first().is_none_or(String::is_empty) {
        return Err(Fault::new(FaultCode::Invalid, "a command needs a program"));
    }
    let user = supervisor.user(command.user.as_deref())?;
    let cwd = command.cwd.as_deref().unwrap_or(&supervisor.launch.workdir);
    let cwd = if cwd.is_empty() { "/" } else { cwd };
    if command.cwd.is_none() {
        // An image may name a folder that is in none of its layers; when it cannot be made, the start says so.
        let _ = std::fs::create_dir_all(cwd);
    }
    let mut order = supervisor.order(command.argv.clone(), &user, cwd);
    order.env.extend(command.env.clone());
    order.terminal = command.terminal.is_some();
    let term = command.terminal.as_ref().and_then(|terminal| terminal.term.clone());
    order.env.extend(term.map(|term| ("TERM".to_owned(), term)));
    // Opened here and not in the task: the dialer may send stdin right behind the request.
    let streams = Streams::open(connection, &command)?;
    let here = Rc::clone(connection);
    if command.detached && command.terminal.is_none() {
        let running = supervisor.detached.one();
        tokio::task::spawn_local(async move {
            run(&here, id, order, &command, streams, &kill).await;
            drop(running);
        });
        return Ok(());
    }
    connection.spawn(async move {
        match &command.terminal {
            Some(size) => terminal::run(&here, id, order, &command, size, streams, &kill).await,
            None => run(&here, id, order, &command, streams, &kill).await,
        }
    });
    Ok(())
}

/// The command's streams at the bridge.
pub(crate) struct Streams {
    pub(crate) stdin: Option<Rc<Inbox>>,
    pub(crate) stdout: Rc<Credit>,
    stderr: Rc<Credit>,
}

impl Streams {
    fn open(connection: &Connection, command: &Command) -> Result<Self, Fault> {
        let stdout = connection.sends(command.stdout)?;
        let opened = connection.sends(command.stderr).and_then(|stderr| {
            let stdin = command.stdin.map(|stdin| connection.receives(stdin)).transpose();
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
    order: Order,
    command: &Command,
    streams: Streams,
    kill: &Notify,
) {
    let began = Instant::now();
    let oom_before = connection.supervisor.oom.read();
    let (mut child, pipes) =
        match spawn(&connection.supervisor, order, streams.stdin.is_some()).await {
            Ok(started) => started,
            Err(fault) => {
                Streams::forget(connection, command);
                return connection.refuse_exec(id, fault).await;
            }
        };
    connection.reply(id, Ok(Reply::Started { pid: child.pid(), terminal: false })).await;
    let (ended, exited) = watch::channel(false);
    let limit = command.timeout_millis.map(Duration::from_millis);
    let wait = async {
        let exit = supervise(&connection.supervisor, &mut child, limit, kill, oom_before).await;
        ended.send_replace(true);
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
    Streams::forget(connection, command);
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    connection.exited(id, exit, millis).await;
}

async fn supervise(
    supervisor: &Supervisor,
    child: &mut Child,
    limit: Option<Duration>,
    kill: &Notify,
    oom_before: u64,
) -> Exit {
    let time_is_up = async {
        match limit {
            Some(limit) => tokio::time::sleep(limit).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        end = child.wait() => supervisor.exit(end, oom_before),
        () = time_is_up => {
            child.kill().await;
            Exit::Timeout
        }
        () = kill.notified() => {
            child.kill().await;
            Exit::Killed
        }
    }
}

/// Our ends of a command's pipes.
pub(crate) struct Pipes {
    pub(crate) stdin: Option<pipe::Sender>,
    pub(crate) stdout: pipe::Receiver,
    pub(crate) stderr: pipe::Receiver,
}

/// Makes a command's pipes: our ends and its.
pub(crate) fn pipes(order: &Order, with_stdin: bool) -> std::io::Result<(Pipes, [OwnedFd; 3])> {
    let (stdin, their_stdin) = if with_stdin {
        let (theirs, ours) = pipe_with(PipeFlags::CLOEXEC)?;
        (Some(pipe::Sender::from_owned_fd(ours)?), theirs)
    } else {
        (None, empty()?)
    };
    let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC)?;
    for pipe in
        [&their_stdin, &their_stdout, &their_stderr].into_iter().skip(usize::from(!with_stdin))
    {
        // So that the command may open /dev/stdout by name, which checks the pipe's owner.
        let (uid, gid) =
            (rustix::fs::Uid::from_raw(order.uid), rustix::fs::Gid::from_raw(order.gid));
        let _only_by_name = rustix::fs::fchown(pipe, Some(uid), Some(gid));
    }
    let ours = Pipes {
        stdin,
        stdout: pipe::Receiver::from_owned_fd(stdout)?,
        stderr: pipe::Receiver::from_owned_fd(stderr)?,
    };
    Ok((ours, [their_stdin, their_stdout, their_stderr]))
}

/// The `/dev/null` pid 1 was born with: whoever is root inside may have put anything in its place.
pub(crate) fn empty() -> std::io::Result<OwnedFd> {
    std::io::stdin().as_fd().try_clone_to_owned()
}

async fn spawn(
    supervisor: &Supervisor,
    order: Order,
    with_stdin: bool,
) -> Result<(Child, Pipes), Fault> {
    let made = pipes(&order, with_stdin);
    let (ours, theirs) = made
        .map_err(|error| Fault::new(FaultCode::System, format!("cannot make a pipe: {error}")))?;
    let child = supervisor.processes.start(order, theirs).await?;
    Ok((child, ours))
}

// Sends what the command writes until it has ended and the pipe is empty. What it leaves running may
// hold the pipe open: its output is thrown away, because a closed pipe would kill it.
async fn pump_out(
    connection: &Connection,
    receiver: pipe::Receiver,
    stream: StreamId,
    credit: &Credit,
    mut exited: watch::Receiver<bool>,
) {
    let mut buffer = vec![0u8; FIRST_READ_BYTES];
    let mut left = MAX_PIPE_BYTES;
    loop {
        let may = credit.available(buffer.len()).await;
        let last = *exited.borrow();
        if left == 0 || connection.is_over() {
            tokio::task::spawn_local(throw_away(receiver));
            break;
        }
        match read_now(&receiver, &mut buffer[..may], last) {
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
                tokio::task::spawn_local(throw_away(receiver));
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

// What a pipe can hold (`fs.pipe-max-size`): an ended command has written no more than this since it
// was last read. What goes on coming is of something it left running.
const MAX_PIPE_BYTES: usize = 1 << 20;

/// Reads what somebody who has ended has left in a pipe, and no more.
pub(crate) fn read_rest(receiver: &pipe::Receiver, mut take: impl FnMut(&[u8])) {
    let (mut buffer, mut left) = ([0u8; 8192], MAX_PIPE_BYTES);
    while left > 0
        && let Ok(count @ 1..) = read_now(receiver, &mut buffer, true)
    {
        take(&buffer[..count]);
        left = left.saturating_sub(count);
    }
}

/// Reads without waiting. The runtime may not know yet that a pipe has become readable; after the
/// writer's end only the kernel's own word counts.
pub(crate) fn read_now(
    receiver: &pipe::Receiver,
    buffer: &mut [u8],
    last: bool,
) -> std::io::Result<usize> {
    if last { Ok(rustix::io::read(receiver, buffer)?) } else { receiver.try_read(buffer) }
}

// A full pipe each time: 13 MB a second are enough for what nobody reads, and whoever writes more
// waits at its own cost instead of keeping pid 1 busy, which no limit of the sandbox covers.
const THROWN_AWAY_BYTES: usize = 64 * 1024;
const THROW_AWAY_PAUSE: Duration = Duration::from_millis(5);

/// Reads a pipe to nowhere until nobody holds its other end.
pub(crate) async fn throw_away(receiver: pipe::Receiver) {
    loop {
        let read = receiver.try_read(&mut vec![0u8; THROWN_AWAY_BYTES]);
        match read {
            Ok(0) => return,
            Ok(_) => tokio::time::sleep(THROW_AWAY_PAUSE).await,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                if receiver.readable().await.is_err() {
                    return;
                }
            }
            Err(_) => return,
        }
    }
}

// Never returns: the command's end is what ends it. A command that no longer reads must not stall
// its dialer, so what it does not take is dropped.
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
            let bytes = inbox.used(bytes.len());
            connection.say(harvest_proto::bridge::FromSupervisor::Credit { stream, bytes }).await;
        }
    }
    drop(sender);
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_never_ends_is_read_up_to_what_a_pipe_can_hold() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let _inside = runtime.enter();
        let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).unwrap();
        let receiver = pipe::Receiver::from_owned_fd(ours).unwrap();
        let refill = |bytes: usize| rustix::io::write(&theirs, &vec![0; bytes]).unwrap();
        refill(4096);
        let mut taken = 0;
        // Somebody writes as fast as we read: the pipe is never empty.
        read_rest(&receiver, |bytes| {
            taken += bytes.len();
            assert!(taken <= MAX_PIPE_BYTES + 8192, "it goes on for ever");
            refill(bytes.len());
        });
        assert!(taken >= MAX_PIPE_BYTES);
    }
}
