//! Pseudo-terminals: opens and resizes them.

use std::{io, os::fd::OwnedFd};

use harvest_proto::bridge::Terminal;
use rustix::{
    fs::{Mode, OFlags},
    pty::{OpenptFlags, ioctl_tiocgptpeer, unlockpt},
    termios::{InputModes, OptionalActions, Winsize, tcgetattr, tcsetattr, tcsetwinsize},
};
use tokio::net::unix::pipe;

// The one in devpts, which processes inside cannot replace.
const PTMX: &str = "/dev/pts/ptmx";

/// The master side of a pseudo-terminal, which hangs up when the last clone is closed.
#[derive(Debug)]
pub(crate) struct PtyMaster(OwnedFd);

impl PtyMaster {
    /// Opens a new terminal: the master and the side of a command of this user.
    pub(crate) fn open(size: &Terminal, uid: u32) -> io::Result<(Self, OwnedFd)> {
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let ours = rustix::fs::open(PTMX, flags, Mode::empty())?;
        unlockpt(&ours)?;
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let theirs = ioctl_tiocgptpeer(&ours, flags)?;
        // Backspace erases whole UTF-8 characters.
        let mut modes = tcgetattr(&theirs)?;
        modes.input_modes |= InputModes::IUTF8;
        tcsetattr(&theirs, OptionalActions::Now, &modes)?;
        // Programs may open the terminal by path. The group stays `tty`.
        let _only_by_path = std::os::unix::fs::fchown(&theirs, Some(uid), None);
        let master = Self(ours);
        master.resize(size.rows, size.cols)?;
        Ok((master, theirs))
    }

    /// Resizes the terminal; the kernel sends SIGWINCH to the foreground job.
    pub(crate) fn resize(&self, rows: u16, cols: u16) -> io::Result<()> {
        let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.0, size)?)
    }

    // tokio has no terminal type, but its pipe types work for any descriptor.
    pub(crate) fn ends(&self) -> io::Result<(pipe::Sender, pipe::Receiver)> {
        let sender = pipe::Sender::from_owned_fd_unchecked(self.0.try_clone()?)?;
        Ok((sender, pipe::Receiver::from_owned_fd_unchecked(self.0.try_clone()?)?))
    }
}
