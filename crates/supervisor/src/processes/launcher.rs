//! The process between pid 1 and a command: starts it, and is the reaper of everything below it,
//! so that "kill the command" reaches double-forked and setsid'ed descendants too. It serves one
//! command at a time and is used again once nothing is left below it.
//!
//! A launcher whose socket closes while its command runs kills it; one whose command has ended
//! stays for as long as something the command left behind lives.

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
    controlled, descendants,
    order::{End, FromLauncher, Order, ToLauncher},
};
use crate::{log, passing};

// The reaping thread only waits and writes short lines.
const REAPER_STACK_BYTES: usize = 64 * 1024;

/// The role's entry point; `files` is the limit of open files that commands get.
pub(crate) fn main(files: Option<&str>) -> ExitCode {
    super::limit_files(files);
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(format_args!("launcher: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    let control = Arc::new(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?));
    // A session of its own: no terminal, and no group shared with another launcher's commands.
    let _already_leader = rustix::process::setsid();
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let below = Arc::new(Below::default());
    report(&control, &FromLauncher::Waiting)?;
    loop {
        let Ok(Some((message, descriptors))) = passing::receive(&control) else { break };
        match serde_json::from_slice(&message)? {
            ToLauncher::Run(order) => run(&order, descriptors, &control, &below)?,
            ToLauncher::Kill => below.kill(),
        }
    }
    if below.command.load(Ordering::Acquire) {
        below.kill();
    }
    while below.anything.load(Ordering::Acquire) {
        thread::park_timeout(Duration::from_secs(1));
    }
    Ok(())
}

/// What lives below the launcher.
#[derive(Debug, Default)]
struct Below {
    /// The command itself.
    command: AtomicBool,
    /// The command or anything it left.
    anything: AtomicBool,
}

impl Below {
    // Returns when `wait` has said that there is no child: the only proof.
    fn kill(&self) {
        let mut pause = Duration::from_micros(200);
        while self.anything.load(Ordering::Acquire) {
            descendants::kill_below(rustix::process::getpid(), &|_| false);
            thread::park_timeout(pause);
            // 20 ms: a process in a long system call dies late; do not spin for it.
            pause = (pause * 2).min(Duration::from_millis(20));
        }
    }
}

fn run(
    order: &Order,
    descriptors: Vec<OwnedFd>,
    control: &Arc<UnixStream>,
    below: &Arc<Below>,
) -> io::Result<()> {
    report(control, &FromLauncher::Taken)?;
    let pid = match start(order, descriptors) {
        Ok(pid) => pid,
        Err(error) => {
            // An error without a number is std's own: a zero byte in an argument, say.
            let errno = error.raw_os_error().unwrap_or(Errno::INVAL.raw_os_error());
            return report(control, &FromLauncher::Failed { errno, message: error.to_string() });
        }
    };
    below.command.store(true, Ordering::Release);
    below.anything.store(true, Ordering::Release);
    report(control, &FromLauncher::Started { pid: pid.as_raw_nonzero().get().unsigned_abs() })?;
    let (reports, state, parent) = (Arc::clone(control), Arc::clone(below), thread::current());
    thread::Builder::new().stack_size(REAPER_STACK_BYTES).spawn(move || {
        reap(pid, &reports, &state);
        parent.unpark();
    })?;
    Ok(())
}

fn start(order: &Order, descriptors: Vec<OwnedFd>) -> io::Result<Pid> {
    let mut descriptors = descriptors.into_iter();
    let mut next =
        || descriptors.next().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput));
    let (stdin, stdout, stderr) = (next()?, next()?, next()?);
    super::join(descriptors)?;
    super::limit_file_size(order.file_bytes)?;
    if order.terminal {
        return controlled::start(order, &stdin);
    }
    let mut command = command(order, [stdin, stdout, stderr])?;
    let spawned = command.process_group(0).spawn();
    Ok(Pid::from_child(&spawned?))
}

/// The order as the standard library puts it.
pub(super) fn command(
    order: &Order,
    [stdin, stdout, stderr]: super::Triple,
) -> io::Result<Command> {
    let (program, arguments) = order.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // Said here because a failing chdir inside spawn looks like a missing program.
    if !std::fs::metadata(&order.cwd)?.is_dir() {
        return Err(io::ErrorKind::NotADirectory.into());
    }
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(&order.env)
        .current_dir(&order.cwd)
        .stdin(Stdio::from(stdin))
        .stdout(Stdio::from(stdout))
        .stderr(Stdio::from(stderr));
    // Staying root keeps the capabilities; any other user loses them all at exec. Setting the user
    // clears the supplementary groups.
    if order.uid != 0 || order.gid != 0 {
        command.uid(order.uid).gid(order.gid);
    }
    Ok(command)
}

fn reap(command: Pid, control: &UnixStream, below: &Below) {
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == command => {
                below.command.store(false, Ordering::Release);
                let signal = status.terminating_signal().map(End::Signal);
                let end = signal.unwrap_or(End::Code(status.exit_status().unwrap_or(0)));
                let _pid_1_is_gone = report(control, &FromLauncher::Exited(end));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_no_child) => break,
        }
    }
    // Before the report: the next order may come right after it.
    below.anything.store(false, Ordering::Release);
    let _pid_1_is_gone = report(control, &FromLauncher::Gone);
}

fn report(mut control: &UnixStream, message: &FromLauncher) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    control.write_all(&line)
}
