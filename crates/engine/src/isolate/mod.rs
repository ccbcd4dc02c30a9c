//! Executes a plan. The zygote runs the first steps; then pid 1 continues, forks and becomes the
//! supervisor, while the forked process, which still has the host's privileges, waits for its
//! assignment and assembles the sandbox around pid 1. A failing step ends the sandbox before it
//! begins; there is no partial isolation.

pub(crate) mod caps;
mod disk;
mod handover;
pub(crate) mod ids;
mod iptables;
pub(crate) mod mounts;
pub(crate) mod network;
pub(crate) mod seccomp;
mod settle;
mod sys;
pub(crate) mod syscalls;
mod users;

use std::{
    fs, io,
    os::fd::{AsFd, OwnedFd},
    path::PathBuf,
    time::Duration,
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
    fd_passing::{receive, send_with},
    host_tables::HostTables,
    plan::{Namespace, Step},
    syscall::{self, Side},
};
use mounts::{RootTree, Scratch};
pub(crate) use users::{make_user_namespace, use_file_ids};

/// File name of the supervisor's log.
pub(crate) const SUPERVISOR_LOG: &str = "supervisor.log";

/// File name of the orders by which pid 1 freezes its commands where there is no cgroup.
pub(crate) const FREEZE_FILE: &str = "freeze";

/// What the new pid 1 needs to run its steps.
pub(crate) struct SpawnContext<'a> {
    /// The steps before the fork.
    pub(crate) before_fork: &'a [Step],
    /// Pid 1's steps after the fork.
    pub(crate) pid1: &'a [Step],
    pub(crate) supervisor: &'a OwnedFd,
    /// The sandbox's user namespace.
    pub(crate) users: &'a OwnedFd,
    /// Host id of root inside; 0 where ids are shared, and then mounts are not id-mapped.
    pub(crate) first_id: u32,
    /// Process limit, where no cgroup has one.
    pub(crate) processes: Option<u32>,
    /// Receives `ready` when the steps before the assignment are done, and sends an [`Assignment`]
    /// once the zygote has recorded the sandbox; closed when the zygote dies.
    pub(crate) assignment_socket: &'a OwnedFd,
}

// Unmounting an overlay syncs the disk below it. A start does not wait for a slow one: no process
// uses the old mount any more, the kernel only warns.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(2);

/// Turns a prepared pid 1 into one sandbox. Attached: the layers, the binds, the volumes, and with
/// `after_unmount` the process that still unmounts one of the layers.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// The steps after [`Step::AwaitAssignment`].
    pub(crate) steps: Vec<Step>,
    /// Folder of the log.
    pub(crate) folder: PathBuf,
    /// Folder of `upper` and `work`.
    pub(crate) writable: PathBuf,
    /// Folder of the sockets.
    pub(crate) run: PathBuf,
    /// A layer is still the writable layer of an ended sandbox's overlay.
    pub(crate) after_unmount: bool,
    /// The supervisor's launch; its descriptors are collected by the steps.
    pub(crate) launch: Launch,
}

/// The `clone` flags of these namespaces.
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

/// Runs the new process's steps. Returns `Ok` in the process that assembled the sandbox, `Err` in
/// either process when a step failed; pid 1 becomes the supervisor and does not return.
///
/// # Safety
/// The caller must have one thread only.
pub(crate) unsafe fn run_steps(context: &SpawnContext<'_>) -> Result<(), StepError> {
    let mut runner = StepRunner::default();
    for step in context.before_fork {
        runner.step(step, context)?;
    }
    let (inside, outside) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .doing(|| "make a socket pair")?;
    runner.early_launch(&outside)?;
    // SAFETY: the caller vouches for one thread.
    match unsafe { syscall::clone_process(0, None) }.doing(|| "fork")? {
        Side::Parent { .. } => {
            drop(outside);
            runner.stdin = Some(inside);
            for step in context.pid1 {
                runner.step(step, context)?;
            }
            Err(out_of_order())
        }
        Side::Child => {
            drop(inside);
            runner.launcher = Some(outside);
            // Sockets and logs belong to the host's root.
            syscall::set_file_ids(0, 0);
            let result = runner.run_assignment(context);
            if result.is_err() {
                // Closing the socket ends pid 1, which kills this process: the error must be
                // reported first.
                #[expect(clippy::disallowed_methods, reason = "the socket stays open")]
                std::mem::forget(runner);
            }
            result
        }
    }
}

#[derive(Default)]
struct StepRunner {
    assignment: Option<Assignment>,
    passed: Vec<OwnedFd>,
    scratch: Option<Scratch>,
    tree: Option<RootTree>,
    inherited: Vec<(Descriptor, OwnedFd)>,
    /// Pid 1's end of the launch socket.
    stdin: Option<OwnedFd>,
    /// Pid 1's standard output until the launch.
    null: Option<OwnedFd>,
    /// The other end of the launch socket.
    launcher: Option<OwnedFd>,
    files: usize,
}

impl StepRunner {
    /// Waits for the assignment and runs its steps.
    fn run_assignment(&mut self, context: &SpawnContext<'_>) -> Result<(), StepError> {
        for step in self.receive_assignment(context.assignment_socket)? {
            self.step(&step, context)?;
        }
        Ok(())
    }

    /// Waits for the assignment; returns its steps.
    fn receive_assignment(&mut self, socket: &OwnedFd) -> Result<Vec<Step>, StepError> {
        // The zygote uses a standby only after this message: all earlier steps are done.
        send_with(socket, b"ready", &[]).doing(|| "notify the zygote")?;
        let received = receive::<Assignment>(socket).doing(|| "wait for the zygote")?;
        let gone = || StepError::new("wait for the zygote", io::ErrorKind::UnexpectedEof);
        let (mut assignment, files) = received.ok_or_else(gone)?;
        self.passed = files;
        if assignment.after_unmount
            && let Some(unmounting) = self.passed.pop()
        {
            let _ = syscall::is_readable(&unmounting, UNMOUNT_TIMEOUT);
        }
        let steps = std::mem::take(&mut assignment.steps);
        self.assignment = Some(assignment);
        Ok(steps)
    }

    fn assignment(&self) -> Result<&Assignment, StepError> {
        self.assignment.as_ref().ok_or_else(out_of_order)
    }

    fn step(&mut self, step: &Step, context: &SpawnContext<'_>) -> Result<(), StepError> {
        match step {
            Step::JoinGroups { groups } => join(groups),
            Step::Inherit { descriptor, path, write } => self.inherit(*descriptor, path, *write),
            Step::NewCgroupNamespace => new_cgroup_namespace(),
            Step::HostName { name } => {
                syscall::set_host_name(name).doing(|| format!("set the host name {name}"))
            }
            Step::Loopback { address, prefix, ipv6, redirect } => {
                self.inherited.extend(network::set_up(*address, *prefix, *ipv6, *redirect)?);
                Ok(())
            }
            Step::OomScore { adjust } => fs::write("/proc/self/oom_score_adj", adjust.to_string())
                .doing(|| format!("set oom_score_adj to {adjust}")),
            Step::SharedMemory { bytes } => limit_shared_memory(*bytes),
            Step::Bridge => self.bridge(),
            Step::Door => self.door(),
            Step::Log => self.log(),
            Step::FreezeOrders => self.freeze_orders(),
            Step::EnterUserNamespace => users::enter(context.users.as_fd()),
            Step::ResourceLimits => resource_limits(context.processes),
            Step::Capabilities { keep } => caps::keep_only(keep).doing(|| "drop capabilities"),
            Step::NoNewPrivileges => {
                rustix::thread::set_no_new_privs(true).doing(|| "set no_new_privs")
            }
            Step::Seccomp => {
                syscall::seccomp(seccomp::program()).doing(|| "install the seccomp filter")
            }
            Step::Exec => Err(self.exec(context.supervisor)),
            Step::Settle => settle::wait(self.launcher.as_ref().ok_or_else(out_of_order)?),
            Step::Launch { cpus } => self.launch(cpus),
            // Also refuses the steps of another process.
            _ => self.disk_step(step, context),
        }
    }
}

pub(crate) fn out_of_order() -> StepError {
    StepError::new("execute a plan whose steps are out of order", io::ErrorKind::InvalidInput)
}

fn join(groups: &[PathBuf]) -> Result<(), StepError> {
    for group in groups {
        let procs = group.join("cgroup.procs");
        fs::write(&procs, "0").doing(|| format!("join {}", procs.display()))?;
    }
    Ok(())
}

fn limit_shared_memory(bytes: u64) -> Result<(), StepError> {
    use io::ErrorKind::{NotFound, PermissionDenied};
    const PAGE_BYTES: u64 = 4096;
    match fs::write("/proc/sys/kernel/shmall", (bytes / PAGE_BYTES).to_string()) {
        // The kernel lacks the setting, or only the host's root may change it.
        Err(error) if matches!(error.kind(), NotFound | PermissionDenied) => Ok(()),
        result => result.doing(|| "limit shared memory"),
    }
}

fn new_cgroup_namespace() -> Result<(), StepError> {
    // SAFETY: a cgroup namespace changes what paths are shown, nothing a running thread relies on.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWCGROUP) }
        .doing(|| "make a cgroup namespace")
}

fn resource_limits(processes: Option<u32>) -> Result<(), StepError> {
    if let Some(processes) = processes.map(u64::from) {
        let allowed =
            getrlimit(Resource::Nproc).maximum.map_or(processes, |most| most.min(processes));
        let most = Rlimit { current: Some(allowed), maximum: Some(allowed) };
        setrlimit(Resource::Nproc, most).doing(|| "limit processes")?;
    }
    // 1, not 0: with a limit of 0 the kernel still runs the host's crash handler.
    let core = Rlimit { current: Some(1), maximum: Some(1) };
    setrlimit(Resource::Core, core).doing(|| "forbid core dumps")?;
    // The usual default, which a program may raise up to its share of the host's table.
    let most = HostTables::read().open_files();
    let most = getrlimit(Resource::Nofile).maximum.map_or(most, |maximum| maximum.min(most));
    let files = Rlimit { current: Some(1024.min(most)), maximum: Some(most) };
    setrlimit(Resource::Nofile, files).doing(|| "limit open files")
}
