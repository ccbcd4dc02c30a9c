//! Mounts that outlive their last user. Recently used volumes stay mounted, because unmounting and
//! mounting a file system again costs more than starting a sandbox. Mounts of ended sandboxes are
//! closed in a child process, because unmounting an overlay syncs the file system below it. Nothing
//! here is persistent: when the zygote dies, the kernel releases all of it.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    time::{Duration, Instant},
};

use rustix::{
    fs::Stat,
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, waitid},
};

use crate::{
    spec::VolumeName,
    syscall::{self, Side},
};

// Longer than the usual gap between two commands of a person or an agent.
const CACHE_TIME: Duration = Duration::from_secs(30);

// Pending unmounts may delay the removal of the zygote's cgroup, but not forever.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Default)]
pub(super) struct MountCache {
    cached: BTreeMap<VolumeName, (OwnedFd, Instant)>,
    /// Mount namespaces of ended sandboxes, closed with the next tick.
    dead_mounts: Vec<DeadMount>,
    /// Child processes that close mounts, with the folders in use until then; to be reaped.
    children: Vec<(OwnedFd, Vec<FolderId>)>,
}

/// Device and inode of a folder; a rename changes neither.
type FolderId = (u64, u64);

struct DeadMount {
    mounts: OwnedFd,
    /// The writable layer of its overlay.
    upper: Option<FolderId>,
}

fn folder_id(stat: rustix::io::Result<Stat>) -> Option<FolderId> {
    stat.ok().map(|stat| (stat.st_dev, stat.st_ino))
}

impl MountCache {
    /// Keeps a volume mounted until it has been unused for [`CACHE_TIME`].
    pub(super) fn insert(&mut self, name: VolumeName, mount: OwnedFd, now: Instant) {
        // A replaced entry refers to the same file system, so dropping it unmounts nothing.
        self.cached.insert(name, (mount, now + CACHE_TIME));
    }

    /// Unmounts this volume.
    pub(super) fn release(&mut self, name: &VolumeName) {
        let cached = self.cached.remove(name);
        self.close_in_child(cached.into_iter().map(|(mount, _)| mount).collect(), Vec::new());
    }

    /// Unmounts a dead sandbox's file systems at the next tick, after clients were told of its end.
    /// `upper` is its writable layer.
    pub(super) fn unmount_async(&mut self, mounts: OwnedFd, upper: &Path) {
        let upper = folder_id(rustix::fs::stat(upper));
        self.dead_mounts.push(DeadMount { mounts, upper });
    }

    /// The process that still unmounts an overlay whose writable layer is now one of these layers.
    /// Such a layer must not be mounted before that process has exited.
    pub(super) fn pending_unmount(&mut self, layers: &[OwnedFd]) -> Option<OwnedFd> {
        let layers: Vec<FolderId> =
            layers.iter().filter_map(|layer| folder_id(rustix::fs::fstat(layer))).collect();
        let is_layer = |upper: &FolderId| layers.contains(upper);
        if self.dead_mounts.iter().any(|dead| dead.upper.as_ref().is_some_and(is_layer)) {
            self.unmount_dead(Vec::new());
        }
        let (pidfd, _) = self.children.iter().find(|(_, uppers)| uppers.iter().any(is_layer))?;
        pidfd.try_clone().ok()
    }

    /// Unmounts everything and waits up to [`SHUTDOWN_TIMEOUT`] for each child.
    pub(super) fn release_all(&mut self) {
        let cached = std::mem::take(&mut self.cached).into_values().map(|(mount, _)| mount);
        self.unmount_dead(cached.collect());
        for (pidfd, _) in self.children.drain(..) {
            let _ = syscall::is_readable(&pidfd, SHUTDOWN_TIMEOUT);
        }
    }

    /// Unmounts expired volumes and dead sandboxes' mounts; returns when the next volume expires.
    pub(super) fn tick(&mut self, now: Instant) -> Option<Instant> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG;
        self.children
            .retain(|(pidfd, _)| matches!(waitid(WaitId::PidFd(pidfd.as_fd()), options), Ok(None)));
        let expired = self.cached.extract_if(.., |_, (_, until)| *until <= now);
        let expired = expired.map(|(_, (mount, _))| mount).collect();
        self.unmount_dead(expired);
        self.cached.values().map(|(_, until)| *until).min()
    }

    /// Unmounts dead sandboxes' file systems and these mounts.
    fn unmount_dead(&mut self, mut mounts: Vec<OwnedFd>) {
        let mut uppers = Vec::new();
        for dead in self.dead_mounts.drain(..) {
            mounts.push(dead.mounts);
            uppers.extend(dead.upper);
        }
        self.close_in_child(mounts, uppers);
    }

    /// The process that closes a mount last blocks until its data is on disk. The zygote must not
    /// block, so a child process is made the last holder.
    fn close_in_child(&mut self, mounts: Vec<OwnedFd>, uppers: Vec<FolderId>) {
        if mounts.is_empty() {
            return;
        }
        match fork_last_holder(&mounts) {
            Ok((pidfd, closed)) => {
                drop(mounts);
                drop(closed);
                self.children.push((pidfd, uppers));
            }
            Err(error) => eprintln!("cannot fork to unmount: {error}"),
        }
    }
}

/// Forks a process that shares these mounts and exits when the returned pipe end is closed.
fn fork_last_holder(mounts: &[OwnedFd]) -> io::Result<(OwnedFd, OwnedFd)> {
    let (wait, closed) = pipe_with(PipeFlags::CLOEXEC)?;
    let flags = libc::CLONE_NEWPID.cast_unsigned().into();
    // SAFETY: the zygote has one thread.
    match unsafe { syscall::clone_process(flags, None) }? {
        Side::Child => {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            let kept: Vec<BorrowedFd<'_>> = mounts.iter().chain([&wait]).map(AsFd::as_fd).collect();
            // SAFETY: the child never returns to the code that owns the other descriptors.
            unsafe { syscall::close_all_but(&kept) };
            let _ = rustix::io::retry_on_intr(|| rustix::io::read(&wait, &mut [0; 1]));
            syscall::exit_now(0)
        }
        Side::Parent { pidfd, .. } => Ok((pidfd, closed)),
    }
}
