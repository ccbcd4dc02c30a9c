//! The user namespace of a sandbox: created before everything else, entered when the host's
//! privileges are to be dropped.

use std::{
    fs, io,
    os::fd::{BorrowedFd, OwnedFd},
};

use rustix::{
    process::{DumpableBehavior, Resource, Rlimit, Signal, getrlimit, setrlimit},
    thread::{CapabilitiesSecureBits, LinkNameSpaceType},
};

use super::ids::Claim;
use crate::{
    error::{Doing, StepError},
    rootless,
    spec::IDS_PER_SANDBOX,
    syscall::{self, Side},
};

// Processes of pid 1 itself, besides those of its commands.
const SUPERVISOR_PROCESSES: u64 = 64;

/// Creates a user namespace that maps 0 and up to the claimed range.
///
/// # Safety
/// The caller must have one thread only.
pub(crate) unsafe fn make_user_namespace(claim: &Claim) -> Result<OwnedFd, StepError> {
    let doing = || "create a user namespace";
    // The kernel charges inotify watches, pending signals and other limits to the namespace's
    // creator: a distinct id, because all sandboxes would share root's limits.
    let owner = |uid: u32| {
        let id = rustix::process::Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(None, Some(id), None)?;
        // Without this, only the host's root could read `/proc` of this process and the child.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
    };
    let before = lower_limits(claim).doing(doing)?;
    owner(claim.owner()).doing(doing)?;
    let zygote = rustix::process::getpid();
    // SAFETY: the caller vouches for one thread; the child below only waits to be killed.
    let side = unsafe { syscall::clone_process(libc::CLONE_NEWUSER.cast_unsigned().into(), None) };
    if let Ok(Side::Child) = side {
        wait_to_be_killed(zygote);
    }
    owner(0).doing(doing)?;
    for (resource, limit) in before {
        setrlimit(resource, limit).doing(doing)?;
    }
    let Side::Parent { pid, pidfd } = side.doing(doing)? else { wait_to_be_killed(zygote) };
    let prepare = || -> io::Result<OwnedFd> {
        for file in ["uid_map", "gid_map"] {
            let map = match claim {
                Claim::Exclusive { first, .. } => format!("0 {first} {IDS_PER_SANDBOX}\n"),
                Claim::Shared { .. } => {
                    rootless::identity_map(&fs::read_to_string(format!("/proc/self/{file}"))?)
                }
            };
            fs::write(format!("/proc/{pid}/{file}"), map)?;
        }
        Ok(fs::File::open(format!("/proc/{pid}/ns/user"))?.into())
    };
    let namespace = prepare();
    syscall::kill_child(&pidfd);
    namespace.doing(doing)
}

/// Lowers the limits of the namespace's creator where ids are shared: the namespace inherits them,
/// and all processes inside count together. Returns the limits to restore.
fn lower_limits(claim: &Claim) -> io::Result<Vec<(Resource, Rlimit)>> {
    let Some(processes) = claim.processes() else { return Ok(Vec::new()) };
    let mut before = Vec::new();
    for resource in [Resource::Nproc, Resource::Sigpending] {
        let limit = getrlimit(resource);
        let most = match resource {
            Resource::Nproc => u64::from(processes) + SUPERVISOR_PROCESSES,
            _ => limit.current.unwrap_or(u64::MAX) / rootless::SANDBOXES_PER_USER,
        };
        let most = limit.maximum.map_or(most, |maximum| maximum.min(most));
        setrlimit(resource, Rlimit { current: Some(most), ..limit })?;
        before.push((resource, limit));
    }
    Ok(before)
}

fn wait_to_be_killed(zygote: rustix::process::Pid) -> ! {
    // The process must not outlive the zygote.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if rustix::process::getppid() != Some(zygote) {
        syscall::exit_now(1);
    }
    loop {
        let _ = rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 60, tv_nsec: 0 });
    }
}

/// Creates files and checks permissions as this id from now on; capabilities stay.
pub(crate) fn use_file_ids(id: u32) -> Result<(), StepError> {
    rustix::thread::set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP)
        .doing(|| "keep capabilities across a change of ids")?;
    syscall::set_file_ids(id, id);
    Ok(())
}

/// Becomes root inside and drops the host's privileges.
pub(super) fn enter(users: BorrowedFd<'_>) -> Result<(), StepError> {
    let enter = || -> io::Result<()> {
        rustix::thread::move_into_link_name_space(users, Some(LinkNameSpaceType::User))?;
        let (uid, gid) = (rustix::process::Uid::ROOT, rustix::process::Gid::ROOT);
        rustix::thread::set_thread_res_gid(Some(gid), Some(gid), Some(gid))?;
        rustix::thread::set_thread_groups(&[])?;
        Ok(rustix::thread::set_thread_res_uid(Some(uid), Some(uid), Some(uid))?)
    };
    enter().doing(|| "enter the user namespace")
}
