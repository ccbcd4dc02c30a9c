//! A preforked pid 1 that has no sandbox yet: in its namespaces and cgroups, with a supervisor that
//! waits for its launch and a second process that waits for an [`isolate::Assignment`] to assemble
//! the sandbox around it. Forked for one sandbox on demand, or in advance as a standby. It dies
//! with the zygote: the second process sees the zygote's socket close, and the supervisor sees that
//! process exit.

use std::{
    fs,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    time::Duration,
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    process::Signal,
};

use super::freezer::HomeCgroups;
use crate::{
    cgroup::Group,
    error::{Doing, StepError},
    isolate::{self, SpawnContext, ids::Claim, out_of_order},
    plan::{Plan, PlanParts, Step},
    process::start_ticks,
    syscall::{self, Side},
};

pub(super) struct Standby {
    /// Name of the cgroups; the sandbox that it becomes keeps them.
    pub(super) cgroup: String,
    pub(super) pid: u32,
    /// Start time of pid 1, in clock ticks since boot.
    pub(super) started: u64,
    pub(super) pidfd: OwnedFd,
    pub(super) claim: Claim,
    /// Receives the assignment.
    pub(super) assignment_socket: OwnedFd,
    /// Carries [`LAUNCHED`] or an error; closed when pid 1 is the supervisor and alone.
    pub(super) report: OwnedFd,
    /// Keeps the mounts when all processes are dead, so that no dying process has to unmount them.
    pub(super) mounts: Option<OwnedFd>,
    /// The cgroups with their settings, in the order of the plan.
    groups: Vec<Group>,
}

/// The line on the report pipe when all steps succeeded.
pub(super) const LAUNCHED: &str = "launched";

/// What the zygote creates before it forks.
#[derive(Default)]
struct Prepared {
    claim: Option<Claim>,
    users: Option<OwnedFd>,
}

impl Standby {
    /// Runs a plan's steps up to [`Step::AwaitAssignment`].
    pub(super) fn prefork(
        plan: &Plan,
        cgroups: &HomeCgroups,
        claims: &Path,
        id_hint: u32,
        supervisor: &OwnedFd,
    ) -> Result<Self, StepError> {
        let mut prepared = Prepared::default();
        let cgroup = plan.sandbox.part();
        let result = Self::prefork_with(&mut prepared, plan, claims, id_hint, supervisor);
        match (result, prepared.claim) {
            (Ok((pid, pidfd, assignment_socket, report)), Some(claim)) => {
                let started = start_ticks(pid).unwrap_or(0);
                let standby = Self {
                    cgroup: cgroup.to_owned(),
                    pid,
                    started,
                    pidfd,
                    claim,
                    assignment_socket,
                    report,
                    mounts: mounts_of(pid),
                    groups: groups(plan).cloned().collect(),
                };
                // The claim lasts as long as pid 1 lives, even if the zygote dies.
                match standby.claim.hand_to(pid) {
                    Ok(()) => Ok(standby),
                    Err(error) => {
                        standby.discard(cgroups);
                        Err(error)
                    }
                }
            }
            (result, claim) => {
                cgroups.clear(cgroup);
                if let Some(claim) = claim {
                    claim.release();
                }
                Err(result.err().unwrap_or_else(out_of_order))
            }
        }
    }

    fn prefork_with(
        prepared: &mut Prepared,
        plan: &Plan,
        claims: &Path,
        id_hint: u32,
        supervisor: &OwnedFd,
    ) -> Result<(u32, OwnedFd, OwnedFd, OwnedFd), StepError> {
        let parts = plan.parts();
        for step in parts.zygote {
            match step {
                Step::MakeGroup(group) => group.make()?,
                Step::ClaimIds { .. } => prepared.claim = Some(Claim::take(claims, id_hint)?),
                Step::ShareIds { processes, .. } => {
                    prepared.claim = Some(Claim::share(id_hint, *processes))
                }
                Step::MakeUserNamespace => {
                    let claim = prepared.claim.as_ref().ok_or_else(out_of_order)?;
                    // SAFETY: the zygote has one thread.
                    prepared.users = Some(unsafe { isolate::make_user_namespace(claim) }?);
                }
                Step::Clone { namespaces, into } => {
                    let into = into.as_ref().map(fs::File::open).transpose();
                    let into = into.doing(|| "open the supervisor's cgroup")?;
                    let flags = isolate::clone_flags(namespaces);
                    return fork_pid1(prepared, &parts, supervisor, flags, into);
                }
                _ => break,
            }
        }
        Err(out_of_order())
    }

    pub(super) fn lives(&self) -> bool {
        syscall::is_readable(&self.pidfd, Duration::ZERO).is_ok_and(|dead| !dead)
    }

    /// Whether it waits for its assignment, or died before.
    pub(super) fn is_ready(&self) -> bool {
        syscall::is_readable(&self.assignment_socket, Duration::ZERO).unwrap_or(false)
    }

    /// Gives its cgroups the limits of the sandbox with this plan.
    pub(super) fn set_limits(&self, plan: &Plan) -> Result<(), StepError> {
        // The same host has the same cgroups in the same order; most limits are equal.
        for (before, group) in self.groups.iter().zip(groups(plan)) {
            let changed =
                group.settings.iter().filter(|setting| !before.settings.contains(setting));
            Group { settings: changed.cloned().collect(), path: before.path.clone() }.set()?;
        }
        Ok(())
    }

    /// Kills it and releases its cgroups and ids.
    pub(super) fn discard(self, cgroups: &HomeCgroups) {
        syscall::kill_child(&self.pidfd);
        // All processes died with pid 1 but may take a moment to leave their cgroups.
        cgroups.clear_with_timeout(&self.cgroup);
        self.claim.release();
    }
}

fn fork_pid1(
    prepared: &Prepared,
    parts: &PlanParts<'_>,
    supervisor: &OwnedFd,
    flags: u64,
    into: Option<fs::File>,
) -> Result<(u32, OwnedFd, OwnedFd, OwnedFd), StepError> {
    let (Some(claim), Some(users)) = (&prepared.claim, &prepared.users) else {
        return Err(out_of_order());
    };
    let (inside, assignment_socket) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .doing(|| "make a socket pair")?;
    let (report, say) = pipe_with(PipeFlags::CLOEXEC).doing(|| "make a pipe")?;
    // SAFETY: the zygote has one thread.
    let side = unsafe { syscall::clone_process(flags, into.as_ref().map(AsFd::as_fd)) };
    match side.doing(|| "start pid 1")? {
        Side::Child => {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            // A client waiting for the zygote to close a descriptor must not have to wait for this
            // process.
            // SAFETY: the child never returns to the code that owns the other descriptors.
            unsafe { syscall::close_all_but(&[&inside, &say, users, supervisor].map(AsFd::as_fd)) };
            let (before_fork, pid1) = (parts.before_fork, parts.pid1);
            let (first_id, processes) = (claim.first(), claim.processes());
            let context = SpawnContext {
                before_fork,
                pid1,
                supervisor,
                users,
                first_id,
                processes,
                assignment_socket: &inside,
            };
            // SAFETY: a new process has one thread.
            let result = unsafe { isolate::run_steps(&context) };
            let (line, code) =
                result.map_or_else(|error| (error.line(), 1), |()| (LAUNCHED.to_owned(), 0));
            let _ = rustix::io::write(&say, format!("{line}\n").as_bytes());
            syscall::exit_now(code)
        }
        Side::Parent { pid, pidfd } => Ok((pid, pidfd, assignment_socket, report)),
    }
}

/// The mount namespace of a process.
pub(super) fn mounts_of(pid: u32) -> Option<OwnedFd> {
    fs::File::open(format!("/proc/{pid}/ns/mnt")).ok().map(OwnedFd::from)
}

fn groups(plan: &Plan) -> impl Iterator<Item = &Group> {
    plan.parts().zygote.iter().filter_map(|step| match step {
        Step::MakeGroup(group) => Some(group),
        _ => None,
    })
}
