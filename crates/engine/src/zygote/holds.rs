//! Volumes used a moment ago, kept mounted for the next one who wants them: taking a file system down
//! and up again costs more than starting a sandbox. And the mounts of sandboxes that have ended: taking
//! an overlay down syncs the whole file system below it, and nobody should wait for that. Nothing here
//! is written down, so that a zygote that dies lets go of all of them.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, waitid},
};

use crate::{
    syscall::{self, Side},
    volume::VolumeName,
};

// Between one command of a person or an agent and the next.
const HELD: Duration = Duration::from_secs(30);

// What is still to be taken down when the zygote goes may hold its cgroup up, but not for ever.
const PATIENCE: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

#[derive(Default)]
pub(super) struct Holds {
    held: BTreeMap<VolumeName, (OwnedFd, Instant)>,
    /// Mount namespaces without a process.
    buried: Vec<OwnedFd>,
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

    /// Lets go of the mounts of a dead sandbox, but not before whoever waits for its end is answered.
    pub(super) fn bury(&mut self, mounts: OwnedFd) {
        self.buried.push(mounts);
    }

    /// Lets go of everything, and waits for it as long as is reasonable.
    pub(super) fn leave(&mut self) {
        let held = std::mem::take(&mut self.held).into_values().map(|(mount, _)| mount);
        let all = held.chain(self.buried.drain(..)).collect();
        self.let_go(all);
        for pidfd in self.leaving.drain(..) {
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&PATIENCE));
        }
    }

    /// Lets go of what nobody has used for a while; answers when there is more to let go of.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Instant> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        self.leaving
            .retain(|pidfd| matches!(waitid(WaitId::PidFd(pidfd.as_fd()), options), Ok(None)));
        let over = self.held.extract_if(.., |_, (_, until)| *until <= now);
        let over: Vec<OwnedFd> =
            over.map(|(_, (mount, _))| mount).chain(self.buried.drain(..)).collect();
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
