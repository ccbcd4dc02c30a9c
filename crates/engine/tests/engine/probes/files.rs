//! Kernel files that reveal the host or act on it are covered, read-only or absent.

use std::os::{fd::AsRawFd, unix::fs::OpenOptionsExt};

use super::*;

const MASKED: &[&str] = &["mask"];
/// Covered, and readable only with a capability on the host.
const MASKED_PRIVILEGED: &[&str] = &["mask", "capabilities", "enter_user_namespace"];
/// Covered, and owned by the host's root.
const MASKED_ROOT: &[&str] = &["mask", "enter_user_namespace"];
const SETTINGS: &[&str] = &["read_only", "enter_user_namespace"];

pub(super) const PROBES: &[Probe] = &[
    // Opened but never written.
    probe("sysrq", libc::EROFS, MASKED_ROOT, || open_to_write("/proc/sysrq-trigger")),
    probe("masked_to_write", libc::EROFS, MASKED_ROOT, || open_to_write("/proc/interrupts")),
    probe("kcore", libc::ENODATA, MASKED_PRIVILEGED, || open_uncovered("/proc/kcore")),
    probe("kmsg", libc::ENODATA, MASKED_PRIVILEGED, || open_uncovered("/proc/kmsg")),
    probe("kallsyms", libc::ENODATA, MASKED, || open_uncovered("/proc/kallsyms")),
    probe("interrupts", libc::ENODATA, MASKED, || open_uncovered("/proc/interrupts")),
    probe("keys", libc::ENODATA, MASKED, || open_uncovered("/proc/keys")),
    probe("timer_list", libc::ENODATA, MASKED_ROOT, || open_uncovered("/proc/timer_list")),
    probe("core_pattern", libc::EACCES, SETTINGS, || {
        open_to_write("/proc/sys/kernel/core_pattern")
    }),
    probe("modprobe", libc::EACCES, SETTINGS, || open_to_write("/proc/sys/kernel/modprobe")),
    probe("host_name_setting", libc::EACCES, SETTINGS, || {
        open_to_write("/proc/sys/kernel/hostname")
    }),
    probe("forwarding", libc::EACCES, SETTINGS, || open_to_write("/proc/sys/net/ipv4/ip_forward")),
    probe("irq_affinity", libc::EACCES, SETTINGS, || {
        open_to_write("/proc/irq/default_smp_affinity")
    }),
];

fn open_to_write(path: &str) -> io::Result<()> {
    fs::OpenOptions::new().write(true).open(path).map(drop)
}

/// Opens a file of `/proc`; fails if another file system covers it.
fn open_uncovered(path: &str) -> io::Result<()> {
    let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    // SAFETY: the structure consists of integers and outlives the call, and so does the descriptor.
    let kind = unsafe {
        let mut about: libc::statfs = std::mem::zeroed();
        check(libc::fstatfs(file.as_raw_fd(), &raw mut about).into())?;
        about.f_type
    };
    if kind == libc::PROC_SUPER_MAGIC {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::ENODATA))
    }
}

#[test]
fn host_information_in_proc_is_hidden() {
    assert_blocked(PROBES, 1);
}

#[test]
fn host_devices_and_sys_are_absent() {
    let world = World::new();
    // A harmless device node that an image could contain.
    let node = world.folder.path().join("cache/layers/base/node");
    let made =
        HostCommand::new("mknod").args([node.as_os_str(), "c".as_ref()]).args(["1", "3"]).status();
    assert!(made.unwrap().success());
    assert!(fs::read(&node).is_ok(), "the node works on the host");
    let running = world.start();
    assert!(shell(&running, "cat /node").err.contains("Permission denied"));
    for path in
        ["/dev/kmsg", "/dev/mem", "/dev/fuse", "/dev/kvm", "/dev/loop-control", "/sys/kernel"]
    {
        assert_eq!(shell(&running, &format!("ls {path}")).out, "", "{path}");
    }
    assert!(
        Path::new("/dev/kmsg").exists() && Path::new("/sys/kernel").exists(),
        "the host has them"
    );
    let own = "fd full null ptmx pts random shm stderr stdin stdout tty urandom zero";
    assert_eq!(
        shell(&running, "ls /dev").out.split_whitespace().collect::<Vec<_>>().join(" "),
        own
    );
}
