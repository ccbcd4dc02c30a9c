//! Carries a plan out. The first steps are the zygote's; then pid 1 goes on by itself, splits in two
//! and becomes the supervisor, while the other process, which still has the host's powers, waits at the
//! gate to furnish the sandbox around it. Every step either succeeds or ends the sandbox before it
//! began: nothing degrades.

pub(crate) mod caps;
pub(crate) mod ids;
mod iptables;
pub(crate) mod mounts;
pub(crate) mod network;
pub(crate) mod seccomp;
mod settle;
pub(crate) mod syscalls;

use std::{
    ffi::CString,
    fs,
    io::{self, IoSlice},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use harvest_proto::launch::{Cradle, Descriptor, Launch};
use rustix::{
    fs::{Mode, OFlags},
    net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
        SocketType, bind, listen, sendmsg, socket_with, socketpair,
    },
    process::{DumpableBehavior, Resource, Rlimit, Signal, getrlimit, setrlimit},
    thread::{CapabilitiesSecureBits, LinkNameSpaceType, UnshareFlags},
};
use serde::{Deserialize, Serialize};

use crate::{
    error::{Doing, StepError},
    plan::{IDS, Namespace, Step},
    rootless,
    syscall::{self, Side},
    zygote::protocol::receive,
};
use ids::Claim;
use mounts::{Scratch, Tree};

// Pid 1's own, beside those of its commands.
const SUPERVISOR_PROCESSES: u64 = 64;

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

/// Makes a user namespace that maps 0.. to the claimed range.
///
/// # Safety
/// The caller must have one thread only.
pub(crate) unsafe fn make_user_namespace(claim: &Claim) -> Result<OwnedFd, StepError> {
    let doing = || "make a user namespace".to_owned();
    // The kernel counts inotify watches, pending signals and the like against who made the
    // namespace: an id of its own, not root, whom all sandboxes would share.
    let owner = |uid: u32| {
        let id = rustix::process::Uid::from_raw(uid);
        rustix::thread::set_thread_res_uid(None, Some(id), None)?;
        // Or what `/proc` shows of us and of the child would be closed to who is not the host's root.
        rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)
    };
    let before = narrow(claim).doing(doing)?;
    owner(claim.owner()).doing(doing)?;
    let zygote = rustix::process::getpid();
    // SAFETY: the caller vouches for one thread; the child below only waits to be killed.
    let side = unsafe { syscall::clone_process(libc::CLONE_NEWUSER.cast_unsigned().into(), None) };
    if let Ok(Side::Child) = side {
        wait_for_the_end(zygote);
    }
    owner(0).doing(doing)?;
    for (resource, limit) in before {
        setrlimit(resource, limit).doing(doing)?;
    }
    let Side::Parent { pid, pidfd } = side.doing(doing)? else { wait_for_the_end(zygote) };
    let prepare = || -> io::Result<OwnedFd> {
        for file in ["uid_map", "gid_map"] {
            let map = match claim {
                Claim::Own { first, .. } => format!("0 {first} {IDS}\n"),
                Claim::Shared { .. } => {
                    rootless::same_ids(&fs::read_to_string(format!("/proc/self/{file}"))?)
                }
            };
            fs::write(format!("/proc/{pid}/{file}"), map)?;
        }
        Ok(fs::File::open(format!("/proc/{pid}/ns/user"))?.into())
    };
    let namespace = prepare();
    let _ = rustix::process::pidfd_send_signal(&pidfd, Signal::KILL);
    let _ = rustix::process::waitid(
        rustix::process::WaitId::PidFd(pidfd.as_fd()),
        rustix::process::WaitIdOptions::EXITED,
    );
    namespace.doing(doing)
}

/// Lowers what the maker of a user namespace may have, where ids are shared: the namespace remembers it,
/// and what has an id inside counts together. Answers what to set again.
fn narrow(claim: &Claim) -> io::Result<Vec<(Resource, Rlimit)>> {
    let Some(processes) = claim.processes() else { return Ok(Vec::new()) };
    let mut before = Vec::new();
    for resource in [Resource::Nproc, Resource::Sigpending] {
        let limit = getrlimit(resource);
        let most = match resource {
            Resource::Nproc => u64::from(processes) + SUPERVISOR_PROCESSES,
            _ => limit.current.unwrap_or(u64::MAX) / rootless::SHARE,
        };
        let most = limit.maximum.map_or(most, |maximum| maximum.min(most));
        setrlimit(resource, Rlimit { current: Some(most), ..limit })?;
        before.push((resource, limit));
    }
    Ok(before)
}

fn wait_for_the_end(zygote: rustix::process::Pid) -> ! {
    // Should the zygote die first, this process must not stay.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    if rustix::process::getppid() != Some(zygote) {
        syscall::exit_now(1);
    }
    loop {
        let _ = rustix::thread::nanosleep(&rustix::thread::Timespec { tv_sec: 60, tv_nsec: 0 });
    }
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
            Step::EnterUserNamespace => enter_users(birth.users.as_fd()),
            Step::ResourceLimits => resource_limits(birth.processes),
            Step::Capabilities { keep } => caps::keep_only(keep).doing(|| "drop capabilities".to_owned()),
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
            | Step::Gate => {
                Err(StepError::new("carry out a step of another's", io::ErrorKind::InvalidInput.into()))
            }
            _ => self.disk_step(step, birth),
        }
    }

    fn disk_step(&mut self, step: &Step, birth: &Birth<'_>) -> Result<(), StepError> {
        match step {
            Step::Scratch => {
                self.scratch = Some(Scratch::make()?);
                // What is made ahead belongs to root inside.
                return act_as(birth.first_id);
            }
            Step::Overlay { lowers } => {
                // An overlay acts for its maker: with ids the layers do not know it could write nothing.
                act_as(birth.first_id)?;
                let root = self.scratch()?.overlay(lowers).doing(|| "mount the overlay".to_owned())?;
                self.tree = Some(Tree { root });
                return Ok(());
            }
            Step::Furnish => {
                let furnish = self.scratch()?.furnish(self.tree()?);
                return furnish.doing(|| "put /proc, /dev and /sys into the root".to_owned());
            }
            Step::Root => {
                let tree = self.tree.take().ok_or_else(out_of_order)?;
                self.scratch = None;
                return tree.enter().doing(|| "enter the new root".to_owned());
            }
            _ => {}
        }
        let handed = |number: usize| self.handed.get(number).ok_or(io::ErrorKind::NotFound);
        let ids = (birth.first_id != 0).then_some(birth.users.as_fd());
        match step {
            Step::Layer { from, name } => handed(from.number)
                .map_err(io::Error::from)
                .and_then(|tree| self.scratch.as_ref().ok_or(io::ErrorKind::Other)?.layer(tree, name, ids))
                .doing(|| format!("attach the layer {}", from.path.display())),
            Step::Writable => {
                let folder = &self.calling()?.writable;
                self.scratch()?.writable(folder, ids).doing(|| format!("attach {}", folder.display()))
            }
            Step::Proc => self.ahead()?.proc().doing(|| "mount /proc".to_owned()),
            Step::Dev { nodes } => {
                let nodes = nodes.iter().map(|(name, (major, minor))| (name.as_str(), *major, *minor));
                self.ahead()?.dev(nodes, birth.first_id).doing(|| "make /dev".to_owned())
            }
            Step::Shm { bytes } => self.tree()?.shm(*bytes).doing(|| "mount /dev/shm".to_owned()),
            Step::Empty { inside } => {
                self.ahead()?.empty(inside).doing(|| format!("cover {}", inside.display()))
            }
            Step::Mask { paths } => {
                self.ahead()?.mask(paths, self.scratch()?).doing(|| "mask parts of /proc".to_owned())
            }
            Step::ReadOnly { paths } => {
                self.ahead()?.read_only(paths).doing(|| "make parts of /proc read-only".to_owned())
            }
            Step::File { inside, text } => {
                self.files += 1;
                let file = self.scratch()?.file(self.files, text);
                file.and_then(|file| self.tree.as_ref().ok_or(io::ErrorKind::Other)?.on_file(&file, inside))
                    .doing(|| format!("provide {}", inside.display()))
            }
            Step::Bind { from, inside } => handed(from.number)
                .map_err(io::Error::from)
                .and_then(|tree| self.tree.as_ref().ok_or(io::ErrorKind::Other)?.bind(tree, inside))
                .doing(|| format!("bind {} to {}", from.path.display(), inside.display())),
            Step::Volume { from, inside, read_only } => handed(from.number)
                .map_err(io::Error::from)
                .and_then(|mount| {
                    let tree = self.tree.as_ref().ok_or(io::ErrorKind::Other)?;
                    tree.volume(mount, inside, *read_only, ids)
                })
                .doing(|| format!("attach the volume {} to {}", from.path.display(), inside.display())),
            _ => Err(out_of_order()),
        }
    }

    fn scratch(&self) -> Result<&Scratch, StepError> {
        self.scratch.as_ref().ok_or_else(out_of_order)
    }

    fn ahead(&self) -> Result<Tree, StepError> {
        self.scratch()?.ahead().doing(|| "find what is made ahead".to_owned())
    }

    fn tree(&self) -> Result<&Tree, StepError> {
        self.tree.as_ref().ok_or_else(out_of_order)
    }

    fn inherit(&mut self, descriptor: Descriptor, path: &Path, write: bool) -> Result<(), StepError> {
        let access = if write { OFlags::WRONLY } else { OFlags::RDONLY };
        let file = rustix::fs::open(path, access | OFlags::CLOEXEC, Mode::empty())
            .doing(|| format!("open {}", path.display()))?;
        self.inherited.push((descriptor, file));
        Ok(())
    }

    fn bridge(&mut self) -> Result<(), StepError> {
        let run = &self.calling()?.run;
        let make = || -> io::Result<OwnedFd> {
            match fs::DirBuilder::new().mode(0o711).create(run) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            // Bound by a short name: a socket's path may have 107 bytes only.
            rustix::process::chdir(run)?;
            let _ = fs::remove_file("bridge.sock");
            let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            bind(&socket, &SocketAddrUnix::new("bridge.sock")?)?;
            fs::set_permissions("bridge.sock", fs::Permissions::from_mode(0o666))?;
            listen(&socket, 128)?;
            rustix::process::chdir("/")?;
            Ok(socket)
        };
        let bridge = make().doing(|| format!("bind the bridge in {}", run.display()))?;
        self.inherited.push((Descriptor::Bridge, bridge));
        Ok(())
    }

    fn door(&mut self) -> Result<(), StepError> {
        let run = &self.calling()?.run;
        let door = mounts::detached(run).doing(|| format!("open the door's folder {}", run.display()))?;
        self.inherited.push((Descriptor::Door, door));
        Ok(())
    }

    fn log(&mut self) -> Result<(), StepError> {
        let path = self.calling()?.folder.join(LOG);
        let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::CLOEXEC;
        let log = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600));
        self.inherited.push((Descriptor::Log, log.doing(|| format!("open {}", path.display()))?));
        Ok(())
    }

    fn still(&mut self) -> Result<(), StepError> {
        let path = self.calling()?.folder.join(STILL);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        // Two numbers: a disk that is full later has room for them already.
        let make = || -> io::Result<OwnedFd> {
            let file = rustix::fs::open(&path, flags, Mode::from_raw_mode(0o600))?;
            rustix::io::write(&file, &[0; 16])?;
            Ok(file)
        };
        self.inherited.push((Descriptor::Still, make().doing(|| format!("make {}", path.display()))?));
        Ok(())
    }

    /// Becomes the supervisor, which finds what it gets ahead of its launch on its standard input.
    fn exec(&mut self, supervisor: &OwnedFd) -> StepError {
        let (Some(stdin), Some(null)) = (self.stdin.take(), self.null.take()) else {
            return out_of_order();
        };
        let start = || -> io::Result<()> {
            syscall::standard_stream(&null, 1)?;
            syscall::standard_stream(&null, 2)?;
            syscall::standard_stream(&stdin, 0)
        };
        if let Err(error) = start() {
            return StepError::new("prepare the supervisor's streams", error);
        }
        syscall::default_signals();
        // The zygote's own is empty, so that the modes it asks for are the modes it gets.
        rustix::process::umask(Mode::from_raw_mode(0o022));
        let name = CString::from(c"harvest-supervisor");
        StepError::new("execute the supervisor", syscall::execute(supervisor, &[name]))
    }

    /// Gives the supervisor what is ready before anybody knows which sandbox it will be pid 1 of.
    fn cradle(&mut self, launcher: &OwnedFd) -> Result<(), StepError> {
        let null = self.scratch()?.null().doing(|| "open /dev/null".to_owned())?;
        self.null = Some(null.try_clone().doing(|| "keep /dev/null".to_owned())?);
        self.inherited.push((Descriptor::Null, null));
        let (cradle, files): (Vec<_>, Vec<_>) = std::mem::take(&mut self.inherited).into_iter().unzip();
        give(launcher, &Cradle { cradle }, &files).doing(|| "fill the supervisor's cradle".to_owned())
    }

    fn launch(&mut self) -> Result<(), StepError> {
        let (Some(calling), Some(launcher)) = (self.calling.take(), self.launcher.take()) else {
            return Err(out_of_order());
        };
        let mut launch = calling.launch;
        let (names, files): (Vec<_>, Vec<_>) = std::mem::take(&mut self.inherited).into_iter().unzip();
        launch.descriptors = names;
        give(&launcher, &launch, &files).doing(|| "launch the supervisor".to_owned())
    }
}

fn give<T: Serialize>(socket: &OwnedFd, message: &T, files: &[OwnedFd]) -> io::Result<()> {
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    send_with(socket, &serde_json::to_vec(message)?, &files)
}

/// The name of the file the supervisor's output goes to.
pub(crate) const LOG: &str = "supervisor.log";

/// The name of the file by which pid 1 is asked to let its commands stand still.
pub(crate) const STILL: &str = "still";

fn out_of_order() -> StepError {
    StepError::new("carry out a plan whose steps are out of order", io::ErrorKind::InvalidInput.into())
}

/// Sends one message with descriptors attached.
pub(crate) fn send_with(socket: impl AsFd, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(files.len()))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
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
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
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

/// Files are made and permissions checked as this id from now on; capabilities stay.
pub(crate) fn act_as(id: u32) -> Result<(), StepError> {
    rustix::thread::set_capabilities_secure_bits(CapabilitiesSecureBits::NO_SETUID_FIXUP)
        .doing(|| "keep capabilities across a change of ids".to_owned())?;
    syscall::set_file_ids(id, id);
    Ok(())
}

fn enter_users(users: BorrowedFd<'_>) -> Result<(), StepError> {
    let enter = || -> io::Result<()> {
        rustix::thread::move_into_link_name_space(users, Some(LinkNameSpaceType::User))?;
        let (uid, gid) = (rustix::process::Uid::ROOT, rustix::process::Gid::ROOT);
        rustix::thread::set_thread_res_gid(Some(gid), Some(gid), Some(gid))?;
        rustix::thread::set_thread_groups(&[])?;
        Ok(rustix::thread::set_thread_res_uid(Some(uid), Some(uid), Some(uid))?)
    };
    enter().doing(|| "enter the user namespace".to_owned())
}

fn resource_limits(processes: Option<u32>) -> Result<(), StepError> {
    if let Some(processes) = processes.map(u64::from) {
        let allowed = getrlimit(Resource::Nproc).maximum.map_or(processes, |most| most.min(processes));
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
