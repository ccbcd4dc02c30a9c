//! Starts commands and the agent, and knows when they and all their descendants have exited.
//!
//! ```text
//! pid 1 ── spawner (in the commands' cgroup) ── launcher ── command ── …
//!     └─── launcher (joins the agent's cgroup) ── agent ── …
//! ```
//!
//! Pid 1 holds a socket to each launcher. Idle launchers of the commands' cgroup are pooled, so
//! that a command usually costs one fork and one exec. Dropping a [`Child`] before it has exited
//! kills it with all its descendants.

mod descendants;
pub(crate) mod exec_role;
pub(crate) mod launcher;
mod launcher_protocol;
pub(crate) mod spawner;

use std::{
    cell::{Cell, RefCell},
    io::{self, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream as StdUnixStream,
    },
    process::{Command, Stdio},
    rc::Rc,
    time::Duration,
};

use harvest_proto::bridge::{Fault, FaultCode};
use rustix::{
    process::{Resource, Rlimit},
    thread::{CpuSet, sched_setaffinity},
};
use tokio::{io::Interest, net::UnixStream, sync::Notify};

use self::launcher_protocol::{FromLauncher, ToLauncher};
pub(crate) use self::launcher_protocol::{ProcessExit, ProcessSpec};
use crate::{fd_passing, freeze, log};

// Pauses between attempts to start a command, 3.8 s together: the engine kills all commands of a
// sandbox over its disk limit, launchers included, and repeats that for up to 2 s.
const RETRY_PAUSES_MILLIS: [u64; 8] = [0, 30, 60, 120, 240, 480, 960, 1920];

const NOT_STARTED: &str = "could not start a process for the command: every attempt was killed, \
    as the sandbox is over its limit of disk, memory or processes";

// Enough for a burst of small commands; each idle launcher takes about 0.1 MB.
const MAX_IDLE_LAUNCHERS: usize = 2;

// 1,024 connections of the door with two descriptors each, and as many again for commands.
const SUPERVISOR_FILE_LIMIT: u64 = 8192;

// The reaper threads of launchers and the spawner only wait and write short lines.
const REAPER_STACK_BYTES: usize = 64 * 1024;

/// Stdin, stdout and stderr of a command.
pub(crate) type StdioFds = [OwnedFd; 3];

pub(crate) struct Processes {
    joins: Vec<OwnedFd>,
    spawner: RefCell<Option<Rc<UnixStream>>>,
    idle: RefCell<Vec<Launcher>>,
    files: String,
    /// Running commands, without the agent.
    running: Cell<usize>,
    /// Notified when a command is about to start.
    pub(crate) started: Notify,
}

impl Processes {
    /// Raises pid 1's limit of open files and starts the spawner in the cgroups of `joins`.
    /// `settled` is called when the first launcher is ready or has failed.
    pub(crate) fn new(joins: Vec<OwnedFd>, settled: impl FnOnce() + 'static) -> Rc<Self> {
        let processes = Rc::new(Self {
            joins,
            spawner: RefCell::default(),
            idle: RefCell::default(),
            files: raise_file_limit().map_or_else(String::new, |files| files.to_string()),
            running: Cell::default(),
            started: Notify::new(),
        });
        let early = Rc::clone(&processes);
        // The first command finds a launcher ready.
        tokio::task::spawn_local(async move {
            if let Err(error) = early.refill().await {
                log::line(format_args!("cannot start a launcher: {error}"));
            }
            settled();
        });
        processes
    }

    /// Starts a command in the commands' cgroup.
    pub(crate) async fn start(
        self: &Rc<Self>,
        spec: ProcessSpec,
        stdio: StdioFds,
    ) -> Result<Child, Fault> {
        let running = RunningGuard::new(Rc::clone(self));
        let run = ToLauncher::Run(spec.clone());
        for pause in RETRY_PAUSES_MILLIS {
            if pause > 0 {
                tokio::time::sleep(Duration::from_millis(pause)).await;
            }
            let idle = self.idle.borrow_mut().pop();
            let mut launcher = match idle {
                Some(launcher) => launcher,
                None => match self.launcher().await {
                    Ok(launcher) => launcher,
                    Err(error) => {
                        log::line(format_args!("cannot reach a launcher: {error}"));
                        continue;
                    }
                },
            };
            let descriptors: Vec<BorrowedFd<'_>> = stdio.iter().map(AsFd::as_fd).collect();
            // A launcher may be killed at any moment: with its cgroup, with its spawner or by the
            // OOM killer. A request it has not accepted had no effect, so another launcher may run
            // it.
            if launcher.send(&run, &descriptors).await.is_ok()
                && let Some(mut child) =
                    Child::started(launcher, Some(Rc::clone(self)), &spec).await?
            {
                child.running = Some(running);
                return Ok(child);
            }
        }
        Err(Fault::system(NOT_STARTED))
    }

    /// Starts a process in the cgroups of `joins`, with a launcher of its own.
    pub(crate) async fn start_joined(
        &self,
        spec: ProcessSpec,
        stdio: StdioFds,
        joins: &[OwnedFd],
    ) -> Result<Child, Fault> {
        let spawned =
            self.spawn_role("launcher").map_err(|error| system("cannot start a launcher", &error));
        let mut launcher = Launcher { socket: spawned?, line: Vec::new() };
        let descriptors: Vec<BorrowedFd<'_>> = stdio.iter().chain(joins).map(AsFd::as_fd).collect();
        let sent = launcher.send(&ToLauncher::Run(spec.clone()), &descriptors).await;
        sent.map_err(|error| system("cannot reach a launcher", &error))?;
        Child::started(launcher, None, &spec).await?.ok_or_else(|| Fault::system(NOT_STARTED))
    }

    /// Whether a command runs; the agent does not count.
    pub(crate) fn are_running(&self) -> bool {
        self.running.get() > 0
    }

    async fn launcher(&self) -> io::Result<Launcher> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let ours = UnixStream::from_std(ours)?;
        // The spawner may have been killed with its cgroup: then a new one is started.
        for _ in 0..2 {
            let spawner = self.spawner().await?;
            match send(&spawner, &fd_passing::frame(b""), &[theirs.as_fd()]).await {
                Ok(()) => return Ok(Launcher { socket: ours, line: Vec::new() }),
                Err(error) => {
                    log::line(format_args!("the spawner has exited, starting another: {error}"));
                    self.spawner.borrow_mut().take();
                }
            }
        }
        Err(io::ErrorKind::BrokenPipe.into())
    }

    async fn spawner(&self) -> io::Result<Rc<UnixStream>> {
        if let Some(spawner) = self.spawner.borrow().as_ref() {
            return Ok(Rc::clone(spawner));
        }
        let socket = Rc::new(self.spawn_role("spawner")?);
        let joins: Vec<BorrowedFd<'_>> = self.joins.iter().map(AsFd::as_fd).collect();
        send(&socket, &fd_passing::frame(b""), &joins).await?;
        *self.spawner.borrow_mut() = Some(Rc::clone(&socket));
        Ok(socket)
    }

    fn spawn_role(&self, role: &str) -> io::Result<UnixStream> {
        let (ours, theirs) = StdUnixStream::pair()?;
        ours.set_nonblocking(true)?;
        // The handle is not needed: pid 1 reaps all children.
        Command::new("/proc/self/exe")
            .args([role, &self.files])
            .env_clear()
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::from(crate::pipes::dev_null()?))
            .spawn()?;
        freeze::freeze_new_processes();
        UnixStream::from_std(ours)
    }

    async fn refill(&self) -> io::Result<()> {
        let mut launcher = self.launcher().await?;
        launcher.next().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.release(launcher);
        Ok(())
    }

    fn release(&self, launcher: Launcher) {
        let mut idle = self.idle.borrow_mut();
        if idle.len() < MAX_IDLE_LAUNCHERS {
            idle.push(launcher);
        }
    }
}

pub(crate) struct Child {
    pid: u32,
    launcher: Option<Launcher>,
    exit: Option<ProcessExit>,
    pool: Option<Rc<Processes>>,
    launcher_died: bool,
    /// Absent for the agent.
    running: Option<RunningGuard>,
}

impl Child {
    // `None` when the launcher died before it accepted the request.
    async fn started(
        mut launcher: Launcher,
        pool: Option<Rc<Processes>>,
        spec: &ProcessSpec,
    ) -> Result<Option<Self>, Fault> {
        let mut accepted = false;
        loop {
            match launcher.next().await {
                Ok(Some(FromLauncher::Ready)) => {}
                Ok(Some(FromLauncher::Accepted)) => accepted = true,
                Ok(Some(FromLauncher::Started { pid })) => {
                    return Ok(Some(Self {
                        pid,
                        launcher: Some(launcher),
                        exit: None,
                        pool,
                        launcher_died: false,
                        running: None,
                    }));
                }
                Ok(Some(FromLauncher::Failed { errno, message })) => {
                    if let Some(pool) = pool {
                        pool.release(launcher);
                    }
                    return Err(start_fault(spec, errno, &message));
                }
                // The command may have run: it was killed with its launcher.
                _ if accepted => {
                    return Ok(Some(Self {
                        pid: 0,
                        launcher: None,
                        exit: Some(ProcessExit::Signal(9)),
                        pool: None,
                        launcher_died: true,
                        running: None,
                    }));
                }
                _ => return Ok(None),
            }
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process itself has exited; its descendants may still run.
    pub(crate) fn has_exited(&self) -> bool {
        self.exit.is_some()
    }

    /// Waits for the process itself; its descendants may still run. Cancel-safe.
    pub(crate) async fn wait(&mut self) -> ProcessExit {
        while self.exit.is_none() {
            self.advance().await;
        }
        self.exit.unwrap_or(ProcessExit::Signal(9))
    }

    /// Kills the process and all its descendants; returns when none is left.
    pub(crate) async fn kill(&mut self) -> ProcessExit {
        if let Some(launcher) = &mut self.launcher {
            let _launcher_is_gone = launcher.send(&ToLauncher::Kill, &[]).await;
        }
        while self.launcher.is_some() {
            self.advance().await;
        }
        self.exit.unwrap_or(ProcessExit::Signal(9))
    }

    /// Whether the launcher died before it reported that no descendant is left.
    pub(crate) fn launcher_died(&self) -> bool {
        self.launcher_died
    }

    // Reads one report. At the end of the stream the launcher was killed, and the spawner kills the
    // command.
    async fn advance(&mut self) {
        let Some(launcher) = &mut self.launcher else {
            self.exit.get_or_insert(ProcessExit::Signal(9));
            return;
        };
        match launcher.next().await {
            Ok(Some(FromLauncher::Exited(exit))) => self.exit = Some(exit),
            Ok(Some(FromLauncher::Idle)) => {
                if let (Some(pool), Some(launcher)) = (&self.pool, self.launcher.take()) {
                    pool.release(launcher);
                }
            }
            Ok(Some(_)) => {}
            Ok(None) | Err(_) => {
                self.launcher = None;
                self.launcher_died = true;
                self.exit.get_or_insert(ProcessExit::Signal(9));
            }
        }
    }
}

impl Drop for Child {
    // After the command has exited, the launcher returns to the pool when no descendant is left. A
    // running command is killed by its launcher, which sees its socket close.
    fn drop(&mut self) {
        let (Some(_), Some(mut launcher), Some(pool)) =
            (self.exit, self.launcher.take(), self.pool.take())
        else {
            return;
        };
        tokio::task::spawn_local(async move {
            while let Ok(Some(report)) = launcher.next().await {
                if report == FromLauncher::Idle {
                    pool.release(launcher);
                    return;
                }
            }
        });
    }
}

/// Counts a command as running until it is dropped.
struct RunningGuard(Rc<Processes>);

impl RunningGuard {
    fn new(processes: Rc<Processes>) -> Self {
        processes.running.update(|count| count + 1);
        processes.started.notify_one();
        Self(processes)
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.0.running.update(|count| count.saturating_sub(1));
    }
}

/// The connection to a launcher.
struct Launcher {
    socket: UnixStream,
    line: Vec<u8>,
}

impl Launcher {
    async fn send(
        &mut self,
        message: &ToLauncher,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let message = fd_passing::frame(&serde_json::to_vec(message)?);
        send(&self.socket, &message, descriptors).await
    }

    // Cancel-safe: partial input stays in `line`.
    async fn next(&mut self) -> io::Result<Option<FromLauncher>> {
        loop {
            if let Some(end) = self.line.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.line.drain(..=end).collect();
                return Ok(Some(serde_json::from_slice(&line)?));
            }
            self.socket.readable().await?;
            let mut chunk = [0u8; 512];
            match self.socket.try_read(&mut chunk) {
                Ok(0) => return Ok(None),
                Ok(count) => self.line.extend_from_slice(&chunk[..count]),
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
            .async_io(Interest::WRITABLE, || {
                fd_passing::send_some(socket, &bytes[sent..], attached)
            })
            .await?;
    }
    Ok(())
}

fn system(doing: &str, error: &io::Error) -> Fault {
    Fault::system(format!("{doing}: {error}"))
}

fn start_fault(spec: &ProcessSpec, errno: i32, message: &str) -> Fault {
    use rustix::io::Errno;
    let program = spec.argv.first().map_or("", String::as_str);
    if !std::path::Path::new(&spec.cwd).is_dir() {
        return Fault::not_found(format!("the working directory `{}` does not exist", spec.cwd));
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

/// Joins the cgroups of these descriptors; on failure nothing may run, as it would escape its
/// limits.
fn join(descriptors: impl Iterator<Item = OwnedFd>) -> io::Result<()> {
    for descriptor in descriptors {
        std::fs::File::from(descriptor).write_all(b"0")?;
    }
    Ok(())
}

// Raises the limit for pid 1 and returns the original one, which commands get.
fn raise_file_limit() -> Option<u64> {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let wanted =
        limit.maximum.map_or(SUPERVISOR_FILE_LIMIT, |maximum| maximum.min(SUPERVISOR_FILE_LIMIT));
    if limit.current.is_some_and(|current| current < wanted) {
        let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
        if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
            log::line(format_args!("cannot raise the limit of open files: {error}"));
        }
    }
    limit.current
}

/// Sets `RLIMIT_FSIZE`, permanently, for this process and its children.
pub(crate) fn limit_file_size(bytes: Option<u64>) -> io::Result<()> {
    if bytes.is_some() {
        let limit = Rlimit { current: bytes, maximum: bytes };
        rustix::process::setrlimit(Resource::Fsize, limit)?;
    }
    Ok(())
}

/// Runs this thread and its children on these CPUs, which `nproc` and language runtimes count.
fn run_on(cpus: &[u32]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu as usize));
    // A CPU that went offline leaves the default, which is to run on all.
    let _all_cpus = (!cpus.is_empty()).then(|| sched_setaffinity(None, &set));
}

fn set_file_limit(files: Option<&str>) {
    let Some(current) = files.and_then(|files| files.parse().ok()) else { return };
    let maximum = rustix::process::getrlimit(Resource::Nofile).maximum;
    let _keeps_current =
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: Some(current), maximum });
}
