//! The system calls that have no safe wrapper, each behind the smallest function that can be called
//! safely. Nothing here decides anything.

use std::{
    ffi::CString,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
    ptr,
};

use libc::{c_int, c_long, c_ulong};
use rustix::mount::{MoveMountFlags, OpenTreeFlags};

/// Which side of a clone we are on.
pub(crate) enum Side {
    /// The new process.
    Child,
    /// The old one, with the new one's pid and a descriptor for it.
    Parent { pid: u32, pidfd: OwnedFd },
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

// Does not fit the type the libc crate gives it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Splits the process in two, the new one in the namespaces `flags` name and, on cgroup v2, in `group`.
///
/// # Safety
/// The caller must have one thread only: locks that another thread holds (the allocator's, say)
/// would stay locked in the child for ever.
pub(crate) unsafe fn clone_process(flags: u64, group: Option<BorrowedFd<'_>>) -> io::Result<Side> {
    let mut pidfd: RawFd = -1;
    // SAFETY: the structure is plain numbers, for all of which zero means "not asked for".
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = flags | libc::CLONE_PIDFD as u64;
    arguments.pidfd = ptr::from_mut(&mut pidfd) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = group.as_raw_fd() as u64;
    }
    let size = size_of::<libc::clone_args>();
    // SAFETY: no stack is given, so the child goes on with a copy of ours as after fork; the kernel
    // writes the descriptor into `pidfd`, which lives until we have read it.
    let pid =
        check(unsafe { libc::syscall(libc::SYS_clone3, ptr::from_mut(&mut arguments), size) })?;
    if pid == 0 {
        return Ok(Side::Child);
    }
    // SAFETY: the kernel has just opened it for us and nobody else knows it.
    let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
    Ok(Side::Parent { pid: u32::try_from(pid).unwrap_or(0), pidfd })
}

/// Ends the process at once: no destructors, nothing flushed twice.
pub(crate) fn exit_now(code: i32) -> ! {
    // SAFETY: ends the process; nothing runs afterwards.
    unsafe { libc::_exit(code) }
}

/// Sets attributes of a mount, and the ids it shows when `ids` is a user namespace.
pub(crate) fn mount_attributes(
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
    let (empty, size) = (c"", size_of::<libc::mount_attr>());
    // SAFETY: the path and the structure outlive the call and the size is theirs.
    check(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount,
            empty.as_ptr(),
            libc::AT_EMPTY_PATH,
            ptr::from_mut(&mut attributes),
            size,
        )
    })
    .map(drop)
}

/// A detached clone of what lies at `path` under `folder`, without what is mounted below it.
pub(crate) fn tree(folder: impl AsFd, path: &Path, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if path.as_os_str().is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(rustix::mount::open_tree(folder, path, flags)?)
}

/// Attaches a detached mount on the open file or folder `target`.
pub(crate) fn attach(mount: impl AsFd, target: impl AsFd) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(rustix::mount::move_mount(mount, c"", target, c"", flags)?)
}

/// The ids new files get and permissions are checked with.
pub(crate) fn set_file_ids(uid: u32, gid: u32) {
    // SAFETY: these calls take numbers only; they cannot fail for a process with all capabilities,
    // and a failure shows at once, when the overlay turns out to be read-only.
    unsafe {
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsgid, gid);
    }
}

/// The name the machine inside sees.
pub(crate) fn set_host_name(name: &str) -> io::Result<()> {
    // SAFETY: the pointer and the length are of the same text.
    check(unsafe { libc::sethostname(name.as_ptr().cast(), name.len()) }.into()).map(drop)
}

/// Reads an option of the IP protocol; `value` says on the way in what is asked for.
pub(crate) fn ip_option(socket: impl AsFd, option: c_int, value: &mut [u8]) -> io::Result<()> {
    let mut size =
        libc::socklen_t::try_from(value.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let socket = socket.as_fd().as_raw_fd();
    // SAFETY: the kernel writes at most `size` bytes, which `value` has.
    check(
        unsafe {
            libc::getsockopt(
                socket,
                libc::IPPROTO_IP,
                option,
                value.as_mut_ptr().cast(),
                &raw mut size,
            )
        }
        .into(),
    )
    .map(drop)
}

/// Replaces a table of packet rules; the counters of the old one's entries come back in `counters`.
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
    // SAFETY: the kernel reads `size` bytes of `bytes`, and writes two numbers for each of `count` entries
    // to `counters`, whose address and length the bytes hold.
    check(
        unsafe { libc::setsockopt(socket, libc::IPPROTO_IP, option, bytes.as_ptr().cast(), size) }
            .into(),
    )
    .map(drop)
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

/// Puts the calling thread and everything it starts under a seccomp program, for good.
pub(crate) fn seccomp(program: &[Instruction]) -> io::Result<()> {
    let filter = libc::sock_fprog {
        len: u16::try_from(program.len())
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?,
        filter: program.as_ptr().cast_mut().cast(),
    };
    // SAFETY: `Instruction` has the layout of `sock_filter`; the kernel copies the program and
    // checks it before it takes effect.
    check(unsafe {
        libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const filter)
    })
    .map(drop)
}

/// Becomes the program in `file`. Returns only when that failed.
pub(crate) fn execute(file: impl AsFd, arguments: &[CString]) -> io::Error {
    let mut argv: Vec<*const libc::c_char> =
        arguments.iter().map(|argument| argument.as_ptr()).collect();
    argv.push(ptr::null());
    let env: [*const libc::c_char; 1] = [ptr::null()];
    let file = file.as_fd().as_raw_fd();
    // SAFETY: both vectors end with a null pointer and live until the call returns, if it does.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file,
            c"".as_ptr(),
            argv.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    io::Error::last_os_error()
}

/// Makes `from` also be known as the standard stream `number` (0, 1 or 2), kept open across exec.
pub(crate) fn standard_stream(from: impl AsFd, number: c_int) -> io::Result<()> {
    // SAFETY: replaces one of the three standard streams, which no owner in this process closes.
    check(unsafe { libc::dup2(from.as_fd().as_raw_fd(), number) }.into()).map(drop)
}

/// Closes every descriptor above the standard streams but these.
///
/// # Safety
/// Nothing that owns one of the others may be used or dropped afterwards.
pub(crate) unsafe fn close_all_but(kept: &[BorrowedFd<'_>]) {
    let mut kept: Vec<u32> =
        kept.iter().filter_map(|file| file.as_raw_fd().try_into().ok()).collect();
    kept.sort_unstable();
    let mut from = 3;
    for file in kept.into_iter().chain([u32::MAX]) {
        if from < file {
            // SAFETY: the caller vouches that nobody uses what is closed.
            unsafe {
                libc::syscall(
                    libc::SYS_close_range,
                    c_ulong::from(from),
                    c_ulong::from(file - 1),
                    0,
                )
            };
        }
        from = file.saturating_add(1);
    }
}

/// Signals as a fresh program expects them: none blocked, none ignored.
pub(crate) fn default_signals() {
    // SAFETY: an empty set is a valid mask, SIG_DFL is valid for every signal, and refusals (SIGKILL)
    // do no harm.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
    }
}

/// A session keyring of our own, so that nothing we start possesses the keys of who started us.
pub(crate) fn fresh_keyring() {
    const JOIN_SESSION_KEYRING: c_long = 1;
    // SAFETY: a null name asks for a new anonymous keyring. A kernel without keyrings says so, and
    // then there is nothing to leave behind.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, ptr::null::<libc::c_char>()) };
}

/// The disk serves this process when nobody else wants it, where its scheduler knows of such a thing.
pub(crate) fn idle_disk_priority() {
    const WHO_PROCESS: c_int = 1;
    const CLASS_IDLE: c_int = 3 << 13;
    // SAFETY: this call takes numbers only.
    unsafe { libc::syscall(libc::SYS_ioprio_set, WHO_PROCESS, 0, CLASS_IDLE) };
}

/// How a process that is not our child ended, where the kernel still knows (6.15 and later).
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
