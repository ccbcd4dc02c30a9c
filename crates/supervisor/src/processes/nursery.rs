//! The process that is inside the commands' cgroup, so that whatever it starts is born there: to
//! attach each command would cost 7 to 15 ms on cgroup v1. It starts launchers and nothing else.

use std::{
    collections::HashSet,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    process::{Command, ExitCode, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use rustix::process::{Pid, WaitOptions, WaitStatus};

use super::descendants;
use crate::{log, passing};

const REAPER_STACK_BYTES: usize = 64 * 1024;

type Launchers = Arc<Mutex<HashSet<i32>>>;

/// The role's entry point; `files` is the limit of open files that commands get.
pub(crate) fn main(files: Option<&str>) -> ExitCode {
    super::limit_files(files);
    match serve(files.unwrap_or_default()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(format_args!("nursery: {error}"));
            ExitCode::FAILURE
        }
    }
}

// The first message brings the cgroups to join; every other one the socket of a launcher to start.
fn serve(files: &str) -> io::Result<()> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let Some((_, joins)) = passing::receive(&control)? else { return Ok(()) };
    super::join(joins.into_iter())?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let launchers = Launchers::default();
    let known = Arc::clone(&launchers);
    let reaper = thread::Builder::new().stack_size(REAPER_STACK_BYTES).spawn(move || {
        loop {
            reap(&known);
        }
    })?;
    while let Ok(Some((_, sockets))) = passing::receive(&control) {
        for socket in sockets {
            // Held until the pid is listed, else the reaper could meet a launcher it does not know.
            let mut listed = launchers.lock().unwrap_or_else(PoisonError::into_inner);
            let started = Command::new("/proc/self/exe")
                .args(["launcher", files])
                .env_clear()
                .stdin(Stdio::from(socket))
                .spawn();
            match started {
                Ok(child) => {
                    listed.insert(Pid::from_child(&child).as_raw_nonzero().get());
                }
                // Pid 1 sees the socket close and says so to whoever asked.
                Err(error) => log::line(format_args!("nursery: cannot start a launcher: {error}")),
            }
        }
        reaper.thread().unpark();
    }
    Ok(())
}

fn reap(launchers: &Launchers) {
    let (pid, status) = match rustix::process::wait(WaitOptions::empty()) {
        Ok(Some(reaped)) => reaped,
        Ok(None) | Err(rustix::io::Errno::INTR) => return,
        // No child: the next launcher wakes us.
        Err(_) => return thread::park(),
    };
    let mut listed = launchers.lock().unwrap_or_else(PoisonError::into_inner);
    let was_launcher = listed.remove(&pid.as_raw_nonzero().get());
    // A launcher that was killed leaves its command to us: nobody else can prove it dead.
    if !was_launcher || ended_badly(status) {
        descendants::kill_below(rustix::process::getpid(), &|pid| listed.contains(&pid));
    }
}

fn ended_badly(status: WaitStatus) -> bool {
    status.exit_status() != Some(0)
}
