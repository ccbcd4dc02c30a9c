//! What a sandbox must be kept from, tried from inside, each with a run outside that shows that the
//! probe itself works. A probe is this very test program, run inside in another role.

use std::os::{linux::net::SocketAddrExt, unix::net::SocketAddr};

use super::*;

/// What a sandbox is to be kept from, one way each.
const PROBES: [(&str, i32); 18] = [
    ("mount", libc::EPERM),
    ("fsopen", libc::EPERM),
    ("user_namespace", libc::EPERM),
    ("ptrace", libc::EPERM),
    ("proc_root", libc::EACCES),
    ("proc_fd", libc::EACCES),
    ("proc_mem", libc::EACCES),
    ("sysctl", libc::EROFS),
    ("raw_socket", libc::EPERM),
    ("packet_socket", libc::EAFNOSUPPORT),
    ("keyctl", libc::EPERM),
    ("io_uring", libc::ENOSYS),
    ("bpf", libc::EPERM),
    ("device", libc::EPERM),
    ("terminals", libc::ENOSPC),
    ("kill_host", libc::ESRCH),
    ("outside", libc::ENETUNREACH),
    ("abstract_socket", libc::ECONNREFUSED),
];

#[test]
fn a_sandbox_reaches_nothing_of_the_host_and_each_probe_works_where_nothing_guards() {
    let world = World::new();
    let spec = Spec { binds: probe_binds(), ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    let bystander = Sleeper::new();
    let name = format!("harvest-test-{}", running.id.part());
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    for (probe, errno) in PROBES {
        let target = if probe == "kill_host" { bystander.0.id() } else { 1 };
        let mut command = probe_command(probe, target);
        command.env.insert("HARVEST_PROBE_SOCKET".to_owned(), name.clone());
        let inside = exec(&running, command);
        assert_eq!(result_of(&inside.out), Some(errno), "{probe} inside: {inside:?}");
        // No machine may be reached from a test: inside, a synthetic address shows that the probe works.
        if probe == "outside" {
            let within = exec(&running, probe_command("synthetic", 1));
            assert_ne!(result_of(&within.out), Some(errno), "{within:?}");
            continue;
        }
        let outside = HostCommand::new(std::env::current_exe().unwrap())
            .args(PROBE_ARGUMENTS)
            .envs(probe_command(probe, bystander.0.id()).env)
            .envs([("HARVEST_PROBE_CONTROL", "1"), ("HARVEST_PROBE_SOCKET", &name)])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&outside.stdout);
        assert_eq!(result_of(&said), Some(0), "{probe} outside: {outside:?}");
    }
}

#[test]
fn the_hosts_network_brings_the_hosts_abstract_sockets_along() {
    let world = World::new();
    let spec = Spec { binds: probe_binds(), network: Network::Host, ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    let name = format!("harvest-test-{}", running.id.part());
    let _listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let mut command = probe_command("abstract_socket", 1);
    command.env.insert("HARVEST_PROBE_SOCKET".to_owned(), name);
    let inside = exec(&running, command);
    assert_eq!(result_of(&inside.out), Some(0), "{inside:?}");
}

const PROBE_ARGUMENTS: [&str; 4] = ["--exact", "probes::a_probe", "--nocapture", "--quiet"];

/// This very program, in the role of one probe.
pub(super) fn probe_command(probe: &str, target: u32) -> Command {
    let mut command = command(&["/probe"]);
    command.argv.extend(PROBE_ARGUMENTS.map(str::to_owned));
    command.env = BTreeMap::from([
        ("HARVEST_PROBE".to_owned(), probe.to_owned()),
        ("HARVEST_PROBE_TARGET".to_owned(), target.to_string()),
    ]);
    command
}

/// This very program and the libraries it uses.
pub(super) fn probe_binds() -> Vec<Bind> {
    let mut binds = vec![Bind { source: std::env::current_exe().unwrap(), inside: "/probe".into() }];
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut libraries: Vec<&str> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| path.contains(".so"))
        .collect();
    // The loader's name in every program of this architecture.
    libraries.push("/lib64/ld-linux-x86-64.so.2");
    libraries.sort_unstable();
    libraries.dedup();
    binds.extend(libraries.into_iter().map(|path| Bind { source: path.into(), inside: path.into() }));
    binds
}

fn result_of(said: &str) -> Option<i32> {
    said.lines().find_map(|line| line.trim_start_matches('.').strip_prefix("probe: ")?.parse().ok())
}

/// Not a test but what probes run as: does one thing and says which error came of it.
#[test]
fn a_probe() {
    let Ok(probe) = std::env::var("HARVEST_PROBE") else { return };
    let target = std::env::var("HARVEST_PROBE_TARGET").unwrap().parse().unwrap();
    let control = std::env::var_os("HARVEST_PROBE_CONTROL").is_some();
    println!(
        "\nprobe: {}",
        attempt(&probe, target, control).map_or_else(|error| error.raw_os_error().unwrap_or(-1), |()| 0)
    );
}

fn attempt(probe: &str, target: i32, control: bool) -> std::io::Result<()> {
    let check = |result: libc::c_long| {
        if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    };
    let (empty, null) = (c"".as_ptr(), std::ptr::null::<libc::c_void>());
    // SAFETY: every call gets pointers to things that live until it returns, or none; what they do
    // is confined to this process, which ends right afterwards.
    unsafe {
        if control && matches!(probe, "mount" | "sysctl") {
            // The host itself must not change: try it in namespaces of our own.
            check(libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWNET).into())?;
            let private = libc::MS_REC | libc::MS_PRIVATE;
            check(libc::mount(empty, c"/".as_ptr(), empty, private, null).into())?;
        }
        match probe {
            "mount" => {
                check(libc::mount(c"none".as_ptr(), c"/tmp".as_ptr(), c"tmpfs".as_ptr(), 0, null).into())
            }
            "fsopen" => check(libc::syscall(libc::SYS_fsopen, c"tmpfs".as_ptr(), 0)),
            // Refused to programs with threads, as this one has: a child tries.
            "user_namespace" => match libc::fork() {
                0 => libc::_exit(if libc::unshare(libc::CLONE_NEWUSER) == 0 {
                    0
                } else {
                    *libc::__errno_location()
                }),
                child => {
                    let mut status = 0;
                    check(libc::waitpid(child, &raw mut status, 0).into())?;
                    match libc::WEXITSTATUS(status) {
                        0 => Ok(()),
                        errno => Err(std::io::Error::from_raw_os_error(errno)),
                    }
                }
            },
            "ptrace" => check(libc::ptrace(libc::PTRACE_SEIZE, target, 0, 0)),
            "proc_root" => fs::read_link(format!("/proc/{target}/root")).map(drop),
            "proc_fd" => fs::read_dir(format!("/proc/{target}/fd")).map(drop),
            "proc_mem" => fs::File::open(format!("/proc/{target}/mem")).map(drop),
            "sysctl" => fs::write("/proc/sys/net/ipv4/ip_forward", "0"),
            "raw_socket" => check(libc::socket(libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP).into()),
            "packet_socket" => check(libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM, 0).into()),
            // The id of the session's keyring.
            "keyctl" => check(libc::syscall(libc::SYS_keyctl, 0, -3, 0)),
            "io_uring" => check(libc::syscall(libc::SYS_io_uring_setup, 1, [0u32; 30].as_mut_ptr())),
            // A map of one number.
            "bpf" => check(libc::syscall(libc::SYS_bpf, 0, [2u32, 4, 4, 1, 0, 0, 0, 0].as_ptr(), 32)),
            "device" => {
                let path = std::ffi::CString::new(format!("/tmp/harvest-probe-{}", libc::getpid()))?;
                check(libc::mknod(path.as_ptr(), libc::S_IFCHR | 0o600, libc::makedev(1, 3)).into())?;
                check(libc::unlink(path.as_ptr()).into())
            }
            // Far fewer than the host has for all sandboxes together.
            "terminals" => (0..300)
                .map(|_| fs::File::options().read(true).write(true).open("/dev/ptmx"))
                .collect::<Result<Vec<_>, _>>()
                .map(drop),
            "kill_host" => check(libc::kill(target, 0).into()),
            "outside" => connect("192.0.2.1:80"),
            "synthetic" => connect("198.18.77.7:80"),
            "abstract_socket" => {
                let name = std::env::var("HARVEST_PROBE_SOCKET").unwrap();
                UnixStream::connect_addr(&SocketAddr::from_abstract_name(name)?).map(drop)
            }
            "bomb" => loop {
                libc::fork();
            },
            other => panic!("unknown probe {other}"),
        }
    }
}

fn connect(address: &str) -> std::io::Result<()> {
    std::net::TcpStream::connect(address).map(drop)
}
