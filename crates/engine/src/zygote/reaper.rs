//! Takes apart what dead sandboxes leave in the kernel, in a process of its own: unmounting an overlay
//! syncs the whole file system below it, which takes milliseconds on an idle host and seconds on a busy
//! one, and nobody should wait for it. Knows nothing of sandboxes.

use std::{
    io,
    mem::MaybeUninit,
    os::fd::{AsFd, OwnedFd},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::OFlags,
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType,
        recvmsg, socketpair,
    },
};

use crate::{
    isolate::send_with,
    syscall::{self, Side},
};

/// The way to the process that takes things apart.
pub(super) struct Reaper {
    /// A socket and the process; `None` when there is none: then we do it ourselves.
    process: Option<(OwnedFd, OwnedFd)>,
}

// What is left to take apart when the zygote goes may hold the home's cgroup up, but not for ever.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

impl Reaper {
    /// Starts it; it ends when we do and everything is taken apart.
    ///
    /// # Safety
    /// The caller must have one thread only.
    pub(super) unsafe fn start() -> Self {
        // SAFETY: as the caller says.
        let process = unsafe { split() };
        Self { process: process.inspect_err(|error| eprintln!("cannot start a reaper: {error}")).ok() }
    }

    /// Lets go of the last descriptor that keeps a namespace, without waiting for what that brings about.
    pub(super) fn let_go(&self, namespace: OwnedFd) {
        let Some((socket, _)) = &self.process else { return };
        // Held there before it is closed here, and closed there after that: whoever is last has the work.
        if send_with(socket, b"hold", &[namespace.as_fd()]).is_ok() {
            drop(namespace);
            let _ = send_with(socket, b"drop", &[]);
        }
    }

    /// Waits until everything is taken apart.
    pub(super) fn end(&mut self) {
        let Some((socket, pidfd)) = self.process.take() else { return };
        drop(socket);
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&PATIENCE));
    }
}

unsafe fn split() -> io::Result<(OwnedFd, OwnedFd)> {
    let (inside, outside) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    // The zygote never waits: what does not fit it takes apart itself.
    rustix::fs::fcntl_setfl(&outside, OFlags::NONBLOCK)?;
    // SAFETY: the caller vouches for one thread.
    match unsafe { syscall::clone_process(0, None) }? {
        Side::Parent { pidfd, .. } => Ok((outside, pidfd)),
        Side::Child => {
            // SAFETY: this process never goes back to what owns the other descriptors.
            unsafe { syscall::close_all_but(&[inside.as_fd()]) };
            // Who started the zygote waits for the end of its standard output.
            let _ = syscall::standard_stream(io::stderr().as_fd(), 1);
            serve(&inside);
            syscall::exit_now(0)
        }
    }
}

fn serve(socket: &OwnedFd) {
    let mut held: Vec<OwnedFd> = Vec::new();
    loop {
        let mut word = [0u8; 8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [io::IoSliceMut::new(&mut word)];
        match recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => continue,
            Ok(received) if received.bytes > 0 => {}
            _ => return,
        }
        let before = held.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                held.extend(rights);
            }
        }
        if held.len() == before {
            held.clear();
        }
    }
}
