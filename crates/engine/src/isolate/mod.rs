//! Carries a plan out. The first steps are the zygote's; then pid 1 goes on by itself, splits in two
//! and becomes the supervisor, while the other process, which still has the host's powers, waits at the
//! gate to furnish the sandbox around it. Every step either succeeds or ends the sandbox before it
//! began: nothing degrades.

pub(crate) mod caps;
mod disk;
mod handover;
pub(crate) mod ids;
mod iptables;
pub(crate) mod mounts;
pub(crate) mod network;
pub(crate) mod seccomp;
mod settle;
pub(crate) mod syscalls;
mod users;

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
};

use harvest_proto::launch::{Descriptor, Launch};
use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socketpair},
    process::{Resource, Rlimit, getrlimit, setrlimit},
    thread::UnshareFlags,
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing, StepError},
    plan::{Namespace, Step},
    syscall::{self, Side},
    zygote::protocol::{receive, send_with},
};
use mounts::{Scratch, Tree};
pub(crate) use users::{act_as, make_user_namespace};

/// The name of the file the supervisor's output goes to.
pub(crate) const LOG: &str = "supervisor.log";

/// The name of the file by which pid 1 is asked to let its commands stand still.
pub(crate) const STILL: &str = "still";

/// What the new process is born with.
pub(crate) struct Birth<'a> {
    /// The steps until it splits in two.
    pub(crate) ahead: &'a [Step],
    /// Pid 1's steps from there on.
    pub(crate) own: &'a [Step],
    /// The supervisor's program.
    pub(crate) supervisor: &'a OwnedFd,
    /// The sandbox's user namespace.
    pub(crate) users: &'a OwnedFd,
    /// Root's host id inside it; 0 where ids are shared, and then mounts show them as they are.
    pub(crate) first_id: u32,
    /// How many processes it may have, where no cgroup counts them.
    pub(crate) processes: Option<u32>,
    /// Takes word that the steps ahead are done, and brings a [`Calling`] when the zygote has written
    /// everything down; closed when it died.
    pub(crate) gate: &'a OwnedFd,
}

/// What pid 1 is to be pid 1 of. Attached: the layers, the binds, the volumes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Calling {
    /// The steps after the gate.
    pub(crate) steps: Vec<Step>,
    /// Holds the log.
    pub(crate) folder: PathBuf,
    /// Holds `upper` and `work`.
    pub(crate) writable: PathBuf,
    /// Holds the sockets.
    pub(crate) run: PathBuf,
    /// What the supervisor is told; its descriptors are collected on the way.
    pub(crate) launch: Launch,
}

/// The namespaces' bits.
pub(crate) fn clone_flags(namespaces: &[Namespace]) -> u64 {
    namespaces
        .iter()
        .map(|namespace| match namespace {
            Namespace::Mount => libc::CLONE_NEWNS,
            Namespace::Pid => libc::CLONE_NEWPID,
            Namespace::Net => libc::CLONE_NEWNET,
            Namespace::Ipc => libc::CLONE_NEWIPC,
            Namespace::Uts => libc::CLONE_NEWUTS,
        })
        .fold(0, |flags, flag| flags | u64::from(flag.cast_unsigned()))
}

/// Carries the new process's steps out. Returns `Ok` in the process that has furnished the sandbox,
/// `Err` in either when a step failed; pid 1 becomes the supervisor and does not return.
///
/// # Safety
/// The caller must have one thread only.
pub(crate) unsafe fn carry_out(birth: &Birth<'_>) -> Result<(), StepError> {
    let mut work = Work::default();
    for step in birth.ahead {
        work.step(step, birth)?;
    }
    let (inside, outside) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .doing(|| "make a socket pair".to_owned())?;
    work.cradle(&outside)?;
    // SAFETY: the caller vouches for one thread.
    match unsafe { syscall::clone_process(0, None) }.doing(|| "split in two".to_owned())? {
        Side::Parent { .. } => {
            drop(outside);
            work.stdin = Some(inside);
            for step in birth.own {
                work.step(step, birth)?;
            }
            Err(out_of_order())
        }
        Side::Child => {
            drop(inside);
            work.launcher = Some(outside);
            // The host's own again: sockets and logs are the host's.
            syscall::set_file_ids(0, 0);
            let result = work.furnish(birth);
            if result.is_err() {
                // The end of its socket ends pid 1, and that ends us: the reason is to be told before.
                std::mem::forget(work);
            }
            result
        }
    }
}

#[derive(Default)]
struct Work {
    calling: Option<Calling>,
    handed: Vec<OwnedFd>,
    scratch: Option<Scratch>,
    tree: Option<Tree>,
    inherited: Vec<(Descriptor, OwnedFd)>,
    /// Pid 1's end of the socket over which it is launched.
    stdin: Option<OwnedFd>,
    /// Where its output goes until then.
    null: Option<OwnedFd>,
    /// The other end.
    launcher: Option<OwnedFd>,
    files: usize,
}

impl Work {
    /// Waits at the gate, and takes the steps after it.
    fn furnish(&mut self, birth: &Birth<'_>) -> Result<(), StepError> {
        for step in self.called(birth.gate)? {
            self.step(&step, birth)?;
        }
        Ok(())
    }

    /// Waits for the calling and answers its steps.
    fn called(&mut self, gate: &OwnedFd) -> Result<Vec<Step>, StepError> {
        // Until now the cgroups' names were in use.
        send_with(gate, b"ready", &[]).doing(|| "tell the zygote".to_owned())?;
        let called = receive::<Calling>(gate).doing(|| "wait for the zygote".to_owned())?;
        let gone = || StepError::new("wait for the zygote", io::ErrorKind::UnexpectedEof.into());
        let (mut calling, files) = called.ok_or_else(gone)?;
        self.handed = files;
        let steps = std::mem::take(&mut calling.steps);
        self.calling = Some(calling);
        Ok(steps)
    }

    fn calling(&self) -> Result<&Calling, StepError> {
        self.calling.as_ref().ok_or_else(out_of_order)
    }

    fn step(&mut self, step: &Step, birth: &Birth<'_>) -> Result<(), StepError> {
        match step {
            Step::JoinGroups { groups } => join(groups),
            Step::Inherit { descriptor, path, write } => self.inherit(*descriptor, path, *write),
            Step::NewCgroupNamespace => new_cgroup_namespace(),
            Step::HostName { name } => {
                syscall::set_host_name(name).doing(|| format!("set the host name {name}"))
            }
            Step::Loopback { address, prefix, twin, redirect } => {
                self.inherited.extend(network::set_up(*address, *prefix, *twin, *redirect)?);
                Ok(())
            }
            Step::OomScore { adjust } => fs::write("/proc/self/oom_score_adj", adjust.to_string())
                .doing(|| format!("set oom_score_adj to {adjust}")),
            Step::SharedMemory { bytes } => limit_shared_memory(*bytes),
            Step::Bridge => self.bridge(),
            Step::Door => self.door(),
            Step::Log => self.log(),
            Step::Still => self.still(),
            Step::EnterUserNamespace => users::enter(birth.users.as_fd()),
            Step::ResourceLimits => resource_limits(birth.processes),
            Step::Capabilities { keep } => {
                caps::keep_only(keep).doing(|| "drop capabilities".to_owned())
            }
            Step::NoNewPrivileges => {
                rustix::thread::set_no_new_privs(true).doing(|| "set no_new_privs".to_owned())
            }
            Step::Seccomp => {
                syscall::seccomp(seccomp::program()).doing(|| "install the seccomp list".to_owned())
            }
            Step::Exec => Err(self.exec(birth.supervisor)),
            Step::Settle => settle::wait(self.launcher.as_ref().ok_or_else(out_of_order)?),
            Step::Launch => self.launch(),
            Step::MakeGroup(_)
            | Step::ClaimIds { .. }
            | Step::ShareIds { .. }
            | Step::MakeUserNamespace
            | Step::Clone { .. }
            | Step::Split
            | Step::Gate => Err(StepError::new(
                "carry out a step of another's",
                io::ErrorKind::InvalidInput.into(),
            )),
            _ => self.disk_step(step, birth),
        }
    }
}

fn out_of_order() -> StepError {
    StepError::new(
        "carry out a plan whose steps are out of order",
        io::ErrorKind::InvalidInput.into(),
    )
}

fn join(groups: &[PathBuf]) -> Result<(), StepError> {
    for group in groups {
        let procs = group.join("cgroup.procs");
        fs::write(&procs, "0").doing(|| format!("join {}", procs.display()))?;
    }
    Ok(())
}

fn limit_shared_memory(bytes: u64) -> Result<(), StepError> {
    const PAGE_BYTES: u64 = 4096;
    match fs::write("/proc/sys/kernel/shmall", (bytes / PAGE_BYTES).to_string()) {
        // A kernel without it, or one that lets only the host's root set it.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
            ) =>
        {
            Ok(())
        }
        result => result.doing(|| "limit shared memory".to_owned()),
    }
}

fn new_cgroup_namespace() -> Result<(), StepError> {
    // SAFETY: a cgroup namespace changes what paths are shown, nothing a running thread relies on.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP) }
        .doing(|| "make a cgroup namespace".to_owned())
}

fn resource_limits(processes: Option<u32>) -> Result<(), StepError> {
    if let Some(processes) = processes.map(u64::from) {
        let allowed =
            getrlimit(Resource::Nproc).maximum.map_or(processes, |most| most.min(processes));
        let most = Rlimit { current: Some(allowed), maximum: Some(allowed) };
        setrlimit(Resource::Nproc, most).doing(|| "limit processes".to_owned())?;
    }
    // 1, not 0: a limit of 0 still starts the host's crash handler where core dumps go to a program.
    let core = Rlimit { current: Some(1), maximum: Some(1) };
    setrlimit(Resource::Core, core).doing(|| "forbid core dumps".to_owned())?;
    // What programs expect to find; who needs more may raise it. The zygote's own is at its maximum.
    let files = Rlimit { current: Some(1024), maximum: getrlimit(Resource::Nofile).maximum };
    setrlimit(Resource::Nofile, files).doing(|| "limit open files".to_owned())
}
