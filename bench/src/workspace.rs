//! The working folder of the bench: the file tree that every row starts from, and an engine with
//! its own home. Removed when dropped.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use harvest_engine::{
    Config, Driver, Engine, ImageConfig, Limits, Network, Origin, Owner, Spec, Thresholds,
};
use harvest_proto::SandboxId;

const APPLETS: [&str; 11] =
    ["cat", "cp", "dd", "echo", "find", "mkdir", "rm", "sh", "sync", "touch", "true"];

/// The working folder and the engine in it.
pub(crate) struct Workspace {
    folder: PathBuf,
    pub(crate) engine: Engine,
}

impl Workspace {
    pub(crate) fn create(folder: &Path) -> Result<Self> {
        fs::create_dir(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let rootfs = folder.join("cache/layers/base");
        create_rootfs(&rootfs)?;
        let engine = open(folder, "home", Driver::Dir)?;
        Ok(Self { folder: folder.to_owned(), engine })
    }

    /// An engine with a second home, whose disks are on btrfs.
    pub(crate) fn on_btrfs(&self) -> Result<CleanedUpEngine> {
        open(&self.folder, "home-btrfs", Driver::Btrfs).map(CleanedUpEngine)
    }

    /// The file tree every row starts from.
    pub(crate) fn rootfs(&self) -> PathBuf {
        self.folder.join("cache/layers/base")
    }

    /// A path in the working folder.
    pub(crate) fn at(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// A sandbox with limits that is removed when the bench exits.
    pub(crate) fn spec(&self) -> Result<Spec> {
        let env = [("PATH".to_owned(), "/bin".to_owned())];
        Ok(Spec {
            id: SandboxId::random(),
            from: Origin::Layers {
                layers: vec!["base".parse().context("`base` is a layer's name")?],
                config: ImageConfig { env: env.into(), ..ImageConfig::default() },
            },
            limits: Limits { memory_bytes: MEMORY_BYTES, pids: PIDS, ..Limits::default() },
            network: Network::Door,
            owner: Owner::Process(std::process::id()),
            binds: Vec::new(),
            door: None,
            settings: Default::default(),
            volumes: Vec::new(),
            env: BTreeMap::new(),
            made_by: None,
        })
    }
}

/// The limits of all rows with limits.
pub(crate) const MEMORY_BYTES: u64 = 512 << 20;
pub(crate) const PIDS: u32 = 512;

/// An engine whose sandboxes are removed on drop.
pub(crate) struct CleanedUpEngine(pub(crate) Engine);

impl Drop for CleanedUpEngine {
    fn drop(&mut self) {
        clear(&self.0);
    }
}

fn open(folder: &Path, home: &str, driver: Driver) -> Result<Engine> {
    let supervisor: PathBuf = std::env::var_os("HARVEST_SUPERVISOR").unwrap_or_default().into();
    if !supervisor.is_file() {
        bail!("HARVEST_SUPERVISOR names no file: run `cargo supervisor`, or use `make bench`");
    }
    let program = std::env::current_exe().context("cannot find the bench itself")?;
    Ok(Engine::open(Config {
        home: folder.join(home),
        cache: folder.join("cache"),
        supervisor,
        zygote: vec![program.into(), "zygote".into()],
        driver,
        thresholds: Thresholds::NONE,
    })?)
}

fn clear(engine: &Engine) {
    for id in engine.list().unwrap_or_default() {
        let _ = engine.remove(&id);
    }
    let _ = engine.stop_if_idle();
}

impl Drop for Workspace {
    fn drop(&mut self) {
        clear(&self.engine);
        if let Err(error) = fs::remove_dir_all(&self.folder) {
            eprintln!("cannot remove {}: {error}", self.folder.display());
        }
    }
}

fn create_rootfs(rootfs: &Path) -> Result<()> {
    for name in ["bin", "etc", "tmp", "root", "proc", "dev", "sys", "changed", "stage"] {
        fs::create_dir_all(rootfs.join(name))?;
    }
    fs::copy("/bin/busybox", rootfs.join("bin/busybox"))
        .context("cannot copy a static /bin/busybox (package busybox-static)")?;
    for applet in APPLETS {
        symlink("busybox", rootfs.join("bin").join(applet))?;
    }
    Ok(())
}

/// On a host with cgroup v1, unmounts the cgroup2 mount, which has no controllers, in this mount
/// namespace: crun refuses to run where both exist. Returns whether there was one.
pub(crate) fn hide_empty_cgroup2() -> Result<bool> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mount table")?;
    let of = |kind: &str| -> Vec<String> {
        let lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        lines.filter(|words| words.get(2) == Some(&kind)).map(|words| words[1].to_owned()).collect()
    };
    if of("cgroup").is_empty() {
        return Ok(false);
    }
    let bare = of("cgroup2");
    for mount in &bare {
        let status = Command::new("umount").arg(mount).status().context("cannot run umount")?;
        if !status.success() {
            bail!("cannot hide {mount} from this mount namespace");
        }
    }
    Ok(!bare.is_empty())
}
