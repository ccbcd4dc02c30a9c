//! Starts a command that needs calls between fork and exec which the standard library does not
//! make: one with a controlling terminal, an agent or a check. The child first runs this program in
//! the role `exec`, which makes the calls and then executes the command under the same pid.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Command, ExitCode, Stdio},
};

use nix::unistd::setfsgid;
use rustix::process::{Gid, Pid, Uid};
use serde::{Deserialize, Serialize};

use super::{StdioFds, launcher, launcher_protocol::ProcessSpec};
use crate::fd_passing;

/// The role's name on the command line.
pub(crate) const ROLE: &str = "exec";

/// Why the child could not execute the command.
#[derive(Debug, Serialize, Deserialize)]
struct ExecFailure {
    errno: Option<i32>,
    message: String,
}

/// The launcher's side: returns when the command runs.
pub(super) fn start(spec: &ProcessSpec, stdio: &StdioFds) -> io::Result<Pid> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new("/proc/self/exe")
        .arg(ROLE)
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let sent = send(&mut ours, spec, stdio);
    // The socket is close-on-exec: a successful exec closes it without a message.
    let mut report = Vec::new();
    if let Err(error) = sent.and_then(|()| ours.read_to_end(&mut report)) {
        let _already_gone = child.kill();
        let _reaped = child.wait();
        return Err(error);
    }
    if report.is_empty() {
        return Ok(Pid::from_child(&child));
    }
    let _reaped = child.wait();
    let failure: ExecFailure = serde_json::from_slice(&report)?;
    Err(failure
        .errno
        .map_or_else(|| io::Error::other(failure.message), io::Error::from_raw_os_error))
}

fn send(socket: &mut UnixStream, spec: &ProcessSpec, stdio: &StdioFds) -> io::Result<()> {
    let message = fd_passing::frame(&serde_json::to_vec(spec)?);
    let stdio: Vec<BorrowedFd<'_>> = stdio.iter().map(AsFd::as_fd).collect();
    let sent = fd_passing::send_some(&*socket, &message, &stdio)?;
    socket.write_all(&message[sent..])
}

/// The role's entry point. Returns only when it could not execute the command.
pub(crate) fn main() -> ExitCode {
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else { return ExitCode::FAILURE };
    let mut socket = UnixStream::from(socket);
    let error = match exec_command(&socket) {
        Err(error) => error,
        Ok(never) => match never {},
    };
    let failure = ExecFailure { errno: error.raw_os_error(), message: error.to_string() };
    let _launcher_is_gone = socket.write_all(&serde_json::to_vec(&failure).unwrap_or_default());
    ExitCode::FAILURE
}

fn exec_command(socket: &UnixStream) -> io::Result<std::convert::Infallible> {
    let missing = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let (message, descriptors) = fd_passing::receive(socket)?.ok_or_else(missing)?;
    let spec: ProcessSpec = serde_json::from_slice(&message)?;
    let stdio: StdioFds = descriptors.try_into().map_err(|_| missing())?;
    if spec.terminal {
        rustix::process::setsid()?;
        rustix::process::ioctl_tiocsctty(&stdio[0])?;
    }
    let mut command = launcher::command(&spec, stdio)?;
    if !spec.terminal {
        command.process_group(0);
    }
    if spec.undumpable {
        become_undumpable_user(&spec)?;
    } else {
        launcher::set_user(&mut command, &spec);
    }
    Err(command.exec())
}

/// Becomes the user in a way that makes the program executed next not dumpable: no other process of
/// the user, and not root inside, can then trace it, read its memory or open its descriptors.
///
/// The flag itself does not survive an exec. But the kernel sets it again when an exec changes the
/// file system ids, and an exec resets them to the effective ids. The program's own children are
/// not affected, because their ids are equal.
fn become_undumpable_user(spec: &ProcessSpec) -> io::Result<()> {
    let (uid, gid) = (Uid::from_raw(spec.uid), Gid::from_raw(spec.gid));
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_res_gid(Some(gid), Some(gid), Some(gid))?;
    let other = nix::unistd::Gid::from_raw(u32::from(spec.gid == 0));
    setfsgid(other);
    // The call reports no error; it returns the id before it.
    if setfsgid(other) != other {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(rustix::thread::set_thread_res_uid(Some(uid), Some(uid), Some(uid))?)
}
