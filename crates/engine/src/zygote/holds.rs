//! Volumes used a moment ago, kept mounted for the next one who wants them: taking a file system down
//! and up again costs more than starting a sandbox. Nothing here is written down, so that a zygote that
//! dies lets go of all of them.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, waitid},
};

use crate::{
    syscall::{self, Side},
    volume::VolumeName,
};

// Between one command of a person or an agent and the next.
const HELD: Duration = Duration::from_secs(30);

#[derive(Default)]
pub(super) struct Holds {
    held: BTreeMap<VolumeName, (OwnedFd, Instant)>,
    /// Processes that let go of something and are to be reaped.
    leaving: Vec<OwnedFd>,
}

impl Holds {
    /// Holds on to a volume's mount until nobody has used it for a while.
    pub(super) fn take(&mut self, name: VolumeName, mount: OwnedFd, now: Instant) {
        // The one held before is of the same file system: dropping it takes nothing down.
        self.held.insert(name, (mount, now + HELD));
    }

    /// Lets go of this volume.
    pub(super) fn release(&mut self, name: &VolumeName) {
        let held = self.held.remove(name);
        self.let_go(held.into_iter().map(|(mount, _)| mount).collect());
    }

    /// Lets go of what nobody has used for a while; answers when there is more to let go of.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Instant> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        self.leaving.retain(|pidfd| matches!(waitid(WaitId::PidFd(pidfd.as_fd()), options), Ok(None)));
        let over = self.held.extract_if(.., |_, (_, until)| *until <= now);
        let over: Vec<OwnedFd> = over.map(|(_, (mount, _))| mount).collect();
        self.let_go(over);
        self.held.values().map(|(_, until)| *until).min()
    }

    /// Whoever closes a mount last waits until everything is on the disk. The zygote does not wait: a
    /// process of its own has it last.
    fn let_go(&mut self, mounts: Vec<OwnedFd>) {
        if mounts.is_empty() {
            return;
        }
        match last_holder(&mounts) {
            Ok((pidfd, closed)) => {
                drop(mounts);
                drop(closed);
                self.leaving.push(pidfd);
            }
            Err(error) => eprintln!("cannot start a process: {error}"),
        }
    }
}

/// A process with these mounts too, which ends when the pipe it comes with is closed.
fn last_holder(mounts: &[OwnedFd]) -> io::Result<(OwnedFd, OwnedFd)> {
    let (wait, closed) = pipe_with(PipeFlags::CLOEXEC)?;
    let flags = libc::CLONE_NEWPID.cast_unsigned().into();
    // SAFETY: the zygote has one thread.
    match unsafe { syscall::clone_process(flags, None) }? {
        Side::Child => {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            let kept: Vec<BorrowedFd<'_>> = mounts.iter().chain([&wait]).map(AsFd::as_fd).collect();
            // SAFETY: this process never goes back to what owns the other descriptors.
            unsafe { syscall::close_all_but(&kept) };
            let _ = rustix::io::retry_on_intr(|| rustix::io::read(&wait, &mut [0; 1]));
            syscall::exit_now(0)
        }
        Side::Parent { pidfd, .. } => Ok((pidfd, closed)),
    }
}
