//! Starts launchers from inside the commands' cgroup, so that they and their commands start in it:
//! moving each command there would take 7 to 15 ms on cgroup v1.

use std::{
    collections::HashSet,
    io,
    os::{fd::AsFd, unix::net::UnixStream},
    process::{Command, ExitCode, Stdio},
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use rustix::process::{Pid, WaitOptions};

use super::{REAPER_STACK_BYTES, descendants};
use crate::{fd_passing, log};

type Launchers = Arc<Mutex<HashSet<i32>>>;

/// The role's entry point; `files` is the limit of open files for commands.
pub(crate) fn main(files: Option<&str>) -> ExitCode {
    super::set_file_limit(files);
    log::exit_code("spawner: ", serve(files.unwrap_or_default()))
}

// The first message carries the cgroups to join; each later one the socket of a launcher to start.
fn serve(files: &str) -> io::Result<()> {
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let Some((_, joins)) = fd_passing::receive(&control)? else { return Ok(()) };
    super::join(joins.into_iter())?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let launchers = Launchers::default();
    let reaped = Arc::clone(&launchers);
    let reaper = thread::Builder::new().stack_size(REAPER_STACK_BYTES).spawn(move || {
        loop {
            reap(&reaped);
        }
    })?;
    while let Ok(Some((_, sockets))) = fd_passing::receive(&control) {
        for socket in sockets {
            // Locked until the pid is listed: otherwise the reaper could see an unknown launcher.
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
                // Pid 1 sees the socket close and reports the failure.
                Err(error) => log::line(format_args!("spawner: cannot start a launcher: {error}")),
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
        // No child: wait for the next launcher.
        Err(_) => return thread::park(),
    };
    let mut listed = launchers.lock().unwrap_or_else(PoisonError::into_inner);
    let was_launcher = listed.remove(&pid.as_raw_nonzero().get());
    // The command of a killed launcher becomes a child of this process, which must kill it.
    if !was_launcher || status.exit_status() != Some(0) {
        descendants::kill_below(rustix::process::getpid(), &|pid| listed.contains(&pid));
    }
}
