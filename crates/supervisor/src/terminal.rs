//! Runs a command on a terminal of its own: makes the terminal, carries what is typed and shown, and hangs
//! up when whoever looks at it is gone. Job control is the kernel's and the shell's.
//!
//! To hang up is what closing a terminal's window does: the shell and what is in the foreground get
//! SIGHUP. Who has not gone a moment later is killed with everything below it; what a shell that went
//! by itself left behind on purpose (`nohup`, a terminal multiplexer) stays, as after any command.

use std::{
    io,
    os::fd::OwnedFd,
    rc::Rc,
    time::{Duration, Instant},
};

use harvest_proto::bridge::{
    Command, Exit, Fault, FaultCode, MAX_DATA_BYTES, Reply, RequestId, StreamId, Terminal,
};
use rustix::{
    fs::{Mode, OFlags},
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize},
};
use tokio::{
    net::unix::pipe,
    sync::{Notify, watch},
    time::timeout,
};

use crate::{
    connection::Connection,
    exec::{Streams, pump_in, read_now},
    processes::{Child, Order},
    streams::Credit,
    supervisor::Supervisor,
};

// In the sandbox's own devpts, where nobody inside can put anything else in its place.
const MULTIPLEXER: &str = "/dev/pts/ptmx";

// What a shell gets to write its history after the hang-up.
const GRACE: Duration = Duration::from_secs(2);

// A prompt is short; what scrolls by makes the buffer grow.
const FIRST_READ_BYTES: usize = 1024;

// What a terminal holds that nobody has read (the kernel's limit for both halves): an ended command has
// shown no more than this since. What goes on coming is of something it left running.
const MAX_UNREAD_BYTES: usize = 128 * 1024;

/// Our end of a terminal, which hangs up when nobody holds it any more.
#[derive(Debug)]
pub(crate) struct Master(OwnedFd);

impl Master {
    /// A new terminal: our end and the command's.
    fn open(size: &Terminal, order: &Order) -> io::Result<(Self, OwnedFd)> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let ours = rustix::fs::open(MULTIPLEXER, flags, Mode::empty())?;
        unlockpt(&ours)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let theirs = ioctl_tiocgptpeer(&ours, flags)?;
        // So that erasing takes a whole letter.
        let mut modes = tcgetattr(&theirs)?;
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&theirs, OptionalActions::Now, &modes)?;
        // So that programs may open it by name. The group stays the terminals'.
        let _only_by_name =
            rustix::fs::fchown(&theirs, Some(rustix::fs::Uid::from_raw(order.uid)), None);
        let master = Self(ours);
        master.resize(size.rows, size.cols)?;
        Ok((master, theirs))
    }

    /// Gives it another size; what runs in the foreground is told by SIGWINCH.
    pub(crate) fn resize(&self, rows: u16, cols: u16) -> io::Result<()> {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.0, size)?)
    }

    // To the runtime a terminal is a pipe whose ends are one.
    fn ends(&self) -> io::Result<(pipe::Sender, pipe::Receiver)> {
        let sender = pipe::Sender::from_owned_fd_unchecked(self.0.try_clone()?)?;
        Ok((sender, pipe::Receiver::from_owned_fd_unchecked(self.0.try_clone()?)?))
    }
}

/// A command and the terminal it runs on. Dropped before the command has ended, it hangs up.
struct Line {
    master: Option<Rc<Master>>,
    child: Option<Child>,
}

impl Line {
    async fn spawn(supervisor: &Supervisor, order: Order, size: &Terminal) -> Result<Self, Fault> {
        let system = |error: io::Error| {
            Fault::new(FaultCode::System, format!("cannot make a terminal: {error}"))
        };
        let (master, theirs) = Master::open(size, &order).map_err(system)?;
        let again = || theirs.try_clone().map_err(system);
        let triple = [again()?, again()?, theirs];
        let child = supervisor.processes.start(order, triple).await?;
        Ok(Self { master: Some(Rc::new(master)), child: Some(child) })
    }

    fn ends(&self) -> Option<(pipe::Sender, pipe::Receiver)> {
        self.master.as_ref()?.ends().ok()
    }

    /// Hangs up; returns when the command and, unless it went by itself, all it started are gone.
    async fn hang_up(&mut self) {
        self.master.take();
        if let Some(child) = &mut self.child
            && timeout(GRACE, child.wait()).await.is_err()
        {
            child.kill().await;
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.child.as_ref().is_some_and(|child| !child.has_ended()) {
            let mut line = Self { master: self.master.take(), child: self.child.take() };
            // What is dropped at its end has ended, and is not hung up again.
            tokio::task::spawn_local(async move { line.hang_up().await });
        }
    }
}

/// Runs a command on a new terminal until it has ended or its dialer wants no more of it.
pub(crate) async fn run(
    connection: &Rc<Connection>,
    id: RequestId,
    order: Order,
    command: &Command,
    size: &Terminal,
    streams: Streams,
    kill: &Notify,
) {
    let began = Instant::now();
    let oom_before = connection.supervisor.oom.read();
    let mut line = match Line::spawn(&connection.supervisor, order, size).await {
        Ok(line) => line,
        Err(fault) => {
            Streams::forget(connection, command);
            return connection.refuse_exec(id, fault).await;
        }
    };
    let pid = line.child.as_ref().map_or(0, Child::pid);
    if let Some(master) = &line.master {
        connection.has_terminal(id, master);
    }
    connection.reply(id, Ok(Reply::Started { pid, terminal: true })).await;
    connection.end(command.stderr).await;
    let exit = carry(connection, &mut line, command, &streams, kill, oom_before).await;
    Streams::forget(connection, command);
    let millis = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    connection.exited(id, exit, millis).await;
}

async fn carry(
    connection: &Connection,
    line: &mut Line,
    command: &Command,
    streams: &Streams,
    kill: &Notify,
    oom_before: u64,
) -> Exit {
    let Some((typed, screen)) = line.ends() else { return Exit::Killed };
    let Some(child) = &mut line.child else { return Exit::Killed };
    let (ended, exited) = watch::channel(false);
    let shown = async {
        let wait = async {
            let end = child.wait().await;
            ended.send_replace(true);
            end
        };
        tokio::join!(wait, show(connection, &screen, command.stdout, &streams.stdout, exited)).0
    };
    let time_is_up = async {
        match command.timeout_millis {
            Some(limit) => tokio::time::sleep(Duration::from_millis(limit)).await,
            None => std::future::pending().await,
        }
    };
    let exit = tokio::select! {
        end = shown => return connection.supervisor.exit(end, oom_before),
        () = time_is_up => Exit::Timeout,
        () = kill.notified() => Exit::Killed,
        exit = pump_in(connection, Some(typed), command.stdin, streams.stdin.clone()) => exit,
    };
    drop(screen);
    line.hang_up().await;
    connection.end(command.stdout).await;
    exit
}

// Sends what is shown until the command has ended and the terminal has nothing more.
async fn show(
    connection: &Connection,
    screen: &pipe::Receiver,
    stream: StreamId,
    credit: &Credit,
    mut exited: watch::Receiver<bool>,
) {
    let mut buffer = vec![0u8; FIRST_READ_BYTES];
    let mut left = MAX_UNREAD_BYTES;
    while left > 0 {
        let may = credit.available(buffer.len()).await;
        let last = *exited.borrow();
        match read_now(screen, &mut buffer[..may], last) {
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
            // Nobody holds the other end any more (EIO), or nobody we wait for.
            Ok(_) | Err(_) => break,
        }
    }
    connection.end(stream).await;
}
