//! A private home for each test, and helpers for the sandboxes in it.

use super::*;

pub(crate) const APPLETS: [&str; 28] = [
    "cat", "chmod", "chown", "echo", "grep", "head", "hostname", "id", "ip", "kill", "ln", "ls",
    "mkdir", "mkfifo", "mknod", "mv", "mount", "printf", "ps", "readlink", "rm", "setsid", "sh",
    "sleep", "touch", "true", "wget", "wc",
];

/// Another path for an unprivileged user, who cannot enter the build folder.
pub(crate) fn zygote_program() -> std::ffi::OsString {
    std::env::var_os("HARVEST_TEST_ZYGOTE").unwrap_or(env!("CARGO_BIN_EXE_harvest-zygote").into())
}

/// A private home; removed with everything in it when the test ends.
pub(crate) struct World {
    pub(crate) engine: Engine,
    pub(crate) home: PathBuf,
    pub(crate) folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        Self::at("")
    }

    pub(crate) fn at(below: &str) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), below, Driver::Dir, &[])
    }

    /// A home whose sandboxes lack these guards.
    pub(crate) fn without(guards: &[&str]) -> Self {
        match guards {
            [] => Self::new(),
            guards => Self::with_zygote("", &["--leave-out", &guards.join(",")]),
        }
    }

    pub(crate) fn with_zygote(below: &str, arguments: &[&str]) -> Self {
        Self::in_folder(tempfile::tempdir().unwrap(), below, Driver::Dir, arguments)
    }

    /// A home on btrfs, if this host supports it.
    pub(crate) fn btrfs() -> Option<Self> {
        let can = btrfs::is_supported() && !harvest_engine::rootless::is_active();
        can.then(|| Self::in_folder(tempfile::tempdir().unwrap(), "", Driver::Btrfs, &[]))
    }

    /// One home for each store driver.
    pub(crate) fn each() -> impl Iterator<Item = Self> {
        [Some(Self::new()), Self::btrfs()].into_iter().flatten()
    }

    pub(crate) fn in_folder(
        folder: tempfile::TempDir,
        below: &str,
        driver: Driver,
        arguments: &[&str],
    ) -> Self {
        let home = folder.path().join(below).join("home");
        Self::in_home(folder, home, driver, arguments)
    }

    pub(crate) fn in_home(
        folder: tempfile::TempDir,
        home: PathBuf,
        driver: Driver,
        arguments: &[&str],
    ) -> Self {
        if driver != Driver::Dir {
            btrfs::enter_mount_namespace();
        }
        let zygote =
            [zygote_program()].into_iter().chain(arguments.iter().map(Into::into)).collect();
        let cache = folder.path().join("cache");
        let engine = Engine::open(Config { driver, ..config(&home, &cache, zygote) }).unwrap();
        let base = folder.path().join("cache/layers/base");
        for name in ["bin", "etc", "tmp", "root", "proc", "dev", "sys"] {
            fs::create_dir_all(base.join(name)).unwrap();
        }
        fs::copy("/bin/busybox", base.join("bin/busybox"))
            .expect("a static /bin/busybox (busybox-static)");
        for applet in APPLETS {
            symlink("busybox", base.join("bin").join(applet)).unwrap();
        }
        Self { engine, home, folder }
    }

    pub(crate) fn config(&self) -> Config {
        let zygote = vec![env!("CARGO_BIN_EXE_harvest-zygote").into()];
        config(&self.home, &self.folder.path().join("cache"), zygote)
    }

    pub(crate) fn spec(&self) -> Spec {
        let env = [("PATH".to_owned(), "/bin".to_owned())];
        Spec {
            id: SandboxId::random(),
            from: Origin::Layers {
                layers: vec!["base".parse().unwrap()],
                config: ImageConfig { env: env.into(), ..ImageConfig::default() },
            },
            limits: Limits { memory_bytes: 256 << 20, ..Limits::default() },
            network: Network::Door,
            owner: Owner::Standalone,
            binds: Vec::new(),
            door: None,
            settings: Default::default(),
            volumes: Vec::new(),
            env: BTreeMap::new(),
            made_by: None,
        }
    }

    pub(crate) fn start(&self) -> Running {
        self.engine.start(&self.spec()).unwrap()
    }

    /// The cgroup folders of this home on every hierarchy, as far as they exist.
    pub(crate) fn groups(&self) -> Vec<PathBuf> {
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

    /// The cgroups of a sandbox that runs, one per hierarchy.
    pub(crate) fn groups_of(&self, id: &SandboxId) -> Vec<PathBuf> {
        let state = self.home.join("sandboxes").join(id.part()).join("state.json");
        let state: serde_json::Value = serde_json::from_slice(&fs::read(state).unwrap()).unwrap();
        let name = state["cgroup"].as_str().unwrap();
        self.groups().into_iter().map(|group| group.join(name)).collect()
    }

    /// Whether its zygote keeps standbys: only root's does.
    pub(crate) fn keeps_standbys(&self) -> bool {
        let plan = self.engine.plan(&self.spec()).unwrap();
        plan.steps.iter().any(|step| matches!(step, harvest_engine::Step::ClaimIds { .. }))
    }

    /// Pids of this home's zygote.
    pub(crate) fn zygotes(&self) -> Vec<u32> {
        let home = self.home.canonicalize().unwrap();
        processes()
            .into_iter()
            .filter(|pid| {
                let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                let mut words = line.split(|byte| *byte == 0).filter(|word| !word.is_empty());
                // A sandbox being created still has the zygote's name, but its own pid namespace.
                let link =
                    |pid: &dyn std::fmt::Display| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
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
        let _ = self.engine.stop_if_idle();
        if !thread::panicking() {
            self.assert_nothing_left();
        }
        // Looking for cgroups has mounted the store again.
        btrfs::unmount_store(&self.engine, &self.home);
    }
}

pub(crate) fn config(home: &Path, cache: &Path, zygote: Vec<std::ffi::OsString>) -> Config {
    let supervisor = PathBuf::from(std::env::var_os("HARVEST_SUPERVISOR").unwrap_or_default());
    assert!(
        supervisor.is_file(),
        "no supervisor at {}: run `cargo supervisor`",
        supervisor.display()
    );
    Config {
        home: home.to_owned(),
        cache: cache.to_owned(),
        supervisor,
        zygote,
        driver: Driver::Dir,
        thresholds: Thresholds::NONE,
    }
}

pub(crate) fn named(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

pub(crate) fn processes() -> Vec<u32> {
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect()
}

/// Only zygotes lead a session; a helper process that creates a user namespace otherwise looks the
/// same.
pub(crate) fn leads_its_session(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(3))
        == Some(&pid.to_string())
}

/// The host uid of a process, or `None` if it is dead or a zombie.
pub(crate) fn uid(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    if status.lines().any(|line| line.starts_with("State:\tZ")) {
        return None;
    }
    status
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))?
        .split_whitespace()
        .next()?
        .parse()
        .ok()
}

/// Live processes with a uid in this range.
pub(crate) fn processes_of(range: u32) -> Vec<u32> {
    processes()
        .into_iter()
        .filter(|pid| uid(*pid).is_some_and(|uid| uid / 65536 == range))
        .collect()
}

pub(crate) fn range(running: &Running) -> u32 {
    uid(running.pid).unwrap() / 65536
}

/// Waits for a condition; a minute is enough even on a busy host.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < end, "timed out waiting for: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Output and exit of a command.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) exit: Exit,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn exec(running: &Running, command: Command) -> CommandOutput {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut client = SupervisorClient::dial(&running.bridge).unwrap();
    let exit = client
        .exec(command, &[], &mut |output, bytes| match output {
            Output::Stdout => out.extend_from_slice(bytes),
            Output::Stderr => err.extend_from_slice(bytes),
        })
        .unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).trim().to_owned();
    CommandOutput { exit, out: text(out), err: text(err) }
}

pub(crate) fn command(argv: &[&str]) -> Command {
    Command { argv: argv.iter().map(|&word| word.to_owned()).collect(), ..Command::default() }
}

pub(crate) fn shell(running: &Running, script: &str) -> CommandOutput {
    exec(running, command(&["sh", "-c", script]))
}

/// Names of the sandbox cgroups below a home's.
pub(crate) fn parts(group: &Path) -> Vec<String> {
    let entries = fs::read_dir(group).unwrap().flatten().filter(|entry| entry.path().is_dir());
    entries.map(|entry| named(&entry.path())).filter(|part| part != "zygote").collect()
}

/// An idle process of the host, killed when dropped.
pub(crate) struct Sleeper(pub(crate) Child);

impl Sleeper {
    pub(crate) fn new() -> Self {
        Self(HostCommand::new("sleep").arg("1000").spawn().unwrap())
    }

    pub(crate) fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        self.end();
    }
}
