//! Checks of the kernel: its version, calls, namespaces and limits.

use std::{fs, io, os::fd::OwnedFd, path::Path};

use rustix::{
    fs::{CWD, Mode, OFlags, ResolveFlags, openat2},
    io::Errno,
    mount::{OpenTreeFlags, open_tree},
    process::{PidfdFlags, getpid, pidfd_open},
    thread::UnshareFlags,
};

use super::{Finding, Level, bad, fail, ok, stack, warn};
use crate::{
    child_probe::{Outcome, in_child},
    host_tables::HostTables,
    isolate::seccomp,
    rootless, syscall,
};

// Sixteen sandboxes with 4,096 processes each use half of them.
const MIN_PIDS: u64 = 131_072;
const MIN_KERNEL: (u32, u32) = (6, 1);
// An unprivileged user that runs nothing else.
const NOBODY: u32 = 65_534;
const NAMESPACES: [(&str, i32); 7] = [
    ("user", libc::CLONE_NEWUSER),
    ("mount", libc::CLONE_NEWNS),
    ("pid", libc::CLONE_NEWPID),
    ("net", libc::CLONE_NEWNET),
    ("ipc", libc::CLONE_NEWIPC),
    ("uts", libc::CLONE_NEWUTS),
    ("cgroup", libc::CLONE_NEWCGROUP),
];

/// The user that runs the checks, and what a refusal means for them.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProbeUser {
    pub(super) uid: u32,
    pub(super) gid: u32,
}

impl ProbeUser {
    /// True also for root of a user namespace.
    pub(super) fn is_root(self) -> bool {
        self.uid == 0
    }

    pub(super) fn is_host_root(self) -> bool {
        self.is_root() && !rootless::is_active()
    }

    /// The namespaces of a check; without root it needs a user namespace to control them.
    pub(super) fn flags(self, kinds: i32) -> u64 {
        let own = if self.is_root() { 0 } else { libc::CLONE_NEWUSER };
        u64::from((kinds | own).cast_unsigned())
    }

    /// In the child process of a check: becomes root of its user namespace, if it has one.
    pub(super) fn become_root(self) -> io::Result<()> {
        if self.is_root() {
            return Ok(());
        }
        fs::write("/proc/self/setgroups", "deny")?;
        fs::write("/proc/self/uid_map", format!("0 {} 1", self.uid))?;
        fs::write("/proc/self/gid_map", format!("0 {} 1", self.gid))
    }

    /// Severity of a refusal that only affects root.
    pub(super) fn refusal_level(self) -> Level {
        if self.is_host_root() { Level::Fail } else { Level::Warn }
    }
}

/// Runs all checks. The process must be single-threaded.
pub(super) fn findings(home: &Path) -> Vec<Finding> {
    let user = ProbeUser {
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
    };
    let mut findings = vec![
        privileges(user),
        kernel(&read("/proc/sys/kernel/osrelease").unwrap_or_default()),
        calls(),
        namespaces(user),
        namespace_limit(read("/proc/sys/user/max_user_namespaces").as_deref()),
        unprivileged(user),
        lsm(),
        seccomp_list(),
        tracing(
            read("/proc/sys/kernel/yama/ptrace_scope").as_deref(),
            read("/proc/sys/fs/suid_dumpable").as_deref(),
        ),
        loop_devices(),
        inotify(),
        host_tables(HostTables::read()),
    ];
    findings.extend(stack::findings(home, user));
    findings
}

fn read(path: impl AsRef<Path>) -> Option<String> {
    fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

fn privileges(user: ProbeUser) -> Finding {
    if user.is_host_root() {
        return ok("privileges", "root");
    }
    let found = "not root: sandboxes share one id range, root inside is your user outside, limits only where delegated";
    warn("privileges", found, "run as root for one id range per sandbox")
}

fn kernel(release: &str) -> Finding {
    let mut numbers =
        release.split(|byte: char| !byte.is_ascii_digit()).map_while(|word| word.parse().ok());
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version >= MIN_KERNEL {
        return ok("kernel", format!("Linux {release}"));
    }
    let fix = "use kernel 6.1 or later (for example Debian 12, Ubuntu 24.04)";
    fail("kernel", format!("Linux {release} is older than 6.1"), fix)
}

fn calls() -> Finding {
    let result = |opened: rustix::io::Result<OwnedFd>| opened.map(drop).map_err(io::Error::from);
    let (path, none) = (OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty());
    let set_attributes = fs::File::open("/").and_then(|root| {
        // Sets nothing: only a kernel without the call refuses.
        match syscall::set_mount_attributes(root, 0, None) {
            Err(error) if error.raw_os_error() == Some(libc::ENOSYS) => Err(error),
            _ => Ok(()),
        }
    });
    let tried: [(&str, io::Result<()>); 4] = [
        ("pidfd_open", result(pidfd_open(getpid(), PidfdFlags::empty()))),
        ("openat2", result(openat2(CWD, ".", path, Mode::empty(), none))),
        ("open_tree", result(open_tree(CWD, "/", OpenTreeFlags::OPEN_TREE_CLOEXEC))),
        ("mount_setattr", set_attributes),
    ];
    let missing: Vec<String> = tried
        .iter()
        .filter_map(|(name, result)| result.as_ref().err().map(|error| format!("{name} ({error})")))
        .collect();
    if missing.is_empty() {
        return ok("kernel_calls", "clone3, pidfds, openat2, the new mount calls");
    }
    let fix = "inside a container: allow these calls in its seccomp profile, or run it privileged";
    fail("kernel_calls", format!("refused: {}", missing.join(", ")), fix)
}

fn namespaces(user: ProbeUser) -> Finding {
    let refused: Vec<String> = NAMESPACES
        .iter()
        .filter_map(|(name, flag)| {
            // SAFETY: the probing process has one thread.
            let outcome = unsafe { in_child(user.flags(*flag), || Ok(String::new())) };
            outcome.err().map(|reason| format!("{name} ({reason})"))
        })
        .collect();
    if refused.is_empty() {
        let names = NAMESPACES.map(|(name, _)| name).join(", ");
        return ok("namespaces", names);
    }
    let fix =
        "raise the limits under /proc/sys/user, or run outside the container that forbids them";
    fail("namespaces", format!("refused: {}", refused.join(", ")), fix)
}

fn namespace_limit(limit: Option<&str>) -> Finding {
    let id = "user_namespace_limit";
    let fix = "sysctl user.max_user_namespaces=15000";
    match limit.map(str::parse::<u64>) {
        Some(Ok(0)) => fail(id, "user.max_user_namespaces is 0", fix),
        // One per sandbox.
        Some(Ok(limit @ ..512)) => warn(id, format!("only {limit}"), fix),
        Some(Ok(limit)) => ok(id, limit.to_string()),
        _ => fail(id, "this kernel has no user namespaces", "use a kernel with them"),
    }
}

/// Whether an unprivileged user gets a user namespace with capabilities in it.
fn unprivileged(user: ProbeUser) -> Finding {
    let id = "unprivileged_user_namespaces";
    let act = || -> Outcome {
        let become_nobody = || -> rustix::io::Result<()> {
            let (uid, gid) =
                (rustix::process::Uid::from_raw(NOBODY), rustix::process::Gid::from_raw(NOBODY));
            rustix::thread::set_thread_groups(&[])?;
            rustix::thread::set_thread_res_gid(Some(gid), Some(gid), Some(gid))?;
            rustix::thread::set_thread_res_uid(Some(uid), Some(uid), Some(uid))
        };
        if user.is_host_root() {
            become_nobody().map_err(|error| error.to_string())?;
        }
        // SAFETY: this process has one thread and ends right afterwards.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER | UnshareFlags::NEWUTS) }
            .map_err(|error| error.to_string())?;
        // AppArmor may allow the namespace but no capabilities in it.
        syscall::set_host_name("probe")
            .map_err(|error| format!("no capabilities in it: {error}"))?;
        Ok(String::new())
    };
    // SAFETY: the probing process has one thread.
    match unsafe { in_child(0, act) } {
        Ok(_) => ok(id, "allowed: Harvest can run without root"),
        Err(reason) => {
            let level = if user.is_host_root() { Level::Warn } else { Level::Fail };
            let found = format!("refused ({reason}): Harvest cannot run without root");
            bad(id, level, found, userns_fix())
        }
    }
}

fn userns_fix() -> &'static str {
    let says = |path: &str, value: &str| read(path).as_deref() == Some(value);
    if says("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or an AppArmor profile with `userns,`"
    } else if says("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        "sysctl kernel.unprivileged_userns_clone=1"
    } else {
        "run as root, or allow user namespaces for this user"
    }
}

fn lsm() -> Finding {
    let active = read("/sys/kernel/security/lsm").filter(|text| !text.is_empty());
    let found = active.unwrap_or_else(|| "unknown: securityfs is not mounted".to_owned());
    if read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") {
        let found = format!("{found}; AppArmor restricts user namespaces of unprivileged users");
        return warn("lsm", found, userns_fix());
    }
    ok("lsm", found)
}

fn seccomp_list() -> Finding {
    let program = seccomp::program();
    let act = || -> Outcome {
        let text = |error: io::Error| error.to_string();
        rustix::thread::set_no_new_privs(true).map_err(|error| error.to_string())?;
        syscall::seccomp(program).map_err(text)?;
        // SAFETY: this process has one thread and ends right afterwards.
        match unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER) } {
            Err(Errno::PERM) => {
                Ok(format!("a filter of {} instructions loads and refuses", program.len()))
            }
            other => Err(format!("the filter loads but does not refuse ({other:?})")),
        }
    };
    // SAFETY: the probing process has one thread.
    match unsafe { in_child(0, act) } {
        Ok(found) => ok("seccomp", found),
        Err(reason) => fail("seccomp", reason, "use a kernel with CONFIG_SECCOMP_FILTER"),
    }
}

/// Whether debuggers work inside and agents are out of their reach, by settings of the host: that
/// of the Yama security module, and whether processes whose ids changed are dumpable.
fn tracing(yama: Option<&str>, suid_dumpable: Option<&str>) -> Finding {
    let id = "tracing";
    if suid_dumpable == Some("1") {
        let found = "fs.suid_dumpable is 1: the agent's tools can write in the agent's name";
        return warn(id, found, "sysctl fs.suid_dumpable=0");
    }
    match yama {
        None | Some("0") => ok(id, "debuggers reach all processes of their user in a sandbox"),
        Some("1") => ok(id, "debuggers reach only programs they start (Yama), not `gdb -p`"),
        Some(scope) => {
            let found = format!("kernel.yama.ptrace_scope is {scope}: no debugger works inside");
            warn(id, found, "sysctl kernel.yama.ptrace_scope=1")
        }
    }
}

fn loop_devices() -> Finding {
    let path = "/dev/loop-control";
    match fs::OpenOptions::new().read(true).write(true).open(path) {
        Ok(_) => ok("loop_devices", "usable"),
        Err(error) => {
            let found = format!("{path}: {error}; volumes and writable layers have no size limits");
            warn("loop_devices", found, "modprobe loop; in a container pass /dev/loop* in")
        }
    }
}

fn inotify() -> Finding {
    let limit = |name: &str| {
        let number = |folder: &str| read(format!("/proc/sys/{folder}"))?.parse::<u64>().ok();
        number(&format!("fs/inotify/max_user_{name}")).unwrap_or(0)
    };
    let (instances, watches) = (limit("instances"), limit("watches"));
    let found = format!("{instances} instances, {watches} watches per user");
    // The kernel's oldest defaults; a file watcher or bundler uses thousands of watches.
    if instances >= 128 && watches >= 8192 {
        return ok("inotify", found);
    }
    let fix = "sysctl fs.inotify.max_user_instances=128 fs.inotify.max_user_watches=65536";
    warn("inotify", found, fix)
}

/// Tables that all sandboxes share with the host.
fn host_tables(tables: HostTables) -> Finding {
    let id = "host_tables";
    let found = format!("{} pids, {} open files", tables.pids, tables.files);
    if !tables.has_enough_files() {
        // What systemd sets at boot.
        let fix = "sysctl fs.file-max=9223372036854775807";
        return warn(id, format!("{found}: sandboxes could open all of them"), fix);
    }
    if tables.pids < MIN_PIDS {
        let fix = "sysctl kernel.pid_max=4194304 kernel.threads-max=1000000";
        return warn(id, format!("{found}: sandboxes get fewer than 4096 processes"), fix);
    }
    ok(id, found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_host_tables_are_a_warning() {
        let tables = HostTables::read();
        for (files, pids, level) in [
            (1 << 50, 1 << 22, Level::Ok),
            (1 << 20, 1 << 22, Level::Warn),
            (1 << 50, 32_768, Level::Warn),
        ] {
            let finding = host_tables(HostTables { files, pids, ..tables });
            assert_eq!(finding.level, level, "{finding:?}");
        }
    }

    #[test]
    fn kernel_version_is_compared_as_numbers() {
        for (release, level) in [
            ("6.1.0-18-cloud-amd64", Level::Ok),
            ("6.18.44-fc", Level::Ok),
            ("10.0", Level::Ok),
            ("5.15.0", Level::Fail),
            ("6.0.9", Level::Fail),
            ("", Level::Fail),
        ] {
            assert_eq!(kernel(release).level, level, "{release}");
        }
    }

    #[test]
    fn settings_that_affect_debuggers_are_reported() {
        for scope in [None, Some("0"), Some("1")] {
            assert_eq!(tracing(scope, Some("2")).level, Level::Ok, "{scope:?}");
            assert!(tracing(scope, Some("1")).fix.unwrap().contains("suid_dumpable=0"));
        }
        for scope in ["2", "3"] {
            assert!(tracing(Some(scope), None).fix.unwrap().contains("ptrace_scope=1"));
        }
    }

    #[test]
    fn missing_user_namespaces_come_with_a_fix() {
        assert_eq!(namespace_limit(Some("0")).level, Level::Fail);
        assert!(namespace_limit(Some("0")).fix.unwrap().contains("max_user_namespaces"));
        assert_eq!(namespace_limit(Some("95000")).level, Level::Ok);
        assert_eq!(namespace_limit(None).level, Level::Fail);
    }
}
