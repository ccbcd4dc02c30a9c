//! System calls without a safe wrapper, each behind the smallest function that is safe to call.
//! Makes no decisions.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
    ptr,
    time::Duration,
};

use libc::{c_int, c_long, c_ulong};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    mount::{MoveMountFlags, OpenTreeFlags},
    process::{Signal, WaitId, WaitIdOptions, pidfd_send_signal, waitid},
};

/// The process in which a clone returns.
pub(crate) enum Side {
    /// The new process.
    Child,
    /// The parent process, with the new one's pid and pidfd.
    Parent { pid: u32, pidfd: OwnedFd },
}

fn check(result: impl Into<c_long>) -> io::Result<()> {
    if result.into() < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the heap's free memory to the kernel.
pub(crate) fn trim_heap() {
    // SAFETY: the function takes no pointer and locks the allocator itself.
    unsafe { libc::malloc_trim(0) };
}

// The libc crate declares it with a type that is too small.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Forks; the new process is in the namespaces that `flags` name and, on cgroup v2, in `group`.
///
/// # Safety
/// The caller must be single-threaded: locks that another thread holds (such as the allocator's)
/// would stay locked in the child forever.
pub(crate) unsafe fn clone_process(flags: u64, group: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    let mut pidfd: RawFd = -1;
    // SAFETY: the structure consists of integers, for all of which zero means "not requested".
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = flags | libc::CLONE_PIDFD as u64;
    arguments.pidfd = ptr::from_mut(&mut pidfd) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = group.as_raw_fd() as u64;
    }
    let size = size_of::<libc::clone_args>();
    // SAFETY: no stack is given, so the child continues on a copy of this one as after fork; the
    // kernel writes the descriptor into `pidfd`, which lives until it has been read.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, ptr::from_mut(&mut arguments), size) };
    check(pid)?;
    if pid == 0 {
        return Ok(Side::Child);
    }
    // SAFETY: the kernel has just opened it for this process and no other code knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Side::Parent { pid: u32::try_from(pid).unwrap_or(0), pidfd })
}

/// Exits at once: runs no destructors and flushes no buffers twice.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process; nothing runs afterwards.
    unsafe { libc::_exit(code) }
}

/// Whether a file becomes readable, or its other end closes, within this time.
pub(crate) fn is_readable(file: impl AsFd, timeout: Duration) -> rustix::io::Result<bool> {
    let timeout = Timespec {
        tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    };
    Ok(poll(&mut [PollFd::new(&file, PollFlags::IN)], Some(&timeout))? > 0)
}

/// Kills a child process and waits for its end.
pub(crate) fn kill_child(pidfd: &OwnedFd) {
    let _ = pidfd_send_signal(pidfd, Signal::KILL);
    reap_child(pidfd);
}

/// Waits for the end of a child process.
pub(crate) fn reap_child(pidfd: &OwnedFd) {
    let _ = waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED);
}

/// Sets attributes of a mount, and maps its ids to the user namespace `ids` if given.
pub(crate) fn set_mount_attributes(
    mount: impl AsFd,
    set: u64,
    ids: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut attributes =
        libc::mount_attr { attr_set: set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    if let Some(ids) = ids {
        attributes.attr_set |= libc::MOUNT_ATTR_IDMAP;
        attributes.userns_fd = ids.as_raw_fd() as u64;
    }
    let mount = mount.as_fd().as_raw_fd();
    let (empty, flags, size) = (c"", libc::AT_EMPTY_PATH, size_of::<libc::mount_attr>());
    // SAFETY: the path and the structure outlive the call, and `size` is the structure's.
    check(unsafe {
        let attributes = ptr::from_mut(&mut attributes);
        libc::syscall(libc::SYS_mount_setattr, mount, empty.as_ptr(), flags, attributes, size)
    })
}

/// A detached clone of the mount at `path` below `folder`, with its submounts if `recursive`.
pub(crate) fn clone_mount(folder: impl AsFd, path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if path.as_os_str().is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(rustix::mount::open_tree(folder, path, flags)?)
}

/// Attaches a detached mount to the open file or folder `target`.
pub(crate) fn attach_mount(mount: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, c"", target, c"", flags)?)
}

/// Sets the ids that new files get and permissions are checked with.
pub(crate) fn set_file_ids(uid: u32, gid: u32) {
    // SAFETY: these calls take integers only; they cannot fail for a process with all capabilities,
    // and a failure shows at once as a read-only overlay.
    unsafe {
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsgid, gid);
    }
}

/// Sets the host name of this UTS namespace.
pub(crate) fn set_host_name(name: &str) -> io::Result<()> {
    // SAFETY: pointer and length belong to the same text.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) })
}

/// Reads an option of the IP protocol; `value` holds the query on entry.
pub(crate) fn ip_option(socket: impl AsFd, option: c_int, value: &mut [u8]) -> io::Result<()> {
    let mut size =
        libc::socklen_t::try_from(value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `size` bytes, which `value` has.
    check(unsafe {
        let value = value.as_mut_ptr().cast();
        libc::getsockopt(socket, libc::IPPROTO_IP, option, value, &raw mut size)
    })
}

/// Replaces a table of packet rules; returns the old entries' counters in `counters`.
pub(crate) fn replace_table(
    socket: impl AsFd,
    option: c_int,
    (head, entries): (Vec<u8>, &[u8]),
    counters: &mut [[u64; 2]],
) -> io::Result<()> {
    let count = u32::try_from(counters.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut bytes = head;
    bytes.extend_from_slice(&count.to_ne_bytes());
    bytes.extend_from_slice(&(counters.as_mut_ptr().expose_provenance()).to_ne_bytes());
    bytes.extend_from_slice(entries);
    let size = libc::socklen_t::try_from(bytes.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel reads `size` bytes of `bytes`, and writes two numbers for each of `count`
    // entries to `counters`, whose address and length the bytes hold.
    check(unsafe {
        libc::setsockopt(socket, libc::IPPROTO_IP, option, bytes.as_ptr().cast(), size)
    })
}

/// One instruction of a seccomp program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Instruction {
    pub(crate) code: u16,
    pub(crate) if_true: u8,
    pub(crate) if_false: u8,
    pub(crate) value: u32,
}

/// Installs a seccomp filter for this thread and everything it starts, irrevocably.
pub(crate) fn seccomp(program: &[Instruction]) -> io::Result<()> {
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len()).map_err(|_| io::ErrorKind::InvalidInput)?,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: `Instruction` has the layout of `sock_filter`; the kernel copies the program and
    // checks it before it takes effect.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter)
    })
}

/// Executes the program in `file`. Returns only on failure.
pub(crate) fn execute(file: impl AsFd, arguments: &[CString]) -> io::Error {
    let mut argv: Vec<*const libc::c_char> =
        arguments.iter().map(|argument| argument.as_ptr()).collect();
    argv.push(ptr::null());
    let env: [*const libc::c_char; 1] = [ptr::null()];
    let file = file.as_fd().as_raw_fd();
    // SAFETY: both vectors end with a null pointer and live until the call returns, if it does.
    unsafe {
        let (empty, argv, env) = (c"".as_ptr(), argv.as_ptr(), env.as_ptr());
        libc::syscall(libc::SYS_execveat, file, empty, argv, env, libc::AT_EMPTY_PATH)
    };
    io::Error::last_os_error()
}

/// Duplicates `from` to the standard stream `number` (0, 1 or 2), which stays open across exec.
pub(crate) fn standard_stream(from: impl AsFd, number: c_int) -> io::Result<()> {
    // SAFETY: replaces one of the three standard streams, which no owner in this process closes.
    check(unsafe { libc::dup2(from.as_fd().as_raw_fd(), number) })
}

/// Closes every descriptor above the standard streams except these.
///
/// # Safety
/// No owner of a closed descriptor may be used or dropped afterwards.
pub(crate) unsafe fn close_all_but(kept: &[BorrowedFd<'_>]) {
    let mut kept: Vec<u32> =
        kept.iter().filter_map(|file| file.as_raw_fd().try_into().ok()).collect();
    kept.sort_unstable();
    let mut from = 3;
    for file in kept.into_iter().chain([u32::MAX]) {
        if from < file {
            let (first, last) = (c_ulong::from(from), c_ulong::from(file - 1));
            // SAFETY: the caller guarantees that the closed descriptors are not used again.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
        from = file.saturating_add(1);
    }
}

/// Resets signals to what a new program expects: none blocked, none ignored.
pub(crate) fn default_signals() {
    // SAFETY: an empty set is a valid mask, SIG_DFL is valid for every signal, and refusals
    // (SIGKILL) are harmless.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

/// Joins a new session keyring, so that children do not possess the keys of this process's parent.
pub(crate) fn fresh_keyring() {
    const JOIN_SESSION_KEYRING: c_long = 1;
    // SAFETY: a null name requests a new anonymous keyring. A kernel without keyrings returns an
    // error, and then there are no keys to leave behind.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, ptr::null::<libc::c_char>()) };
}

/// Gives this process the idle I/O priority, where the disk's scheduler supports it.
pub(crate) fn idle_disk_priority() {
    const WHO_PROCESS: c_int = 1;
    const CLASS_IDLE: c_int = 3 << 13;
    // SAFETY: this call takes integers only.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE) };
}

/// Exit status of a process that is not a child, where the kernel still has it (6.15 and later).
pub(crate) fn exit_status_of(pidfd: impl AsFd) -> Option<i32> {
    #[repr(C)]
    #[derive(Default)]
    struct Info {
        mask: u64,
        cgroup: u64,
        numbers: [u32; 11],
        exit_code: i32,
        more: [u64; 8],
    }
    const EXIT: u64 = 1 << 3;
    let mut info = Info { mask: EXIT, ..Info::default() };
    // _IOWR(0xFF, 11, struct of this size).
    let request = (3 << 30) | ((size_of::<Info>() as c_ulong) << 16) | (0xff << 8) | 11;
    // SAFETY: the kernel writes at most the size encoded in the request, which is that of `info`.
    let result = unsafe { libc::ioctl(pidfd.as_fd().as_raw_fd(), request, &raw mut info) };
    (result == 0 && info.mask & EXIT != 0).then_some(info.exit_code)
}
