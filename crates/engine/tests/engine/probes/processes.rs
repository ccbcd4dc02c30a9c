//! Probes against other processes: pid 1, which holds the bridge and the door, and those of the
//! host.

use std::os::unix::fs::OpenOptionsExt;

use super::*;

pub(super) const PROBES: &[Probe] = &[
    probe("trace", libc::EPERM, FOREIGN_PROCESS, || debuggers::seize(1)),
    probe("trace_launcher", libc::EPERM, FOREIGN_PROCESS, || {
        // SAFETY: takes no arguments.
        debuggers::seize(unsafe { libc::getppid() })
    }),
    probe("read_memory", libc::EPERM, FOREIGN_PROCESS, || {
        passes_guards(debuggers::read_memory(1, std::ptr::null()).map(drop), libc::EFAULT)
    }),
    probe("limit_pid_1", libc::EPERM, &["capabilities"], || limit_cpu_time(1)),
    probe("limit_launcher", libc::EPERM, &["capabilities"], || {
        // SAFETY: takes no arguments.
        limit_cpu_time(unsafe { libc::getppid() })
    }),
    probe("take_descriptor", libc::EPERM, ADMIN, || {
        // SAFETY: integers only.
        unsafe {
            let process = libc::syscall(libc::SYS_pidfd_open, 1, 0);
            check(process)?;
            check(libc::syscall(libc::SYS_pidfd_getfd, process, 0, 0))
        }
    }),
    probe("proc_root", libc::EACCES, FOREIGN_PROCESS, || fs::read_link("/proc/1/root").map(drop)),
    probe("proc_cwd", libc::EACCES, FOREIGN_PROCESS, || fs::read_link("/proc/1/cwd").map(drop)),
    probe("proc_namespace", libc::EACCES, FOREIGN_PROCESS, || {
        fs::read_link("/proc/1/ns/net").map(drop)
    }),
    probe("proc_fd", libc::EACCES, FOREIGN_PROCESS, || match fs::read_dir("/proc/1/fd")?.next() {
        Some(first) => fs::read_link(first?.path()).map(drop),
        None => Err(io::ErrorKind::NotFound.into()),
    }),
    probe("proc_mem", libc::EACCES, FOREIGN_PROCESS, || fs::File::open("/proc/1/mem").map(drop)),
    probe("proc_maps", libc::EACCES, FOREIGN_PROCESS, || fs::File::open("/proc/1/maps").map(drop)),
    probe("proc_environ", libc::EACCES, FOREIGN_PROCESS, || {
        fs::File::open("/proc/1/environ").map(drop)
    }),
    // As in CVE-2019-5736, where a container overwrote runc.
    probe("supervisor_program", libc::EACCES, FOREIGN_PROCESS, || {
        let opened =
            fs::OpenOptions::new().write(true).custom_flags(libc::O_NONBLOCK).open("/proc/1/exe");
        passes_guards(opened.map(drop), libc::ETXTBSY)
    }),
    probe("oom_score_of_pid_1", libc::EACCES, &["enter_user_namespace"], || {
        fs::OpenOptions::new().write(true).open("/proc/1/oom_score_adj").map(drop)
    }),
    probe("signal_the_host", libc::ESRCH, &["pid_namespace", "enter_user_namespace"], || {
        // SAFETY: signal 0 only checks for existence.
        check(unsafe { libc::kill(target(), 0) }.into())
    }),
    probe("user_namespace", libc::EPERM, SECCOMP, || {
        // SAFETY: integers only.
        in_child(|| check(unsafe { libc::unshare(libc::CLONE_NEWUSER) }.into()))
    }),
    probe("user_namespace_by_clone", libc::EPERM, SECCOMP, || {
        // SAFETY: without a stack the child continues as after fork, and exits.
        unsafe {
            let child =
                libc::syscall(libc::SYS_clone, libc::CLONE_NEWUSER | libc::SIGCHLD, 0, 0, 0, 0);
            if child == 0 {
                libc::_exit(0);
            }
            check(child)
        }
    }),
    probe("user_namespace_by_clone3", libc::ENOSYS, SECCOMP, || {
        // SAFETY: the structure consists of integers and outlives the call; without a stack the
        // child continues as after fork, and exits.
        unsafe {
            let mut arguments: libc::clone_args = std::mem::zeroed();
            arguments.flags = u64::from(libc::CLONE_NEWUSER.cast_unsigned());
            let size = size_of::<libc::clone_args>();
            let child = libc::syscall(libc::SYS_clone3, &raw mut arguments, size);
            if child == 0 {
                libc::_exit(0);
            }
            check(child)
        }
    }),
];

/// Sets a limit of another process that is no limit.
fn limit_cpu_time(process: i32) -> io::Result<()> {
    let none = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    let before = std::ptr::null_mut();
    // SAFETY: the limit outlives the call, and the limit before it is not wanted.
    check(unsafe { libc::prlimit(process, libc::RLIMIT_CPU, &raw const none, before) }.into())
}

#[test]
fn pid_1_and_host_processes_are_unreachable() {
    let unrelated = Sleeper::new();
    assert_blocked(PROBES, unrelated.0.id());
}

#[test]
fn pid_1_survives_signals_from_inside() {
    let world = World::new();
    let running = world.start();
    // Root inside may ask pid 1 to end with SIGTERM; no process inside can force it.
    for signal in ["KILL", "STOP", "SEGV", "INT", "HUP", "USR1", "ABRT"] {
        shell(&running, &format!("kill -{signal} 1"));
    }
    let agent = Command { user: Some("10001".to_owned()), ..command(&["kill", "-TERM", "1"]) };
    assert_ne!(exec(&running, agent).exit, Exit::Code(0));
    assert_eq!(shell(&running, "echo on").out, "on");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
    let mut other = Sleeper::new();
    let killed = HostCommand::new("kill").args(["-SEGV", &other.0.id().to_string()]).status();
    assert!(
        killed.unwrap().success() && !other.0.wait().unwrap().success(),
        "an ordinary process dies of it"
    );
}

#[test]
fn command_inherits_only_standard_streams() {
    let world = World::new();
    let running = world.start();
    for user in ["root", "10001"] {
        let list = |script: &str| {
            let listing = Command { user: Some(user.to_owned()), ..command(&["sh", "-c", script]) };
            let output = exec(&running, listing);
            output
                .out
                .split_whitespace()
                .map(|word| word.parse::<u32>().unwrap())
                .collect::<Vec<_>>()
        };
        // The fourth descriptor is the folder being listed.
        assert_eq!(list("exec ls /proc/self/fd"), [0, 1, 2, 3], "{user}");
        assert_eq!(
            list("exec 7</dev/null; exec ls /proc/self/fd"),
            [0, 1, 2, 3, 7],
            "one more is seen"
        );
    }
}

/// A line of `/proc/self/status` of a program whose file `set` has made privileged, started by an
/// unprivileged user: inside, from the image, and on the host.
fn status_of_privileged_program(set: impl Fn(&Path), guards: &[&str], line: &str) -> [String; 2] {
    use std::os::unix::{fs::PermissionsExt, process::CommandExt};
    let world = World::without(guards);
    let outside = tempfile::tempdir().unwrap();
    let inside = world.folder.path().join("cache/layers/base/bin/privileged");
    fs::create_dir(&inside).unwrap();
    for folder in [outside.path(), &inside] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
        // Not busybox, which drops such privileges by itself.
        fs::copy("/bin/cat", folder.join("cat")).unwrap();
        set(&folder.join("cat"));
    }
    let running = world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
    let argv = ["/bin/privileged/cat", "/proc/self/status"];
    let output = exec(&running, Command { user: Some("10001".to_owned()), ..command(&argv) });
    let mut host = HostCommand::new(outside.path().join("cat"));
    let host = host.args(&argv[1..]).uid(10001).gid(10001).output().unwrap();
    // The second id is the effective one; capabilities are a single word.
    let word = if line == "Uid" { 2 } else { 1 };
    [output.out.clone(), String::from_utf8(host.stdout).unwrap()].map(|text| {
        let found = text
            .lines()
            .find(|text| text.starts_with(line))
            .unwrap_or_else(|| panic!("{output:?}"));
        found.split_whitespace().nth(word).unwrap().to_owned()
    })
}

#[test]
fn setuid_programs_gain_no_privileges() {
    use std::os::unix::fs::PermissionsExt;
    let set = |file: &Path| fs::set_permissions(file, fs::Permissions::from_mode(0o4755)).unwrap();
    // A second guard exists: mounts inside are nosuid.
    for guards in [&[][..], &["no_new_privileges", "seccomp"]] {
        assert_eq!(
            status_of_privileged_program(set, guards, "Uid"),
            ["10001", "0"],
            "inside and on the host"
        );
    }
}

#[test]
fn file_capabilities_gain_no_privileges() {
    // Version 2 of the attribute: effective, with CAP_CHOWN permitted.
    let mut value = [0u8; 20];
    (value[0], value[3], value[4]) = (1, 2, 1);
    let set = |file: &Path| {
        rustix::fs::setxattr(file, c"security.capability", &value, rustix::fs::XattrFlags::empty())
            .unwrap();
    };
    for guards in [&[][..], &["no_new_privileges", "seccomp"]] {
        let [inside, outside] = status_of_privileged_program(set, guards, "CapEff");
        assert_eq!((inside.as_str(), outside.as_str()), ("0000000000000000", "0000000000000001"));
    }
}

#[test]
fn agent_has_no_capabilities_root_only_the_listed() {
    let world = World::new();
    let running = world.start();
    let sets = |user: &str| {
        let argv = ["grep", "^Cap", "/proc/self/status"];
        let output = exec(&running, Command { user: Some(user.to_owned()), ..command(&argv) });
        output
            .out
            .lines()
            .map(|line| line.split_whitespace().nth(1).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let listed: u64 = harvest_engine::Capability::SANDBOX
        .iter()
        .map(|capability| 1 << (*capability as u32))
        .sum();
    let (none, listed) = (format!("{:016x}", 0), format!("{listed:016x}"));
    // Inheritable, permitted, effective, bounding, ambient.
    assert_eq!(sets("root"), [&none, &listed, &listed, &listed, &none].map(String::as_str));
    assert_eq!(sets("10001"), [&none, &none, &none, &listed, &none].map(String::as_str));
    let all = World::without(&["capabilities"]);
    let output = shell(&all.start(), "grep CapEff /proc/self/status");
    assert!(!output.out.ends_with(&listed), "without the guard there are more");
}

#[test]
fn core_dumps_do_not_reach_the_host() {
    let world = World::new();
    // A crash handler of the host runs even where the limit is 0.
    let limits = shell(&world.start(), "grep core /proc/self/limits").out;
    assert_eq!(limits.split_whitespace().skip(4).collect::<Vec<_>>(), ["1", "1", "bytes"]);
    let open = World::without(&["resource_limits"]);
    assert_ne!(shell(&open.start(), "grep core /proc/self/limits").out, limits);
}

#[test]
fn script_cannot_execute_the_supervisor() {
    let world = World::new();
    let running = world.start();
    // The kernel resolves this name in the launching process, which runs the supervisor's program.
    shell(&running, "printf '#!/proc/self/exe\\n' > /tmp/own; chmod 755 /tmp/own");
    let output = exec(&running, command(&["/tmp/own"]));
    assert_eq!(
        (output.exit, output.out.as_str()),
        (Exit::Code(2), ""),
        "the supervisor's program exits without a role"
    );
    assert_eq!(shell(&running, "echo on").out, "on");
}
