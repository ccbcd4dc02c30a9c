//! Starts commands and the agent, and knows when they and everything they started are dead.
//!
//! ```text
//! pid 1 ── nursery (in the commands' cgroup) ── launcher ── command ── …
//!     └─── launcher (joins the agent's cgroup) ── agent ── …
//! ```
//!
//! Pid 1 holds a socket to each launcher. Free launchers of the commands' cgroup are kept and used
//! again, so that a command usually costs one fork and one exec. Dropping a [`Child`] before it has
//! ended kills it with everything below it.

pub(crate) mod controlled;
mod descendants;
pub(crate) mod launcher;
pub(crate) mod nursery;
mod order;

use std::{
    cell::RefCell,
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    process::{Command, Stdio},
    rc::Rc,
};

use harvest_proto::bridge::{Fault, FaultCode};
use rustix::process::{Resource, Rlimit};
use tokio::{io::Interest, net::UnixStream};

pub(crate) use self::order::{End, Order};
use self::order::{FromLauncher, ToLauncher};
use crate::{log, passing, still};

// A cgroup that is killed again and again is somebody's wish, not bad luck.
const TRIES: usize = 5;

const NOT_STARTED: &str = "no process could be started for the command";

// Enough for a burst of small commands; each idle launcher holds about 0.1 MB.
const IDLE_LAUNCHERS: usize = 2;

// A door with 1,024 connections, two descriptors each, and as many again for commands.
const OWN_FILES: u64 = 8192;

/// The stdin, stdout and stderr a command gets.
pub(crate) type Triple = [OwnedFd; 3];

/// Starts processes.
pub(crate) struct Processes {
    joins: Vec<OwnedFd>,
    nursery: RefCell<Option<Rc<UnixStream>>>,
    idle: RefCell<Vec<Launcher>>,
    files: String,
}

impl Processes {
    /// Raises pid 1's own limit of open files and starts the nursery of the cgroup `joins` lead into.
    /// `settled` is called when that has led to a launcher that waits, or to nothing.
    pub(crate) fn new(joins: Vec<OwnedFd>, settled: impl FnOnce() + 'static) -> Rc<Self> {
        let processes = Rc::new(Self {
            joins,
            nursery: RefCell::default(),
            idle: RefCell::default(),
            files: raise_files().map_or_else(String::new, |files| files.to_string()),
        });
        let early = Rc::clone(&processes);
        // So that the first command finds a launcher waiting.
        tokio::task::spawn_local(async move {
            early.refill().await;
            settled();
        });
        processes
    }

    /// Starts a command in the commands' cgroup.
    pub(crate) async fn start(
        self: &Rc<Self>,
        order: Order,
        stdio: Triple,
    ) -> Result<Child, Fault> {
        let message = message(&order);
        for _ in 0..TRIES {
            let kept = self.idle.borrow_mut().pop();
            let mut launcher = match kept {
                Some(launcher) => launcher,
                None => self
                    .launcher()
                    .await
                    .map_err(|error| system("cannot reach a launcher", &error))?,
            };
            let descriptors: Vec<BorrowedFd<'_>> = stdio.iter().map(AsFd::as_fd).collect();
            // A launcher may be killed at any moment, with its cgroup, with its nursery or for memory.
            // What it has not taken has had no effect, so another one may have it.
            if launcher.send(&message, &descriptors).await.is_ok()
                && let Some(child) = Child::started(launcher, Some(Rc::clone(self)), &order).await?
            {
                return Ok(child);
            }
        }
        Err(Fault::new(FaultCode::System, NOT_STARTED))
    }

    /// Starts a process in the cgroup that `joins` lead into; for what is rarely started.
    pub(crate) async fn start_joined(
        &self,
        order: Order,
        stdio: Triple,
        joins: &[OwnedFd],
    ) -> Result<Child, Fault> {
        let spawned =
            self.spawn_role("launcher").map_err(|error| system("cannot start a launcher", &error));
        let mut launcher = Launcher { socket: spawned?, line: Vec::new() };
        let descriptors: Vec<BorrowedFd<'_>> = stdio.iter().chain(joins).map(AsFd::as_fd).collect();
        let sent = launcher.send(&message(&order), &descriptors).await;
        sent.map_err(|error| system("cannot reach a launcher", &error))?;
        Child::started(launcher, None, &order)
            .await?
            .ok_or_else(|| Fault::new(FaultCode::System, NOT_STARTED))
    }

    async fn launcher(&self) -> io::Result<Launcher> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let ours = UnixStream::from_std(ours)?;
        // The nursery may have died with its cgroup: then a new one joins.
        for _ in 0..2 {
            let nursery = self.nursery().await?;
            match send(&nursery, &passing::framed(b""), &[theirs.as_fd()]).await {
                Ok(()) => return Ok(Launcher { socket: ours, line: Vec::new() }),
                Err(error) => {
                    log::line(format_args!("the nursery is gone, starting another: {error}"));
                    self.nursery.borrow_mut().take();
                }
            }
        }
        Err(io::ErrorKind::BrokenPipe.into())
    }

    async fn nursery(&self) -> io::Result<Rc<UnixStream>> {
        if let Some(nursery) = self.nursery.borrow().as_ref() {
            return Ok(Rc::clone(nursery));
        }
        let socket = Rc::new(self.spawn_role("nursery")?);
        let joins: Vec<BorrowedFd<'_>> = self.joins.iter().map(AsFd::as_fd).collect();
        send(&socket, &passing::framed(b""), &joins).await?;
        *self.nursery.borrow_mut() = Some(Rc::clone(&socket));
        Ok(socket)
    }

    fn spawn_role(&self, role: &str) -> io::Result<UnixStream> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // Pid 1 reaps it like every other child; the handle is of no use.
        Command::new("/proc/self/exe")
            .args([role, &self.files])
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(crate::exec::empty()?))
            .spawn()?;
        still::include_newcomers();
        UnixStream::from_std(ours)
    }

    async fn refill(&self) {
        match self.waiting().await {
            Ok(launcher) => self.keep(launcher),
            Err(error) => log::line(format_args!("cannot start a launcher: {error}")),
        }
    }

    /// A launcher that has been born.
    async fn waiting(&self) -> io::Result<Launcher> {
        let mut launcher = self.launcher().await?;
        match launcher.next().await? {
            Some(_) => Ok(launcher),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    fn keep(&self, launcher: Launcher) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < IDLE_LAUNCHERS {
            idle.push(launcher);
        }
    }
}

/// A started process.
pub(crate) struct Child {
    pid: u32,
    launcher: Option<Launcher>,
    end: Option<End>,
    pool: Option<Rc<Processes>>,
    abandoned: bool,
}

impl Child {
    // `None` when the launcher died before it took the order.
    async fn started(
        mut launcher: Launcher,
        pool: Option<Rc<Processes>>,
        order: &Order,
    ) -> Result<Option<Self>, Fault> {
        let mut taken = false;
        loop {
            match launcher.next().await {
                Ok(Some(FromLauncher::Waiting)) => {}
                Ok(Some(FromLauncher::Taken)) => taken = true,
                Ok(Some(FromLauncher::Started { pid })) => {
                    return Ok(Some(Self {
                        pid,
                        launcher: Some(launcher),
                        end: None,
                        pool,
                        abandoned: false,
                    }));
                }
                Ok(Some(FromLauncher::Failed { errno, message })) => {
                    if let Some(pool) = pool {
                        pool.keep(launcher);
                    }
                    return Err(start_fault(order, errno, &message));
                }
                _ if taken => return Err(Fault::new(FaultCode::System, NOT_STARTED)),
                _ => return Ok(None),
            }
        }
    }

    /// Its pid inside.
    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process itself has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.end.is_some()
    }

    /// Waits for the process itself; what it left behind may live on. Cancel-safe.
    pub(crate) async fn wait(&mut self) -> End {
        while self.end.is_none() {
            self.advance().await;
        }
        self.end.unwrap_or(End::Signal(9))
    }

    /// Kills the process and everything below it; returns when nothing of it is left.
    pub(crate) async fn kill(&mut self) -> End {
        if let Some(launcher) = &mut self.launcher {
            let kill = serde_json::to_vec(&ToLauncher::Kill).unwrap_or_default();
            let _launcher_is_gone = launcher.send(&kill, &[]).await;
        }
        while self.launcher.is_some() {
            self.advance().await;
        }
        self.end.unwrap_or(End::Signal(9))
    }

    /// Whether its launcher was killed before it could say that nothing is left.
    pub(crate) fn was_abandoned(&self) -> bool {
        self.abandoned
    }

    // One report; without one the launcher was killed, and the command with it (the nursery sees
    // to that).
    async fn advance(&mut self) {
        let Some(launcher) = &mut self.launcher else {
            self.end.get_or_insert(End::Signal(9));
            return;
        };
        match launcher.next().await {
            Ok(Some(FromLauncher::Exited(end))) => self.end = Some(end),
            Ok(Some(FromLauncher::Gone)) => {
                if let (Some(pool), Some(launcher)) = (&self.pool, self.launcher.take()) {
                    pool.keep(launcher);
                }
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => {
                self.launcher = None;
                self.abandoned = true;
                self.end.get_or_insert(End::Signal(9));
            }
        }
    }
}

impl Drop for Child {
    // A command that has ended gives its launcher back as soon as nothing is left below it; one that
    // has not is killed by its launcher, which sees its socket close.
    fn drop(&mut self) {
        let (Some(_), Some(mut launcher), Some(pool)) =
            (self.end, self.launcher.take(), self.pool.take())
        else {
            return;
        };
        tokio::task::spawn_local(async move {
            while let Ok(Some(report)) = launcher.next().await {
                if report == FromLauncher::Gone {
                    pool.keep(launcher);
                    return;
                }
            }
        });
    }
}

/// The socket to a launcher.
struct Launcher {
    socket: UnixStream,
    line: Vec<u8>,
}

impl Launcher {
    async fn send(&mut self, message: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        send(&self.socket, &passing::framed(message), descriptors).await
    }

    // Cancel-safe: what has been read stays in `line`.
    async fn next(&mut self) -> io::Result<Option<FromLauncher>> {
        loop {
            if let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            self.socket.readable().await?;
            let mut piece = [0u8; 512];
            match self.socket.try_read(&mut piece) {
                Ok(0) => return Ok(None),
                Ok(count) => self.line.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
    }
}

async fn send(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        let attached = if sent == 0 { descriptors } else { &[] };
        sent += socket
            .async_io(Interest::WRITABLE, || passing::send_some(socket, &bytes[sent..], attached))
            .await?;
    }
    Ok(())
}

fn message(order: &Order) -> Vec<u8> {
    serde_json::to_vec(&ToLauncher::Run(order.clone()))
        .expect("orders hold only maps with text keys")
}

fn system(doing: &str, error: &io::Error) -> Fault {
    Fault::new(FaultCode::System, format!("{doing}: {error}"))
}

fn start_fault(order: &Order, errno: i32, message: &str) -> Fault {
    use rustix::io::Errno;
    let program = order.argv.first().map_or("", String::as_str);
    if !std::path::Path::new(&order.cwd).is_dir() {
        return Fault::new(
            FaultCode::NotFound,
            format!("the working folder `{}` is not there", order.cwd),
        );
    }
    let code = match Errno::from_raw_os_error(errno) {
        Errno::NOENT | Errno::NOTDIR => FaultCode::NotFound,
        Errno::ACCESS | Errno::NOEXEC | Errno::ISDIR | Errno::LOOP | Errno::PERM => {
            FaultCode::NotExecutable
        }
        Errno::INVAL | Errno::TOOBIG | Errno::NAMETOOLONG => FaultCode::Invalid,
        _ => FaultCode::System,
    };
    Fault::new(code, format!("cannot start `{program}`: {message}"))
}

/// Joins the cgroups these descriptors lead into; nothing may run outside its limits.
fn join(descriptors: impl Iterator<Item = OwnedFd>) -> io::Result<()> {
    for descriptor in descriptors {
        std::fs::File::from(descriptor).write_all(b"0")?;
    }
    Ok(())
}

// Pid 1 needs many descriptors; commands get the limit the sandbox was started with.
fn raise_files() -> Option<u64> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted = limit.maximum.map_or(OWN_FILES, |maximum| maximum.min(OWN_FILES));
    if limit.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
        if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
            log::line(format_args!("cannot raise the limit of open files: {error}"));
        }
    }
    limit.current
}

/// Lets no file become larger than this, for good: for this process and what it starts.
pub(crate) fn limit_file_size(bytes: Option<u64>) -> io::Result<()> {
    match bytes {
        Some(_) => Ok(rustix::process::setrlimit(
            Resource::Fsize,
            Rlimit { current: bytes, maximum: bytes },
        )?),
        None => Ok(()),
    }
}

fn limit_files(files: Option<&str>) {
    let Some(current) = files.and_then(|files| files.parse().ok()) else { return };
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let _keeps_ours =
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum });
}
