//! Pid 1 of a sandbox before anybody knows of which: in its namespaces and cgroups, with a supervisor
//! that waits for its launch and a process at the gate that will furnish the sandbox around it. Grown
//! for one sandbox, or ahead of time for whichever comes next. It dies with the zygote: the process at
//! the gate sees its end, and the supervisor sees the end of that process.

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    pipe::{PipeFlags, pipe_with},
    process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid},
};

use crate::{
    cgroup::{Group, Hierarchy, Setting},
    error::{Doing, StepError},
    home::start_ticks,
    isolate::{self, Birth, ids::Claim},
    plan::{Parts, Plan, Step},
    syscall::{self, Side},
};

// A process may hang in the kernel; nobody waits for it for ever.
const PATIENCE: Duration = Duration::from_secs(1);

pub(super) struct Seed {
    /// The name of its cgroups.
    part: String,
    pub(super) pid: u32,
    /// When pid 1 was started.
    pub(super) started: u64,
    pub(super) pidfd: OwnedFd,
    pub(super) claim: Claim,
    /// Takes its calling.
    pub(super) gate: OwnedFd,
    /// Says [`LAUNCHED`] or why it failed; closed when pid 1 is the supervisor and alone.
    pub(super) report: OwnedFd,
    /// Keeps its mounts when all processes are dead, so that none of them has to take them apart.
    pub(super) mounts: Option<OwnedFd>,
    /// What its cgroups are set to.
    settings: Vec<Vec<Setting>>,
}

/// The one line that comes over the report when everything is done.
pub(super) const LAUNCHED: &str = "launched";

/// What the zygote makes before it splits.
#[derive(Default)]
struct Made {
    claim: Option<Claim>,
    users: Option<OwnedFd>,
}

impl Seed {
    /// Takes a plan's steps up to the gate.
    pub(super) fn grow(
        plan: &Plan,
        cgroups: &Hierarchy,
        group: &str,
        claims: &Path,
        wish: u32,
        supervisor: &OwnedFd,
    ) -> Result<Self, StepError> {
        let mut made = Made::default();
        let part = plan.sandbox.part();
        let result = Self::grow_with(&mut made, plan, claims, wish, supervisor);
        match (result, made.claim) {
            (Ok((pid, pidfd, gate, report)), Some(claim)) => {
                let started = start_ticks(pid).unwrap_or(0);
                let (mounts, settings, part) = (mounts_of(pid), settings(plan), part.to_owned());
                let seed =
                    Self { part, pid, started, pidfd, claim, gate, report, mounts, settings };
                // Its ids are taken for as long as it lives, whatever becomes of us.
                match seed.claim.hand_to(pid) {
                    Ok(()) => Ok(seed),
                    Err(error) => {
                        seed.discard(cgroups, group);
                        Err(error)
                    }
                }
            }
            (result, claim) => {
                cgroups.clear(group, part);
                if let Some(claim) = claim {
                    claim.release();
                }
                Err(result.err().unwrap_or_else(out_of_order))
            }
        }
    }

    fn grow_with(
        made: &mut Made,
        plan: &Plan,
        claims: &Path,
        wish: u32,
        supervisor: &OwnedFd,
    ) -> Result<(u32, OwnedFd, OwnedFd, OwnedFd), StepError> {
        let parts = plan.parts();
        for step in parts.zygote {
            match step {
                Step::MakeGroup(group) => group.make()?,
                Step::ClaimIds { .. } => made.claim = Some(Claim::take(claims, wish)?),
                Step::ShareIds { processes, .. } => {
                    made.claim = Some(Claim::share(wish, *processes))
                }
                Step::MakeUserNamespace => {
                    let claim = made.claim.as_ref().ok_or_else(out_of_order)?;
                    // SAFETY: the zygote has one thread.
                    made.users = Some(unsafe { isolate::make_user_namespace(claim) }?);
                }
                Step::Clone { namespaces, into } => {
                    let into = into.as_ref().map(fs::File::open).transpose();
                    let into = into.doing(|| "open the supervisor's cgroup".to_owned())?;
                    return split(made, &parts, supervisor, isolate::clone_flags(namespaces), into);
                }
                _ => break,
            }
        }
        Err(out_of_order())
    }

    /// Whether pid 1 lives.
    pub(super) fn lives(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|dead| dead == 0)
    }

    /// Whether it has come to the gate, or died on the way.
    pub(super) fn is_ready(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.gate, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Makes it another sandbox's, with that one's limits.
    pub(super) fn rename(
        &mut self,
        cgroups: &Hierarchy,
        group: &str,
        part: &str,
        plan: &Plan,
    ) -> Result<(), StepError> {
        cgroups.rename(group, &self.part, part)?;
        part.clone_into(&mut self.part);
        let groups = plan.parts().zygote.iter().filter_map(|step| match step {
            Step::MakeGroup(group) => Some(group),
            _ => None,
        });
        // Same kind of host, same cgroups in the same order; most limits are everybody's.
        for (group, before) in groups.zip(&self.settings) {
            let changed =
                group.settings.iter().filter(|setting| !before.contains(setting)).cloned();
            Group { settings: changed.collect(), path: group.path.clone() }.set()?;
        }
        Ok(())
    }

    /// Ends it and gives back what it holds.
    pub(super) fn discard(self, cgroups: &Hierarchy, group: &str) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        let _ = waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED);
        // Dead with pid 1, but not gone from their cgroups that very moment.
        let end = Instant::now() + PATIENCE;
        while !cgroups.clear(group, &self.part) && Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        self.claim.release();
    }
}

fn split(
    made: &Made,
    parts: &Parts<'_>,
    supervisor: &OwnedFd,
    flags: u64,
    into: Option<fs::File>,
) -> Result<(u32, OwnedFd, OwnedFd, OwnedFd), StepError> {
    let (Some(claim), Some(users)) = (&made.claim, &made.users) else { return Err(out_of_order()) };
    let (inside, gate) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .doing(|| "make a socket pair".to_owned())?;
    let (report, say) = pipe_with(PipeFlags::CLOEXEC).doing(|| "make a pipe".to_owned())?;
    // SAFETY: the zygote has one thread.
    let side = unsafe { syscall::clone_process(flags, into.as_ref().map(AsFd::as_fd)) };
    match side.doing(|| "start pid 1".to_owned())? {
        Side::Child => {
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            // Whoever waits for the zygote to close something must not wait for a seed.
            // SAFETY: this process never goes back to what owns the other descriptors.
            unsafe {
                syscall::close_all_but(&[
                    inside.as_fd(),
                    say.as_fd(),
                    users.as_fd(),
                    supervisor.as_fd(),
                ])
            };
            let (ahead, own) = (parts.ahead, parts.own);
            let (first_id, processes) = (claim.first(), claim.processes());
            let birth = Birth { ahead, own, supervisor, users, first_id, processes, gate: &inside };
            // SAFETY: a new process has one thread.
            let result = unsafe { isolate::carry_out(&birth) };
            let (line, code) =
                result.map_or_else(|error| (error.line(), 1), |()| (LAUNCHED.to_owned(), 0));
            let _ = rustix::io::write(&say, format!("{line}\n").as_bytes());
            syscall::exit_now(code)
        }
        Side::Parent { pid, pidfd } => Ok((pid, pidfd, gate, report)),
    }
}

/// The mount namespace of a process.
pub(super) fn mounts_of(pid: u32) -> Option<OwnedFd> {
    fs::File::open(format!("/proc/{pid}/ns/mnt")).ok().map(OwnedFd::from)
}

fn settings(plan: &Plan) -> Vec<Vec<Setting>> {
    let of = |step: &Step| match step {
        Step::MakeGroup(group) => Some(group.settings.clone()),
        _ => None,
    };
    plan.parts().zygote.iter().filter_map(of).collect()
}

fn out_of_order() -> StepError {
    StepError::new("carry out steps out of order", io::ErrorKind::InvalidInput.into())
}
