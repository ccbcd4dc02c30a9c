//! Attack probes, run from inside a sandbox. A probe is this test program in another role. Each
//! runs with every guard in place, with all but one of the guards that block it, and with none:
//! there it must succeed, or it proves nothing.

#[path = "probes/debuggers.rs"]
mod debuggers;
#[path = "probes/disk.rs"]
mod disk;
#[path = "probes/files.rs"]
mod files;
#[path = "probes/kernel.rs"]
mod kernel;
#[path = "probes/mounts.rs"]
mod mounts;
#[path = "probes/neighbours.rs"]
mod neighbours;
#[path = "probes/processes.rs"]
mod processes;
#[path = "probes/sockets.rs"]
mod sockets;

use std::io;

use super::*;

/// One way to reach something a sandbox must not reach.
pub(super) struct Probe {
    pub(super) name: &'static str,
    /// The expected error while all guards are in place.
    pub(super) refused: i32,
    /// Plan steps that block it, each of them sufficient.
    guards: &'static [&'static str],
    /// Plan steps that block it on some kernels only, depending on settings.
    optional_guards: &'static [&'static str],
    attempt: fn() -> io::Result<()>,
}

/// Guards against administrative calls: the seccomp filter, dropped capabilities, and namespaces
/// owned by a user namespace above.
const ADMIN: &[&str] = &["seccomp", "capabilities", "enter_user_namespace"];
const SECCOMP: &[&str] = &["seccomp"];
/// Guards between root inside and a process it must not inspect.
const FOREIGN_PROCESS: &[&str] = &["capabilities", "enter_user_namespace"];

const fn probe(
    name: &'static str,
    refused: i32,
    guards: &'static [&'static str],
    attempt: fn() -> io::Result<()>,
) -> Probe {
    Probe { name, refused, guards, optional_guards: &[], attempt }
}

/// Errors of a kernel that lacks the feature.
const UNSUPPORTED: [i32; 5] =
    [libc::ENOSYS, libc::ENOENT, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP];

/// All probes.
pub(super) fn all() -> impl Iterator<Item = &'static Probe> {
    [mounts::PROBES, files::PROBES, kernel::PROBES, processes::PROBES, sockets::PROBES]
        .into_iter()
        .flatten()
}

/// Sandboxes that lack some guards, one for each set of guards.
#[derive(Default)]
struct Sandboxes(BTreeMap<Vec<&'static str>, (World, Running)>);

impl Sandboxes {
    fn without(&mut self, mut guards: Vec<&'static str>) -> &Running {
        guards.sort_unstable();
        let (_, running) = self.0.entry(guards).or_insert_with_key(|guards| {
            let world = World::without(guards);
            let running =
                world.engine.start(&Spec { binds: probe_binds(), ..world.spec() }).unwrap();
            (world, running)
        });
        running
    }

    /// The result of a probe where these guards are off.
    fn result(&mut self, probe: &Probe, off: Vec<&'static str>, target: u32) -> i32 {
        let output = exec(self.without(off), probe_command(probe.name, target));
        result_of(&output.out)
            .unwrap_or_else(|| panic!("{} printed no result: {output:?}", probe.name))
    }
}

/// Runs each probe and asserts the results; `target` is a process of the host.
fn assert_blocked(probes: &[Probe], target: u32) {
    let mut sandboxes = Sandboxes::default();
    for probe in probes {
        let name = probe.name;
        let guarded = sandboxes.result(probe, Vec::new(), target);
        assert_ne!(guarded, 0, "{name}");
        let without = |kept: Option<&str>| {
            let steps = probe.guards.iter().chain(probe.optional_guards).copied();
            steps.filter(|step| Some(*step) != kept).collect::<Vec<_>>()
        };
        let open = sandboxes.result(probe, without(None), target);
        if open != 0 {
            // The kernel lacks the feature: then root of the host gets the same error.
            assert!(UNSUPPORTED.contains(&open), "{name}: {open}");
            let host = result_on_host(name, target);
            assert_eq!(host, open, "{name} without guards");
            println!("{name}: not supported by this kernel ({host})");
            continue;
        }
        assert_eq!(guarded, probe.refused, "{name}");
        for guard in probe.guards {
            assert_ne!(
                sandboxes.result(probe, without(Some(guard)), target),
                0,
                "{name} with only {guard}"
            );
        }
    }
}

/// The result of a probe on the host.
fn result_on_host(probe: &str, target: u32) -> i32 {
    let output = HostCommand::new(std::env::current_exe().unwrap())
        .args(PROBE_ARGUMENTS)
        .envs(probe_command(probe, target).env)
        .output()
        .unwrap();
    result_of(&String::from_utf8_lossy(&output.stdout))
        .unwrap_or_else(|| panic!("{probe}: {output:?}"))
}

const PROBE_ARGUMENTS: [&str; 4] = ["--exact", "probes::probe_process", "--nocapture", "--quiet"];

/// The command that runs this program as one probe.
pub(super) fn probe_command(probe: &str, target: u32) -> Command {
    let mut command = command(&["/probe"]);
    command.argv.extend(PROBE_ARGUMENTS.map(str::to_owned));
    command.env = BTreeMap::from([
        ("HARVEST_PROBE".to_owned(), probe.to_owned()),
        ("HARVEST_PROBE_TARGET".to_owned(), target.to_string()),
    ]);
    command
}

/// Binds of this program and its libraries.
pub(super) fn probe_binds() -> Vec<Bind> {
    let mut binds =
        vec![Bind { source: std::env::current_exe().unwrap(), inside: "/probe".into() }];
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut libraries: Vec<&str> = maps
        .lines()
        .filter_map(|line| line.split_whitespace().nth(5))
        .filter(|path| path.contains(".so"))
        .collect();
    // The dynamic loader of this architecture.
    libraries.push("/lib64/ld-linux-x86-64.so.2");
    libraries.sort_unstable();
    libraries.dedup();
    binds.extend(
        libraries.into_iter().map(|path| Bind { source: path.into(), inside: path.into() }),
    );
    binds
}

pub(super) fn result_of(output: &str) -> Option<i32> {
    output
        .lines()
        .find_map(|line| line.trim_start_matches('.').strip_prefix("probe: ")?.parse().ok())
}

/// Not a test: the body of a probe, which does one thing and prints the error code.
#[test]
fn probe_process() {
    let Ok(name) = std::env::var("HARVEST_PROBE") else { return };
    let result = match all().find(|probe| probe.name == name) {
        Some(probe) => (probe.attempt)(),
        None if name == debuggers::TRACE_CHILD => debuggers::trace_child(),
        None if name == sockets::LIST_SOCKETS => sockets::list_sockets(),
        None => neighbours::attempt(&name),
    };
    println!("\nprobe: {}", result.map_or_else(|error| error.raw_os_error().unwrap_or(-1), |()| 0));
}

/// The target process of a probe.
fn target() -> i32 {
    std::env::var("HARVEST_PROBE_TARGET").unwrap().parse().unwrap()
}

/// The result of a system call.
fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Treats `expected` as success: the call passed the guards and failed only because of its invalid
/// arguments.
fn passes_guards(result: io::Result<()>, expected: i32) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(expected) => Ok(()),
        other => other,
    }
}

/// Runs `act` in a child process, for calls that are refused to multi-threaded programs.
fn in_child(act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    // SAFETY: the child only makes system calls and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = act().map_or_else(|error| error.raw_os_error().unwrap_or(255), |()| 0);
        // SAFETY: ends the process.
        unsafe { libc::_exit(code) };
    }
    check(child.into())?;
    let mut status = 0;
    // SAFETY: the status lives until the call returns.
    check(unsafe { libc::waitpid(child, &raw mut status, 0) }.into())?;
    match libc::WEXITSTATUS(status) {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}
