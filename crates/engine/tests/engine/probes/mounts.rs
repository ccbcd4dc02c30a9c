//! The mount table cannot be changed from inside, and no other root can be entered.

use super::*;

const NONE: *const libc::c_void = std::ptr::null();

pub(super) const PROBES: &[Probe] = &[
    probe("mount", libc::EPERM, ADMIN, || mount(c"none", c"/tmp", c"tmpfs", 0)),
    probe("mount_cgroups", libc::EPERM, ADMIN, || mount(c"none", c"/tmp", c"cgroup2", 0)),
    probe("remount", libc::EPERM, ADMIN, || {
        mount(c"", c"/etc/hosts", c"", libc::MS_REMOUNT | libc::MS_BIND)
    }),
    probe("bind", libc::EPERM, ADMIN, || mount(c"/proc", c"/tmp", c"", libc::MS_BIND)),
    probe("mount_setattr", libc::EPERM, ADMIN, || {
        let attributes = libc::mount_attr {
            attr_set: 0,
            attr_clr: libc::MOUNT_ATTR_RDONLY,
            propagation: 0,
            userns_fd: 0,
        };
        let size = size_of::<libc::mount_attr>();
        let (at, path) = (libc::AT_FDCWD, c"/etc/hosts".as_ptr());
        // SAFETY: the path and the structure outlive the call.
        check(unsafe {
            libc::syscall(libc::SYS_mount_setattr, at, path, 0, &raw const attributes, size)
        })
    }),
    probe("fsopen", libc::EPERM, ADMIN, || {
        // SAFETY: the name outlives the call.
        check(unsafe { libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0) })
    }),
    probe("open_tree", libc::EPERM, ADMIN, || {
        // SAFETY: the path outlives the call; flag 1 requests a clone.
        check(unsafe { libc::syscall(libc::SYS_open_tree, libc::AT_FDCWD, c"/".as_ptr(), 1) })
    }),
    probe("move_mount", libc::EPERM, ADMIN, || {
        let (empty, onto) = (c"".as_ptr(), c"/tmp".as_ptr());
        // SAFETY: the paths outlive the call; flag 4 allows the empty one, and no descriptor has
        // this number.
        let moved =
            unsafe { libc::syscall(libc::SYS_move_mount, 999, empty, libc::AT_FDCWD, onto, 4) };
        passes_guards(check(moved), libc::EBADF)
    }),
    probe("unmask", libc::EPERM, ADMIN, || {
        // SAFETY: the path outlives the call. The unmounted cover is the sandbox's own.
        check(unsafe { libc::umount2(c"/proc/interrupts".as_ptr(), libc::MNT_DETACH) }.into())
    }),
    probe("pivot_root", libc::EPERM, ADMIN, || {
        let folder = c"/root".as_ptr();
        // SAFETY: the path outlives the call. It is on the old root, which is checked last.
        passes_guards(
            check(unsafe { libc::syscall(libc::SYS_pivot_root, folder, folder) }),
            libc::EBUSY,
        )
    }),
    probe("chroot", libc::EPERM, &["seccomp", "capabilities"], || {
        // SAFETY: the path outlives the call.
        check(unsafe { libc::chroot(c"/tmp".as_ptr()) }.into())
    }),
    probe("enter_namespace", libc::EPERM, ADMIN, || {
        let own = fs::File::open("/proc/self/ns/uts")?;
        // SAFETY: the descriptor is open.
        check(unsafe { libc::setns(std::os::fd::AsRawFd::as_raw_fd(&own), 0) }.into())
    }),
];

fn mount(
    from: &std::ffi::CStr,
    onto: &std::ffi::CStr,
    kind: &std::ffi::CStr,
    flags: libc::c_ulong,
) -> io::Result<()> {
    // SAFETY: the texts outlive the call; no data is given.
    check(unsafe { libc::mount(from.as_ptr(), onto.as_ptr(), kind.as_ptr(), flags, NONE) }.into())
}

#[test]
fn mount_table_cannot_be_changed() {
    assert_blocked(PROBES, 1);
}
