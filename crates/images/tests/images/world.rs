//! A temporary home with an engine, and a small root file system to make images of.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command as HostCommand,
    thread,
    time::{Duration, Instant},
};

use harvest_engine::{
    Config, Driver, Engine, Image, Limits, Network, Origin, Owner, Running, Spec, Thresholds,
    supervisor_client::{Output, SupervisorClient},
};
use harvest_images::{BuildOptions, ImageError, Import, Recipe, UnpackLimits};
use harvest_proto::{SandboxId, api::ImageLine, bridge::Command};

const APPLETS: [&str; 14] = [
    "cat", "echo", "grep", "id", "ls", "mkdir", "readlink", "rm", "sh", "sleep", "touch", "true",
    "wc", "yes",
];

pub(crate) struct World {
    pub(crate) engine: Engine,
    pub(crate) folder: tempfile::TempDir,
}

impl World {
    pub(crate) fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let world = Self { engine: engine_in(folder.path()), folder };
        for name in ["bin", "etc", "tmp", "root", "proc", "dev", "sys"] {
            fs::create_dir_all(world.root().join(name)).unwrap();
        }
        fs::copy("/bin/busybox", world.root().join("bin/busybox"))
            .expect("a static /bin/busybox (busybox-static)");
        for applet in APPLETS {
            symlink("busybox", world.root().join("bin").join(applet)).unwrap();
        }
        world
    }

    /// The root file system that tests make images of.
    pub(crate) fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    /// An archive of [`root`](Self::root).
    pub(crate) fn archive(&self) -> Vec<u8> {
        tar(&self.root())
    }

    pub(crate) fn layer_path(&self, image: &Image, index: usize) -> PathBuf {
        self.folder.path().join("cache/layers").join(image.layers[index].as_str())
    }

    pub(crate) fn import(&self, name: &str, bytes: &[u8]) -> Result<Image, ImageError> {
        let from = Import::Archive { name: "archive", bytes: &mut &*bytes, length: None };
        harvest_images::import(&self.engine, name, from, UnpackLimits::default(), &mut |_| {})
    }

    /// Builds a recipe whose folder is the world's.
    pub(crate) fn build(
        &self,
        recipe: &str,
        force: bool,
    ) -> (Result<Image, ImageError>, Vec<ImageLine>) {
        let recipe = Recipe::parse(recipe, self.folder.path()).unwrap();
        let mut reports = Vec::new();
        let options = BuildOptions { force, ..BuildOptions::default() };
        let built =
            harvest_images::build(&self.engine, &recipe, options, &mut |step| reports.push(step));
        (built, reports)
    }

    pub(crate) fn start(&self, image: &str) -> Running {
        self.engine.start(&spec(image)).unwrap()
    }

    /// Runs a script in a new sandbox of an image and returns its output.
    pub(crate) fn run_in(&self, image: &str, script: &str) -> String {
        let running = self.start(image);
        let output = shell(&running, script);
        self.engine.remove(&running.id).unwrap();
        output
    }

    /// What builds left in their scratch folder, besides lock files.
    pub(crate) fn unfinished(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path().join("cache/building")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !name.ends_with(".lock")).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        for id in self.engine.list().unwrap_or_default() {
            let _ = self.engine.remove(&id);
        }
        let _ = self.engine.stop_if_idle();
    }
}

/// An engine whose home and cache are in this folder.
pub(crate) fn engine_in(folder: &Path) -> Engine {
    let supervisor = PathBuf::from(std::env::var_os("HARVEST_SUPERVISOR").unwrap_or_default());
    assert!(supervisor.is_file(), "no supervisor at {supervisor:?}: run `cargo supervisor`");
    // `target/debug/deps/images-…` is this program.
    let program = std::env::current_exe().unwrap();
    let zygote = program.ancestors().nth(2).unwrap().join("harvest-zygote");
    assert!(zygote.is_file(), "no zygote at {zygote:?}: run `cargo build -p harvest-engine`");
    Engine::open(Config {
        home: folder.join("home"),
        cache: folder.join("cache"),
        supervisor,
        zygote: vec![zygote.into()],
        driver: Driver::Dir,
        thresholds: Thresholds::NONE,
    })
    .unwrap()
}

pub(crate) fn spec(image: &str) -> Spec {
    Spec {
        id: SandboxId::random(),
        from: Origin::Image(image.to_owned()),
        limits: Limits { memory_bytes: 256 << 20, ..Limits::default() },
        network: Network::Door,
        owner: Owner::Standalone,
        binds: Vec::new(),
        door: None,
        settings: Default::default(),
        volumes: Vec::new(),
        env: BTreeMap::from([("PATH".to_owned(), "/bin".to_owned())]),
        made_by: None,
    }
}

/// Runs a script in a sandbox and returns its standard output.
pub(crate) fn shell(running: &Running, script: &str) -> String {
    let argv = ["sh", "-c", script].map(str::to_owned).into();
    let command = Command { argv, ..Command::default() };
    let mut stdout = Vec::new();
    let mut client = SupervisorClient::dial(&running.bridge).unwrap();
    client
        .exec(command, &[], &mut |output, bytes| {
            if output == Output::Stdout {
                stdout.extend_from_slice(bytes);
            }
        })
        .unwrap();
    String::from_utf8_lossy(&stdout).trim().to_owned()
}

/// How many steps ran, as opposed to being found in the cache.
pub(crate) fn steps_run(reports: &[ImageLine]) -> usize {
    reports.iter().filter(|report| matches!(report, ImageLine::StepDone { .. })).count()
}

/// Waits up to a minute for a condition.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A tar of everything in a folder, made by the host's `tar`.
pub(crate) fn tar(folder: &Path) -> Vec<u8> {
    let mut command = HostCommand::new("tar");
    command.args(["--numeric-owner", "-C"]).arg(folder).args(["-c", "."]);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut encoder, bytes).unwrap();
    encoder.finish().unwrap()
}
