//! What a sandbox must be kept from, tried from inside. A probe is this very test program, run inside in
//! another role. Each is tried with every guard in place, with all but one of the guards that stand in
//! its way, and with none of them: there it must succeed, or it proves nothing.

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

/// One way to something a sandbox must not reach.
pub(super) struct Probe {
    pub(super) name: &'static str,
    /// The error it ends with while all guards are in place.
    pub(super) refused: i32,
    /// Steps of the plan that stand in its way, each of them enough.
    walls: &'static [&'static str],
    /// Steps that stand in its way on some kernels only, by their settings.
    beside: &'static [&'static str],
    attempt: fn() -> io::Result<()>,
}

/// What stands between a sandbox and the calls of the host's administrator: the list of system calls, no
/// such capability, and namespaces that belong to a user namespace above.
const ADMIN: &[&str] = &["seccomp", "capabilities", "enter_user_namespace"];
const SECCOMP: &[&str] = &["seccomp"];
/// What stands between a sandbox's root and a process it may not look into.
const FOREIGN: &[&str] = &["capabilities", "enter_user_namespace"];

const fn probe(
    name: &'static str,
    refused: i32,
    walls: &'static [&'static str],
    attempt: fn() -> io::Result<()>,
) -> Probe {
    Probe { name, refused, walls, beside: &[], attempt }
}

/// What a kernel says that does not have what was asked for.
const LACKING: [i32; 5] =
    [libc::ENOSYS, libc::ENOENT, libc::EAFNOSUPPORT, libc::EPROTONOSUPPORT, libc::EOPNOTSUPP];

/// Every probe of every topic.
pub(super) fn all() -> impl Iterator<Item = &'static Probe> {
    [mounts::PROBES, files::PROBES, kernel::PROBES, processes::PROBES, sockets::PROBES]
        .into_iter()
        .flatten()
}

/// Sandboxes that lack some guards, one per set of them.
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

    /// What comes of a probe where these guards are off.
    fn result(&mut self, probe: &Probe, off: Vec<&'static str>, target: u32) -> i32 {
        let said = exec(self.without(off), probe_command(probe.name, target));
        result_of(&said.out).unwrap_or_else(|| panic!("{} said nothing: {said:?}", probe.name))
    }
}

/// Tries each probe; `target` is a process of the host.
fn hold(probes: &[Probe], target: u32) {
    let mut sandboxes = Sandboxes::default();
    for probe in probes {
        let name = probe.name;
        let guarded = sandboxes.result(probe, Vec::new(), target);
        assert_ne!(guarded, 0, "{name}");
        let without = |kept: Option<&str>| {
            let steps = probe.walls.iter().chain(probe.beside).copied();
            steps.filter(|step| Some(*step) != kept).collect::<Vec<_>>()
        };
        let open = sandboxes.result(probe, without(None), target);
        if open != 0 {
            // Not in this kernel: then root of the host gets the same answer.
            assert!(LACKING.contains(&open), "{name}: {open}");
            let host = outside(name, target);
            assert_eq!(host, open, "{name} with nothing in its way");
            println!("{name}: this kernel has no such thing ({host})");
            continue;
        }
        assert_eq!(guarded, probe.refused, "{name}");
        for wall in probe.walls {
            assert_ne!(
                sandboxes.result(probe, without(Some(wall)), target),
                0,
                "{name} with nothing but {wall}"
            );
        }
    }
}

/// What comes of a probe on the host.
fn outside(probe: &str, target: u32) -> i32 {
    let output = HostCommand::new(std::env::current_exe().unwrap())
        .args(PROBE_ARGUMENTS)
        .envs(probe_command(probe, target).env)
        .output()
        .unwrap();
    result_of(&String::from_utf8_lossy(&output.stdout))
        .unwrap_or_else(|| panic!("{probe}: {output:?}"))
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
    let mut binds =
        vec![Bind { source: std::env::current_exe().unwrap(), inside: "/probe".into() }];
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
    binds.extend(
        libraries.into_iter().map(|path| Bind { source: path.into(), inside: path.into() }),
    );
    binds
}

pub(super) fn result_of(said: &str) -> Option<i32> {
    said.lines().find_map(|line| line.trim_start_matches('.').strip_prefix("probe: ")?.parse().ok())
}

/// Not a test but what probes run as: does one thing and says which error came of it.
#[test]
fn a_probe() {
    let Ok(name) = std::env::var("HARVEST_PROBE") else { return };
    let result = match all().find(|probe| probe.name == name) {
        Some(probe) => (probe.attempt)(),
        None => neighbours::attempt(&name),
    };
    println!("\nprobe: {}", result.map_or_else(|error| error.raw_os_error().unwrap_or(-1), |()| 0));
}

/// The process a probe is aimed at.
fn target() -> i32 {
    std::env::var("HARVEST_PROBE_TARGET").unwrap().parse().unwrap()
}

/// What a system call answered.
fn check(result: libc::c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A call that was let through and failed for the nonsense it was given, so that it does nothing.
fn past(result: io::Result<()>, nonsense: i32) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(nonsense) => Ok(()),
        other => other,
    }
}

/// What a process of its own makes of it: for what is refused to programs with threads.
fn in_child(act: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    // SAFETY: the child calls what it was given, which makes system calls only, and ends.
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
