//! The process between pid 1 and a command. It starts the command and is the subreaper of all its
//! descendants, so that killing the command reaches double-forked and setsid'ed ones too. It runs
//! one command at a time and is reused when no descendant is left.
//!
//! If its socket closes while the command runs, the launcher kills the command. After the command
//! has exited it stays until the last descendant has exited.

use std::{
    io::{self, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Command, ExitCode, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::{
    io::Errno,
    process::{Pid, WaitOptions},
};

use super::{
    REAPER_STACK_BYTES, descendants, exec_role,
    launcher_protocol::{FromLauncher, ProcessExit, ProcessSpec, ToLauncher},
};
use crate::{fd_passing, log};

/// The role's entry point; `files` is the limit of open files for commands.
pub(crate) fn main(files: Option<&str>) -> ExitCode {
    super::set_file_limit(files);
    log::exit_code("launcher: ", serve())
}

fn serve() -> io::Result<()> {
    let control = Arc::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?));
    // A new session: no terminal, and no process group shared with another launcher's commands.
    let _already_leader = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let alive = Arc::new(Alive::default());
    report(&control, &FromLauncher::Ready)?;
    loop {
        let Ok(Some((message, descriptors))) = fd_passing::receive(&control) else { break };
        match serde_json::from_slice(&message)? {
            ToLauncher::Run(spec) => run(&spec, descriptors, &control, &alive)?,
            ToLauncher::Kill => alive.kill(),
        }
    }
    if alive.command.load(Ordering::Acquire) {
        alive.kill();
    }
    while alive.any.load(Ordering::Acquire) {
        thread::park_timeout(Duration::from_secs(1));
    }
    Ok(())
}

/// Which children are alive.
#[derive(Debug, Default)]
struct Alive {
    command: AtomicBool,
    /// The command or any descendant.
    any: AtomicBool,
}

impl Alive {
    // Returns when `wait` has reported no children, which is the only proof.
    fn kill(&self) {
        let mut delay = Duration::from_micros(200);
        while self.any.load(Ordering::Acquire) {
            descendants::kill_below(rustix::process::getpid(), &|_| false);
            thread::park_timeout(delay);
            // At most 20 ms: a process in a long system call dies late.
            delay = (delay * 2).min(Duration::from_millis(20));
        }
    }
}

fn run(
    spec: &ProcessSpec,
    descriptors: Vec<OwnedFd>,
    control: &Arc<UnixStream>,
    alive: &Arc<Alive>,
) -> io::Result<()> {
    report(control, &FromLauncher::Accepted)?;
    let pid = match start(spec, descriptors) {
        Ok(pid) => pid,
        Err(error) => {
            // An error without a number comes from std, for example for a NUL byte in an argument.
            let errno = error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error());
            return report(control, &FromLauncher::Failed { errno, message: error.to_string() });
        }
    };
    alive.command.store(true, Ordering::Release);
    alive.any.store(true, Ordering::Release);
    report(control, &FromLauncher::Started { pid: pid.as_raw_nonzero().get().unsigned_abs() })?;
    let (reports, state, parent) = (Arc::clone(control), Arc::clone(alive), thread::current());
    thread::Builder::new().stack_size(REAPER_STACK_BYTES).spawn(move || {
        reap(pid, &reports, &state);
        parent.unpark();
    })?;
    Ok(())
}

fn start(spec: &ProcessSpec, descriptors: Vec<OwnedFd>) -> io::Result<Pid> {
    let mut descriptors = descriptors.into_iter();
    let mut next =
        || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput));
    let stdio = [next()?, next()?, next()?];
    super::join(descriptors)?;
    super::limit_file_size(spec.file_bytes)?;
    super::run_on(&spec.cpus);
    if spec.terminal || spec.undumpable {
        return exec_role::start(spec, &stdio);
    }
    let mut command = command(spec, stdio)?;
    set_user(&mut command, spec);
    let spawned = command.process_group(0).spawn();
    Ok(Pid::from_child(&spawned?))
}

pub(super) fn command(
    spec: &ProcessSpec,
    [stdin, stdout, stderr]: super::StdioFds,
) -> io::Result<Command> {
    let (program, arguments) = spec.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // Checked here because a failing chdir in spawn looks like a missing program.
    if !std::fs::metadata(&spec.cwd)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(&spec.env)
        .current_dir(&spec.cwd)
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::from(stderr));
    Ok(command)
}

/// Root keeps its capabilities; any other user loses them at exec. Setting the user clears the
/// supplementary groups.
pub(super) fn set_user(command: &mut Command, spec: &ProcessSpec) {
    if spec.uid != 0 || spec.gid != 0 {
        command.uid(spec.uid).gid(spec.gid);
    }
}

fn reap(command: Pid, control: &UnixStream, alive: &Alive) {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == command => {
                alive.command.store(false, Ordering::Release);
                let signal = status.terminating_signal().map(ProcessExit::Signal);
                let exit = signal.unwrap_or(ProcessExit::Code(status.exit_status().unwrap_or(0)));
                let _pid_1_is_gone = report(control, &FromLauncher::Exited(exit));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_no_child) => break,
        }
    }
    // Before the report: the next request may follow at once.
    alive.any.store(false, Ordering::Release);
    let _pid_1_is_gone = report(control, &FromLauncher::Idle);
}

fn report(mut control: &UnixStream, message: &FromLauncher) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    control.write_all(&line)
}
