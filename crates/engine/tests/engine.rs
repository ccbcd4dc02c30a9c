//! The sandbox's promises, kept on the real kernel with the real supervisor. Needs root, a static
//! `/bin/busybox` for the file tree, and the supervisor (`cargo supervisor`).
#![expect(unsafe_code, reason = "probes try system calls that have no safe wrapper")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "engine/btrfs.rs"]
mod btrfs;
#[path = "engine/disks.rs"]
mod disks;
#[path = "engine/doctor.rs"]
mod doctor;
#[path = "engine/fallbacks.rs"]
mod fallbacks;
#[path = "engine/faults.rs"]
mod faults;
#[path = "engine/guests.rs"]
mod guests;
#[path = "engine/images.rs"]
mod images;
#[path = "engine/leftovers.rs"]
mod leftovers;
#[path = "engine/limits.rs"]
mod limits;
#[path = "engine/probes.rs"]
mod probes;
#[path = "engine/rootless.rs"]
mod rootless;
#[path = "engine/seeds.rs"]
mod seeds;
#[path = "engine/upgrades.rs"]
mod upgrades;
#[path = "engine/volumes.rs"]
mod volumes;

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::{
        fs::{MetadataExt, symlink},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    process::{Child, Command as HostCommand},
    thread,
    time::{Duration, Instant},
};

use harvest_engine::{
    Bind, Config, Driver, Engine, EngineError, ImageConfig, Limits, Network, Origin, Owner, Running,
    SandboxState, Spec, Threshold, Thresholds,
    guest::{Guest, Output},
};
use harvest_proto::{
    SandboxId,
    bridge::{Command, Exit},
    door::{Answer, Ask},
};

const APPLETS: [&str; 28] = [
    "cat", "chmod", "chown", "echo", "grep", "head", "hostname", "id", "ip", "kill", "ln", "ls", "mkdir",
    "mkfifo", "mknod", "mv", "mount", "printf", "ps", "readlink", "rm", "setsid", "sh", "sleep", "touch",
    "true", "wget", "wc",
];

/// Elsewhere for an ordinary user, who may not enter the folder of what was built.
fn zygote_program() -> std::ffi::OsString {
    std::env::var_os("HARVEST_TEST_ZYGOTE").unwrap_or(env!("CARGO_BIN_EXE_harvest-zygote").into())
}

/// A home of its own; everything in it is gone when the test ends.
struct World {
    engine: Engine,
    home: PathBuf,
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        Self::at("")
    }

    fn at(below: &str) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), below, Driver::Dir, &[])
    }

    /// One whose sandboxes lack these guards.
    fn without(guards: &[&str]) -> Self {
        match guards {
            [] => Self::new(),
            guards => Self::with_zygote("", &["--leave-out", &guards.join(",")]),
        }
    }

    fn with_zygote(below: &str, arguments: &[&str]) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), below, Driver::Dir, arguments)
    }

    /// On btrfs, unless this host cannot.
    fn btrfs() -> Option<Self> {
        let can = btrfs::is_possible() && !harvest_engine::rootless::is_here();
        can.then(|| Self::in_folder(tempfile::tempdir().unwrap(), "", Driver::Btrfs, &[]))
    }

    /// One for each way to keep disks.
    fn each() -> impl Iterator<Item = Self> {
        [Some(Self::new()), Self::btrfs()].into_iter().flatten()
    }

    fn in_folder(folder: tempfile::TempDir, below: &str, driver: Driver, arguments: &[&str]) -> Self {
        let home = folder.path().join(below).join("home");
        Self::in_home(folder, home, driver, arguments)
    }

    fn in_home(folder: tempfile::TempDir, home: PathBuf, driver: Driver, arguments: &[&str]) -> Self {
        if driver != Driver::Dir {
            btrfs::own_mounts();
        }
        let zygote = [zygote_program()].into_iter().chain(arguments.iter().map(Into::into)).collect();
        let cache = folder.path().join("cache");
        let engine = Engine::open(Config { driver, ..config(&home, &cache, zygote) }).unwrap();
        let base = folder.path().join("cache/layers/base");
        for name in ["bin", "etc", "tmp", "root", "proc", "dev", "sys"] {
            fs::create_dir_all(base.join(name)).unwrap();
        }
        fs::copy("/bin/busybox", base.join("bin/busybox")).expect("a static /bin/busybox (busybox-static)");
        for applet in APPLETS {
            symlink("busybox", base.join("bin").join(applet)).unwrap();
        }
        Self { engine, home, folder }
    }

    fn config(&self) -> Config {
        let zygote = vec![env!("CARGO_BIN_EXE_harvest-zygote").into()];
        config(&self.home, &self.folder.path().join("cache"), zygote)
    }

    fn spec(&self) -> Spec {
        let env = [("PATH".to_owned(), "/bin".to_owned())];
        Spec {
            id: SandboxId::random(),
            from: Origin::Layers {
                layers: vec!["base".parse().unwrap()],
                config: ImageConfig { env: env.into(), ..ImageConfig::default() },
            },
            limits: Limits { memory_bytes: 256 << 20, ..Limits::default() },
            network: Network::Door,
            owner: Owner::Kept,
            binds: Vec::new(),
            volumes: Vec::new(),
            env: BTreeMap::new(),
            made_by: None,
        }
    }

    fn start(&self) -> Running {
        self.engine.start(&self.spec()).unwrap()
    }

    /// The cgroup folders of this home on every hierarchy, as far as they exist.
    fn groups(&self) -> Vec<PathBuf> {
        let plan = self.engine.plan(&self.spec()).unwrap();
        let mut groups: Vec<PathBuf> = plan
            .steps
            .iter()
            .filter_map(|step| match step {
                harvest_engine::Step::MakeGroup(group) => group
                    .path
                    .ancestors()
                    .find(|path| named(path).starts_with("harvest-"))
                    .map(Path::to_owned),
                _ => None,
            })
            .collect();
        groups.sort();
        groups.dedup();
        groups.retain(|group| group.exists());
        groups
    }

    /// Pids of this home's zygote.
    fn zygotes(&self) -> Vec<u32> {
        let home = self.home.canonicalize().unwrap();
        processes()
            .into_iter()
            .filter(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
                // A sandbox being made has the zygote's name still, in a pid namespace of its own.
                let link = |pid: &dyn std::fmt::Display| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
                words.next().is_some_and(|word| word.ends_with(b"harvest-zygote"))
                    && words.any(|word| word == home.as_os_str().as_encoded_bytes())
                    && link(pid) == link(&"self")
                    && leads_its_session(*pid)
            })
            .collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for id in self.engine.list().unwrap_or_default() {
            let _ = self.engine.remove(&id);
        }
        let _ = self.engine.rest();
        if !thread::panicking() {
            self.assert_nothing_left();
        }
        // Looking for cgroups has woken it.
        btrfs::let_go(&self.engine, &self.home);
    }
}

fn config(home: &Path, cache: &Path, zygote: Vec<std::ffi::OsString>) -> Config {
    let supervisor = PathBuf::from(std::env::var_os("HARVEST_SUPERVISOR").unwrap_or_default());
    assert!(supervisor.is_file(), "no supervisor at {}: run `cargo supervisor`", supervisor.display());
    Config {
        home: home.to_owned(),
        cache: cache.to_owned(),
        supervisor,
        zygote,
        driver: Driver::Dir,
        thresholds: Thresholds::NONE,
    }
}

fn named(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn processes() -> Vec<u32> {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

/// Unlike what it starts, a zygote does; a process that only makes a user namespace looks like one otherwise.
fn leads_its_session(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(3)) == Some(&pid.to_string())
}

/// The host's uid of a process, unless it is dead and only waits for its parent to notice.
fn uid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    if status.lines().any(|line| line.starts_with("State:\tZ")) {
        return None;
    }
    status.lines().find_map(|line| line.strip_prefix("Uid:"))?.split_whitespace().next()?.parse().ok()
}

/// Living processes with an id of this range.
fn processes_of(range: u32) -> Vec<u32> {
    processes().into_iter().filter(|pid| uid(*pid).is_some_and(|uid| uid / 65536 == range)).collect()
}

fn range(running: &Running) -> u32 {
    uid(running.pid).unwrap() / 65536
}

/// Waits for something that must come; a minute means never, even on a busy machine.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < end, "this never came: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// What a command said and how it ended.
#[derive(Debug)]
struct Said {
    exit: Exit,
    out: String,
    err: String,
}

fn exec(running: &Running, command: Command) -> Said {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut guest = Guest::dial(&running.bridge).unwrap();
    let exit = guest
        .exec(command, &[], &mut |output, bytes| match output {
            Output::Stdout => out.extend_from_slice(bytes),
            Output::Stderr => err.extend_from_slice(bytes),
        })
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    Said { exit, out: text(out), err: text(err) }
}

fn command(argv: &[&str]) -> Command {
    Command { argv: argv.iter().map(|&word| word.to_owned()).collect(), ..Command::default() }
}

fn shell(running: &Running, script: &str) -> Said {
    exec(running, command(&["sh", "-c", script]))
}

#[test]
fn a_command_runs_in_all_namespaces_and_sees_only_its_own_processes() {
    let world = World::new();
    let running = world.start();
    for kind in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let inside = shell(&running, &format!("readlink /proc/self/ns/{kind}"));
        let host = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert!(inside.out.starts_with(kind), "{inside:?}");
        assert_ne!(inside.out, host.to_string_lossy(), "{kind}");
    }
    let seen = shell(&running, "ls /proc | grep -c '^[0-9]'");
    assert!(seen.out.parse::<usize>().unwrap() < 12, "{seen:?}");
    assert_eq!(shell(&running, "hostname").out, format!("sbx-{}", running.id.part()));
    assert_eq!(shell(&running, "exit 3").exit, Exit::Code(3));
}

#[test]
fn ids_on_disk_are_canonical_and_ids_of_processes_are_not() {
    let world = World::new();
    let running = world.start();
    let said =
        shell(&running, "touch /root/mine /tmp/theirs && chown 10001:10001 /tmp/theirs && ls -n /tmp /root");
    assert_eq!(said.exit, Exit::Code(0), "{said:?}");
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    for (path, id) in [("root/mine", 0), ("tmp/theirs", 10_001)] {
        let about = fs::metadata(upper.join(path)).unwrap();
        assert_eq!((about.uid(), about.gid()), (id, id), "{path}");
    }
    assert!(uid(running.pid).unwrap() >= 0x7000_0000);
    assert_eq!(shell(&running, "id -u").out, "0");
}

#[test]
fn the_whole_tree_dies_on_kill_however_it_hides() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let left = shell(
        &running,
        "(setsid sh -c '(sleep 1000 & sleep 1000) & sleep 1000' >/dev/null 2>&1 &) ; echo ok",
    );
    assert_eq!(left.out, "ok", "{left:?}");
    eventually("three sleepers", || processes_of(range).len() > 3);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
    assert_eq!(world.engine.wait(&running.id).unwrap(), "killed");
    let dead = SandboxState::Dead { reason: "killed".to_owned() };
    assert_eq!(world.engine.find(&running.id).unwrap(), dead);
    world.engine.kill(&running.id).unwrap();
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    assert!(upper.is_dir(), "the disk stays");
    world.engine.remove(&running.id).unwrap();
    world.engine.remove(&running.id).unwrap();
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
}

#[test]
fn a_fork_bomb_hurts_only_its_own_work() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.pids = 64;
    spec.binds = probes::probe_binds();
    let running = world.engine.start(&spec).unwrap();
    let bomb = Command { timeout_millis: Some(1500), ..probes::probe_command("bomb", 0) };
    assert_eq!(exec(&running, bomb).exit, Exit::Timeout);
    assert_eq!(shell(&running, "echo fine").out, "fine");
    let running_still = SandboxState::Running(running.clone());
    assert_eq!(world.engine.find(&running.id).unwrap(), running_still);
}

#[test]
fn a_memory_hog_dies_alone_and_is_counted() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.memory_bytes = 64 << 20;
    let running = world.engine.start(&spec).unwrap();
    let hog = shell(&running, "x=aaaaaaaa; while :; do x=$x$x; done");
    assert!(matches!(hog.exit, Exit::Oom), "{hog:?}");
    let kills: u64 = world
        .groups()
        .iter()
        .flat_map(|group| {
            ["memory.oom_control", "memory.events"]
                .map(|file| group.join(spec.id.part()).join("work").join(file))
        })
        .filter_map(|file| fs::read_to_string(file).ok())
        .filter_map(|text| text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse::<u64>().ok()))
        .sum();
    assert!(kills > 0);
    assert_eq!(shell(&running, "echo fine").out, "fine");
}

#[test]
fn a_sandbox_goes_on_when_the_zygote_is_killed_and_the_next_one_adopts_it() {
    let world = World::new();
    let running = world.start();
    let waiting = thread::spawn({
        let (engine, id) = (world.engine.clone(), running.id.clone());
        move || engine.wait(&id)
    });
    let killed = world.zygotes();
    for pid in &killed {
        assert!(HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
    }
    // The waiting thread meets the broken connection and starts the next zygote.
    eventually("the next zygote", || world.zygotes().iter().any(|pid| !killed.contains(pid)));
    assert_eq!(shell(&running, "echo on").out, "on");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
    let range = range(&running);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), "killed");
    assert_eq!(processes_of(range), [0u32; 0]);
}

/// Names of the cgroups below a home's.
fn parts(group: &Path) -> Vec<String> {
    let entries = fs::read_dir(group).unwrap().flatten().filter(|entry| entry.path().is_dir());
    entries.map(|entry| named(&entry.path())).filter(|part| part != "zygote").collect()
}

#[test]
fn a_sandbox_grown_ahead_of_time_has_its_own_name_and_limits() {
    let world = World::new();
    let first = world.start();
    let plan = world.engine.plan(&world.spec()).unwrap();
    let joins_late =
        plan.steps.iter().any(|step| matches!(step, harvest_engine::Step::Clone { into: None, .. }));
    if joins_late {
        eventually("something grows ahead", || parts(&world.groups()[0]).len() > 2);
    }
    let limits = Limits { pids: 33, memory_bytes: 48 << 20, ..Limits::default() };
    let running = world.engine.start(&Spec { limits, ..world.spec() }).unwrap();
    assert_eq!(shell(&running, "hostname").out, format!("sbx-{}", running.id.part()));
    assert_eq!(shell(&running, "ulimit -n").out, "1024");
    let found = |file: &str| {
        let files =
            world.groups().into_iter().map(|group| group.join(running.id.part()).join("work").join(file));
        files
            .filter_map(|file| fs::read_to_string(file).ok())
            .map(|text| text.trim().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(found("pids.max"), ["33"]);
    assert_eq!([found("memory.limit_in_bytes"), found("memory.max")].concat(), [(48 << 20).to_string()]);
    assert_ne!(range(&running), range(&first));
    world.engine.kill(&running.id).unwrap();
    assert!(world.groups().iter().all(|group| !group.join(running.id.part()).exists()));
    assert_eq!(shell(&first, "echo on").out, "on");
}

#[test]
fn a_zygote_killed_at_any_moment_of_a_start_leaves_a_whole_sandbox_or_none() {
    let world = World::new();
    let mut whole = 0;
    for round in 0..16u64 {
        let spec = world.spec();
        let starting = thread::spawn({
            let (engine, spec) = (world.engine.clone(), spec.clone());
            move || engine.start(&spec)
        });
        // The blow falls a little later each time: before, during and after the start.
        thread::sleep(Duration::from_micros(round * 500));
        for pid in world.zygotes() {
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        }
        match starting.join().unwrap() {
            Ok(running) => {
                assert_eq!(shell(&running, "echo whole").out, "whole");
                whole += 1;
            }
            Err(error) => {
                let found = world.engine.find(&spec.id).unwrap();
                assert_eq!(found, SandboxState::Gone, "after {error}");
            }
        }
    }
    let listed = world.engine.list().unwrap();
    assert_eq!(listed.len(), whole);
    for id in listed {
        assert!(matches!(world.engine.find(&id).unwrap(), SandboxState::Running(_)));
    }
    // The next start makes the next zygote clear up; what is left belongs to the living.
    let last = world.start();
    for group in world.groups() {
        let parts = parts(&group);
        let mut living = world.engine.list().unwrap();
        living.retain(|id| parts.contains(&id.part().to_owned()));
        assert_eq!(living.len(), whole + 1);
        assert!(living.contains(&last.id));
        // Besides them those of processes kept ready.
        assert!(parts.len() <= whole + 1 + 2, "{parts:?}");
    }
}

#[test]
fn a_sandbox_that_died_while_no_zygote_looked_is_found_dead() {
    let world = World::new();
    let running = world.start();
    for pid in world.zygotes().iter().chain([&running.pid]) {
        HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    eventually("pid 1 is dead", || uid(running.pid).is_none());
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    assert_eq!(world.engine.list().unwrap(), std::slice::from_ref(&running.id));
    assert!(world.engine.wait(&running.id).is_ok());
}

/// A process of the host that does nothing, until it is dropped.
struct Sleeper(Child);

impl Sleeper {
    fn new() -> Self {
        Self(HostCommand::new("sleep").arg("1000").spawn().unwrap())
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.end();
    }
}

fn claims_of(range: u32) -> bool {
    Path::new("/run/harvest-ids").join((range - 0x7000_0000 / 65536).to_string()).exists()
}

#[test]
fn nothing_is_left_of_a_sandbox_whose_owner_is_gone() {
    let world = World::new();
    let mut owner = Sleeper::new();
    let spec = Spec { owner: Owner::Process(owner.0.id()), ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    let range = range(&running);
    assert!(claims_of(range));
    assert_eq!(shell(&running, "echo on").out, "on");
    owner.end();
    eventually("the sandbox is gone", || world.engine.find(&running.id).unwrap() == SandboxState::Gone);
    assert_eq!(processes_of(range), [0u32; 0]);
    assert!(!claims_of(range));
    assert!(!running.bridge.parent().unwrap().exists());
    assert!(world.groups().iter().all(|group| !group.join(running.id.part()).exists()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*world.folder.path().to_string_lossy()));
}

#[test]
fn a_sandbox_is_refused_when_its_owner_is_gone_already() {
    let world = World::new();
    let mut owner = Sleeper::new();
    owner.end();
    let spec = Spec { owner: Owner::Process(owner.0.id()), ..world.spec() };
    assert!(matches!(world.engine.start(&spec), Err(EngineError::Refused { .. })));
    assert_eq!(world.engine.find(&spec.id).unwrap(), SandboxState::Gone);
}

#[test]
fn two_homes_at_once_never_share_a_range_of_ids() {
    let worlds = [World::new(), World::new()];
    let started: Vec<Running> = thread::scope(|scope| {
        let starts: Vec<_> = worlds
            .iter()
            .flat_map(|world| (0..4).map(move |_| world))
            .map(|world| scope.spawn(|| world.start()))
            .collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    let mut ranges: Vec<u32> = started.iter().map(range).collect();
    ranges.sort_unstable();
    ranges.dedup();
    assert_eq!(ranges.len(), 8);
}

#[test]
fn a_start_that_fails_says_why_and_leaves_nothing() {
    let world = World::new();
    let bind = Bind { source: "/etc/hostname".into(), inside: "/bin/busybox/x".into() };
    let spec = Spec { binds: vec![bind], ..world.spec() };
    let error = world.engine.start(&spec).unwrap_err();
    assert!(error.to_string().contains("/bin/busybox/x"), "{error}");
    assert_eq!(world.engine.find(&spec.id).unwrap(), SandboxState::Gone);
    assert!(world.groups().iter().all(|group| !group.join(spec.id.part()).exists()));
    let missing = Spec { from: Origin::Image("none".to_owned()), ..world.spec() };
    assert!(matches!(world.engine.start(&missing), Err(EngineError::ImageMissing { .. })));
    let running = world.start();
    let again = Spec { id: running.id.clone(), ..world.spec() };
    assert!(matches!(world.engine.start(&again), Err(EngineError::Exists { .. })));
}

#[test]
fn an_image_cannot_lead_the_set_up_out_of_its_root() {
    let world = World::new();
    let outside = world.folder.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let base = world.folder.path().join("cache/layers/base");
    for name in ["dev", "etc", "proc"] {
        fs::remove_dir(base.join(name)).unwrap();
        symlink(&outside, base.join(name)).unwrap();
        assert!(matches!(world.engine.start(&world.spec()), Err(EngineError::Refused { .. })), "{name}");
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        fs::remove_file(base.join(name)).unwrap();
        fs::create_dir(base.join(name)).unwrap();
    }
    fs::rename(base.join("etc"), base.join("other")).unwrap();
    symlink("/other", base.join("etc")).unwrap();
    assert!(shell(&world.start(), "cat /other/resolv.conf").out.contains("198.18.0.1"));
}

#[test]
fn a_home_with_a_long_path_works() {
    let world = World::at(&["long"; 30].join("/"));
    let running = world.start();
    assert!(running.bridge.as_os_str().len() > 130);
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn a_freeze_nobody_renews_ends_and_a_frozen_sandbox_can_be_killed() {
    let world = World::new();
    let running = world.start();
    let group = world.groups().into_iter().find(|group| group.to_string_lossy().contains("freezer"));
    let group = group.unwrap_or_else(|| world.groups()[0].clone()).join(running.id.part()).join("work");
    let frozen = || {
        ["freezer.state", "cgroup.freeze"]
            .iter()
            .filter_map(|file| fs::read_to_string(group.join(file)).ok())
            .any(|state| matches!(state.trim(), "FROZEN" | "1"))
    };
    shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
    world.engine.freeze(&running.id).unwrap();
    assert!(frozen());
    world.engine.thaw(&running.id).unwrap();
    assert!(!frozen());
    world.engine.freeze(&running.id).unwrap();
    eventually("the freeze ends by itself", || !frozen());
    world.engine.freeze(&running.id).unwrap();
    let range = range(&running);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
    assert!(matches!(world.engine.freeze(&running.id), Err(EngineError::NotRunning { .. })));
}

#[test]
fn a_zygote_survives_clients_that_talk_nonsense_or_go_away() {
    let world = World::new();
    let running = world.start();
    let zygotes = world.zygotes();
    let socket = world.home.join("run/zygote.sock");
    for bytes in [&b"{"[..], b"", b"{\"ask\":\"start\"}", &[0xff; 4096]] {
        let client =
            rustix::net::socket(rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET, None)
                .unwrap();
        rustix::net::connect(&client, &rustix::net::SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::send(&client, bytes, rustix::net::SendFlags::NOSIGNAL).unwrap();
    }
    assert_eq!(shell(&running, "echo on").out, "on");
    world.engine.freeze(&running.id).unwrap();
    world.engine.thaw(&running.id).unwrap();
    assert_eq!(world.zygotes(), zygotes);
}

#[test]
fn a_name_is_reached_through_the_door_and_by_no_other_way() {
    the_door_is_the_only_way(&World::new());
}

fn the_door_is_the_only_way(world: &World) {
    let running = world.start();
    let door = UnixListener::bind(&running.door).unwrap();
    fs::set_permissions(&running.door, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    thread::spawn(move || {
        for stream in door.incoming() {
            thread::spawn(move || gateway(stream.unwrap()));
        }
    });
    let said = shell(&running, "wget -q -O - http://forge.example:8080/hello");
    assert_eq!(said.out, "forge.example:8080 says hello", "{said:?}");
    assert_ne!(shell(&running, "wget -q -O - http://elsewhere.example/").exit, Exit::Code(0));
}

/// Opens the way to `forge.example` only, and answers there as a web server.
fn gateway(stream: UnixStream) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let (mut line, mut stream) = (String::new(), stream);
    reader.read_line(&mut line).unwrap();
    let ask: Ask = serde_json::from_str(&line).unwrap();
    let (Ask::Lookup { name } | Ask::Connect { name, .. }) = &ask;
    let open = name == "forge.example";
    let answer = if open { Answer::Open } else { Answer::Refused { reason: "not allowed".to_owned() } };
    let _ = writeln!(stream, "{}", serde_json::to_string(&answer).unwrap());
    if let Ask::Connect { name, port } = ask {
        let mut request = [0u8; 64];
        let _ = reader.read(&mut request);
        let body = format!("{name}:{port} says hello\n");
        let _ = write!(stream, "HTTP/1.0 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    }
}

#[test]
fn a_plan_prints_every_step_to_the_sandbox() {
    let world = World::new();
    let plan = world.engine.plan(&world.spec()).unwrap().to_string();
    for word in ["claim_ids", "clone", "overlay", "mask", "root", "capabilities", "seccomp", "exec"] {
        assert!(plan.contains(word), "{word} is missing in\n{plan}");
    }
}
