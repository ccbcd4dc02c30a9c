//! Starts a command that a terminal controls. The command has to lead a session of its own and take the
//! terminal before it runs, which the standard library cannot do for a child: so the child is this
//! program first, does both, and then becomes the command under the same pid.

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

use super::{launcher, order::Order};
use crate::passing;

/// Why the child could not become the command.
#[derive(Debug, Serialize, Deserialize)]
struct Refusal {
    errno: Option<i32>,
    message: String,
}

/// The launcher's side: answers when the command runs.
pub(super) fn start(order: &Order, terminal: &OwnedFd) -> io::Result<Pid> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut child = Command::new("/proc/self/exe")
        .arg("terminal")
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .spawn()?;
    let told = tell(&mut ours, order, terminal);
    // The other end closes when the child has become the command: nothing is said then.
    let mut said = Vec::new();
    if let Err(error) = told.and_then(|()| ours.read_to_end(&mut said)) {
        let _already_gone = child.kill();
        let _reaped = child.wait();
        return Err(error);
    }
    if said.is_empty() {
        return Ok(Pid::from_child(&child));
    }
    let _reaped = child.wait();
    let refusal: Refusal = serde_json::from_slice(&said)?;
    Err(refusal
        .errno
        .map_or_else(|| io::Error::other(refusal.message), io::Error::from_raw_os_error))
}

fn tell(socket: &mut UnixStream, order: &Order, terminal: &OwnedFd) -> io::Result<()> {
    let message = passing::framed(&serde_json::to_vec(order)?);
    let sent = passing::send_some(&*socket, &message, &[terminal.as_fd()])?;
    socket.write_all(&message[sent..])
}

/// The role's entry point. Comes back only when it could not become the command.
pub(crate) fn main() -> ExitCode {
    let Ok(socket) = io::stdin().as_fd().try_clone_to_owned() else { return ExitCode::FAILURE };
    let mut socket = UnixStream::from(socket);
    let error = match become_command(&socket) {
        Err(error) => error,
        Ok(never) => match never {},
    };
    let refusal = Refusal { errno: error.raw_os_error(), message: error.to_string() };
    let _launcher_is_gone = socket.write_all(&serde_json::to_vec(&refusal).unwrap_or_default());
    ExitCode::FAILURE
}

fn become_command(socket: &UnixStream) -> io::Result<std::convert::Infallible> {
    let nothing = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let (message, descriptors) = passing::receive(socket)?.ok_or_else(nothing)?;
    let order: Order = serde_json::from_slice(&message)?;
    let terminal = descriptors.into_iter().next().ok_or_else(nothing)?;
    rustix::process::setsid()?;
    rustix::process::ioctl_tiocsctty(&terminal)?;
    let triple = [terminal.try_clone()?, terminal.try_clone()?, terminal];
    Err(launcher::command(&order, triple)?.exec())
}
