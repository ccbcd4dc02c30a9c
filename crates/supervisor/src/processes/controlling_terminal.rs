//! Starts a command with a controlling terminal. The child must call `setsid` and `TIOCSCTTY`
//! before it executes the command, which the standard library cannot do: so the child first runs
//! this program in the role `terminal`, which does both and then execs the command under the same
//! pid.

use std::{
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::CommandExt},
    },
    process::{Command, ExitCode, Stdio},
};

use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::{launcher, launcher_protocol::ProcessSpec};
use crate::fd_passing;

/// Why the child could not execute the command.
#[derive(Debug, Serialize, Deserialize)]
struct ExecFailure {
    errno: Option<i32>,
    message: String,
}

/// The launcher's side: returns when the command runs.
pub(super) fn start(spec: &ProcessSpec, terminal: &OwnedFd) -> io::Result<Pid> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new("/proc/self/exe")
        .arg("terminal")
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let sent = send(&mut ours, spec, terminal);
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

fn send(socket: &mut UnixStream, spec: &ProcessSpec, terminal: &OwnedFd) -> io::Result<()> {
    let message = fd_passing::frame(&serde_json::to_vec(spec)?);
    let sent = fd_passing::send_some(&*socket, &message, &[terminal.as_fd()])?;
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
    let terminal = descriptors.into_iter().next().ok_or_else(missing)?;
    rustix::process::setsid()?;
    rustix::process::ioctl_tiocsctty(&terminal)?;
    let stdio = [terminal.try_clone()?, terminal.try_clone()?, terminal];
    Err(launcher::command(&spec, stdio)?.exec())
}
