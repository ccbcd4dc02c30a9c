//! Calls that act on the whole host or expose more of the kernel than programs need. All get
//! invalid arguments, so that a call that passes the guards does nothing.

use std::os::fd::AsRawFd;

use super::*;

const NULL: *const libc::c_void = std::ptr::null();

pub(super) const PROBES: &[Probe] = &[
    probe("init_module", libc::EPERM, ADMIN, || {
        passes_guards(
            call(libc::SYS_init_module, [address(&mut [0u8; 64]), 64, text(c"")]),
            libc::ENOEXEC,
        )
    }),
    probe("finit_module", libc::EPERM, ADMIN, || {
        let file = fs::File::open("/etc/hosts")?;
        let number = i64::from(file.as_raw_fd());
        passes_guards(call(libc::SYS_finit_module, [number, text(c""), 0]), libc::ENOEXEC)
    }),
    probe("delete_module", libc::EPERM, ADMIN, || {
        passes_guards(call(libc::SYS_delete_module, [text(c"harvest_none"), 0, 0]), libc::ENOENT)
    }),
    // With invalid flags.
    probe("kexec", libc::EPERM, ADMIN, || {
        // SAFETY: no segments are given.
        passes_guards(
            check(unsafe { libc::syscall(libc::SYS_kexec_load, 0, 0, NULL, 0xffff_ffffu64) }),
            libc::EINVAL,
        )
    }),
    // Without the magic numbers.
    probe("reboot", libc::EPERM, ADMIN, || {
        passes_guards(call(libc::SYS_reboot, [1, 2, 3]), libc::EINVAL)
    }),
    probe("swapon", libc::EPERM, ADMIN, || {
        passes_guards(call(libc::SYS_swapon, [text(c"/harvest-none"), 0, 0]), libc::ENOENT)
    }),
    probe("acct", libc::EPERM, ADMIN, || {
        passes_guards(call(libc::SYS_acct, [text(c"/harvest-none"), 0, 0]), libc::ENOENT)
    }),
    probe("quotactl", libc::EPERM, SECCOMP, || {
        passes_guards(
            call(libc::SYS_quotactl, [0x80_0004 << 8, text(c"/harvest-none"), 0]),
            libc::ENOENT,
        )
    }),
    // The number of unread bytes in the log.
    probe("syslog", libc::EPERM, ADMIN, || call(libc::SYS_syslog, [9, 0, 0])),
    // An invalid tick.
    probe("clock", libc::EPERM, ADMIN, || {
        // SAFETY: the structure consists of integers and outlives the call.
        let mut wanted: libc::timex = unsafe { std::mem::zeroed() };
        wanted.modes = libc::ADJ_TICK;
        // SAFETY: as above.
        passes_guards(
            check(unsafe { libc::syscall(libc::SYS_adjtimex, &raw mut wanted) }),
            libc::EINVAL,
        )
    }),
    probe("host_name", libc::EPERM, ADMIN, || call(libc::SYS_sethostname, [text(c"probe"), 5, 0])),
    probe("io_ports", libc::EPERM, ADMIN, || call(libc::SYS_ioperm, [0x80, 1, 1])),
    // A map with one entry.
    configurable("bpf", || call(libc::SYS_bpf, [0, address(&mut [2u32, 4, 4, 1, 0, 0, 0, 0]), 32])),
    configurable("perf", perf),
    configurable("userfaultfd", || call(libc::SYS_userfaultfd, [1, 0, 0])),
    probe("io_uring", libc::ENOSYS, SECCOMP, || {
        call(libc::SYS_io_uring_setup, [1, address(&mut [0u32; 30]), 0])
    }),
    // Limited for the whole host together.
    probe("aio", libc::ENOSYS, SECCOMP, || {
        call(libc::SYS_io_setup, [1, address(&mut [0u64; 1]), 0])
    }),
    // More than the sandbox's memory.
    probe("shared_memory", libc::ENOSPC, &["shared_memory"], || {
        // SAFETY: integers only; the segment is removed at once.
        unsafe {
            let id = libc::shmget(libc::IPC_PRIVATE, 1 << 30, libc::IPC_CREAT | 0o600);
            check(id.into())?;
            check(libc::shmctl(id, libc::IPC_RMID, std::ptr::null_mut()).into())
        }
    }),
    // Asks for the id of the session keyring.
    probe("keyctl", libc::EPERM, SECCOMP, || call(libc::SYS_keyctl, [0, -3, 0])),
    probe("add_key", libc::EPERM, SECCOMP, || {
        let (kind, name, secret) = (c"user".as_ptr(), c"harvest".as_ptr(), c"x".as_ptr());
        // SAFETY: the texts outlive the call; the keyring of this process ends with it.
        check(unsafe { libc::syscall(libc::SYS_add_key, kind, name, secret, 1, -2) })
    }),
    probe("request_key", libc::EPERM, SECCOMP, || {
        let (kind, name) = (c"user".as_ptr(), c"harvest-none".as_ptr());
        // SAFETY: the texts outlive the call; without callout data no process is asked to create
        // the key.
        passes_guards(
            check(unsafe { libc::syscall(libc::SYS_request_key, kind, name, NULL, 0) }),
            libc::ENOKEY,
        )
    }),
    probe("file_by_handle", libc::EPERM, ADMIN, file_by_handle),
    // Reports by file id, which unprivileged users may request.
    configurable("fanotify", || call(libc::SYS_fanotify_init, [0x200, 0, 0])),
    probe("personality", libc::EPERM, SECCOMP, || call(libc::SYS_personality, [0x40_0000, 0, 0])),
    probe("modify_ldt", libc::EPERM, SECCOMP, || {
        call(libc::SYS_modify_ldt, [0, address(&mut [0u64; 8]), 64])
    }),
    probe("kcmp", libc::EPERM, SECCOMP, || {
        let own = i64::from(std::process::id());
        call(libc::SYS_kcmp, [own, own, 2])
    }),
    probe("ia32", libc::ENOSYS, SECCOMP, ia32),
    probe("device", libc::EPERM, ADMIN, || {
        let (path, mode) = (c"/dev/shm/harvest-probe".as_ptr(), libc::S_IFCHR | 0o600);
        // SAFETY: the path outlives both calls.
        unsafe {
            check(libc::mknod(path, mode, libc::makedev(1, 3)).into())?;
            check(libc::unlink(path).into())
        }
    }),
    configurable("terminal_input", terminal_input),
];

/// Allowed to all, to the administrator or to none, depending on the host's settings; refused
/// inside.
const fn configurable(name: &'static str, attempt: fn() -> io::Result<()>) -> Probe {
    Probe { name, refused: libc::EPERM, guards: SECCOMP, optional_guards: FOREIGN_PROCESS, attempt }
}

fn text(text: &'static std::ffi::CStr) -> i64 {
    text.as_ptr() as i64
}

fn address<T>(value: &mut [T]) -> i64 {
    value.as_mut_ptr() as i64
}

fn call(number: libc::c_long, arguments: [i64; 3]) -> io::Result<()> {
    let [first, second, third] = arguments;
    // SAFETY: addresses among the arguments stay valid until the end of the statement.
    check(unsafe { libc::syscall(number, first, second, third) })
}

/// Counts this process's CPU time.
fn perf() -> io::Result<()> {
    let mut attributes = [0u32; 32];
    // A software event with the structure's first size, excluding kernel and hypervisor.
    (attributes[0], attributes[1], attributes[10]) = (1, 64, 0b110_0000);
    // SAFETY: the structure outlives the call.
    check(unsafe { libc::syscall(libc::SYS_perf_event_open, attributes.as_ptr(), 0, -1, -1, 0) })
}

/// Opens a file of the host by its handle (the Shocker exploit).
fn file_by_handle() -> io::Result<()> {
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        data: [u8; 128],
    }
    let mut handle = Handle { bytes: 128, kind: 0, data: [0; 128] };
    let (mut mount, at) = (0i32, libc::AT_FDCWD);
    let path =
        std::ffi::CString::new(std::env::current_exe()?.into_os_string().into_encoded_bytes())?;
    let folder = fs::File::open("/probe").or_else(|_| fs::File::open("/"))?;
    // SAFETY: all arguments outlive the calls, and the handle contains its length.
    unsafe {
        let (handle, mount) = (&raw mut handle, &raw mut mount);
        check(libc::syscall(libc::SYS_name_to_handle_at, at, path.as_ptr(), handle, mount, 0))?;
        check(libc::syscall(
            libc::SYS_open_by_handle_at,
            folder.as_raw_fd(),
            handle,
            libc::O_RDONLY,
        ))
    }
}

/// Calls getpid through the 32-bit interface, which has other numbers.
fn ia32() -> io::Result<()> {
    let mut answer: i64 = 20;
    // SAFETY: getpid has no arguments and no effects; the clobbered registers are declared.
    unsafe {
        std::arch::asm!("int 0x80", inout("rax") answer, out("r8") _, out("r9") _, out("r10") _, out("r11") _);
    }
    #[expect(clippy::cast_possible_truncation, reason = "the 32-bit interface returns 32 bits")]
    let answer = answer as i32;
    if answer < 0 { Err(io::Error::from_raw_os_error(-answer)) } else { Ok(()) }
}

/// Injects a character into a terminal as if it had been typed.
fn terminal_input() -> io::Result<()> {
    let ours = fs::File::options().read(true).write(true).open("/dev/ptmx")?;
    in_child(|| {
        let (mut number, unlock) = (0i32, 0i32);
        // SAFETY: the arguments outlive the calls; the session and its terminal belong to this
        // child.
        unsafe {
            check(libc::setsid().into())?;
            check(libc::ioctl(ours.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlock).into())?;
            check(libc::ioctl(ours.as_raw_fd(), libc::TIOCGPTN, &raw mut number).into())?;
            let theirs =
                fs::File::options().read(true).write(true).open(format!("/dev/pts/{number}"))?;
            check(libc::ioctl(theirs.as_raw_fd(), libc::TIOCSCTTY, 0).into())?;
            check(libc::ioctl(theirs.as_raw_fd(), libc::TIOCSTI, c"x".as_ptr()).into())
        }
    })
}

#[test]
fn system_wide_calls_are_refused() {
    assert_blocked(PROBES, 1);
}
