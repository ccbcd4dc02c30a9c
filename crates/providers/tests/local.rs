//! Runs the contract suite against the local provider with the real engine, zygote and supervisor.
//! Needs root, a static `busybox` (package busybox-static) and `make build`.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
};

use harvest_engine::{Config, Driver, Engine, Thresholds};
use harvest_images::{BuildOptions, Recipe};
use harvest_proto::{
    SandboxId,
    api::SandboxLimits,
    bridge::{BridgeRole, Command},
};
use harvest_providers::{Local, contract, local::Recipes};
use harvest_session::{
    bridge::Bridge,
    sandboxes::{SandboxProvider, SandboxSpec, StartFrom, StateVolume},
};

const IMAGE: &str = "contract";

/// A temporary home and cache. Dropping it removes leftover sandboxes.
struct Home {
    engine: Engine,
    folder: tempfile::TempDir,
}

impl Home {
    fn new(driver: Driver) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let engine = Engine::open(Config {
            home: folder.path().join("home"),
            cache: folder.path().join("cache"),
            supervisor: built(std::env::var_os("HARVEST_SUPERVISOR").unwrap_or_default().into()),
            zygote: vec![built(harvest()).into(), "zygote".into()],
            driver,
            thresholds: Thresholds::NONE,
        })
        .unwrap();
        busybox(&folder.path().join("root"));
        let text = format!("name = \"{IMAGE}\"\nfrom = {{ folder = \"root\" }}\n");
        let recipe = Recipe::parse(&text, folder.path()).unwrap();
        harvest_images::build(&engine, &recipe, BuildOptions::default(), &mut |_| {}).unwrap();
        Self { engine, folder }
    }

    fn provider(&self) -> Local {
        let nowhere = || Err(std::io::ErrorKind::NotFound.into());
        let recipes = Recipes { names: Vec::new(), write_all: Arc::new(nowhere) };
        Local::new(self.engine.clone(), recipes)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        for sandbox in self.engine.list().unwrap_or_default() {
            let _ = self.engine.remove(&sandbox);
        }
        let _ = self.engine.stop_if_idle();
    }
}

/// `…/target/debug/harvest`, next to the folder of this test.
fn harvest() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    here.parent().and_then(Path::parent).unwrap().join("harvest")
}

fn built(program: PathBuf) -> PathBuf {
    assert!(program.is_file(), "`{}` is missing: run `make build` first", program.display());
    program
}

/// A root file system with a shell and little else.
fn busybox(root: &Path) {
    for folder in ["bin", "etc", "tmp", "root", "proc", "dev", "sys"] {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    let found =
        ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).is_file());
    fs::copy(found.expect("a static busybox (package busybox-static)"), root.join("bin/busybox"))
        .unwrap();
    for applet in ["cat", "echo", "sh", "true"] {
        symlink("busybox", root.join("bin").join(applet)).unwrap();
    }
}

#[tokio::test]
async fn local_provider_passes_contract() {
    run_contract(Driver::Dir).await;
}

#[tokio::test]
async fn local_provider_passes_contract_on_btrfs() {
    const NAME: &str = "local_provider_passes_contract_on_btrfs";
    const INSIDE: &str = "HARVEST_TEST_INSIDE";
    if !Path::new("/usr/sbin/mkfs.btrfs").exists() {
        eprintln!("skipped: no mkfs.btrfs (package btrfs-progs)");
    } else if std::env::var_os(INSIDE).is_some() {
        run_contract(Driver::Btrfs).await;
    } else {
        // In a private mount namespace, so that a killed test leaves no mount behind.
        let mut inside = std::process::Command::new("unshare");
        inside.args(["--mount", "--propagation", "private"]).arg(std::env::current_exe().unwrap());
        assert!(
            inside
                .args(["--exact", NAME, "--nocapture"])
                .env(INSIDE, "1")
                .status()
                .unwrap()
                .success()
        );
    }
}

async fn run_contract(driver: Driver) {
    let home = Home::new(driver);
    contract::run(Arc::new(home.provider()), IMAGE).await;
    assert!(home.engine.list().unwrap().is_empty(), "the suite leaves no sandbox");
}

/// Runs a script in a sandbox with this repository's state volume and returns its output.
async fn in_state_of(local: &Local, repository: &str, script: &str) -> String {
    let sandbox = SandboxId::random();
    let from = StartFrom::Image(IMAGE.into());
    let spec = SandboxSpec {
        state: Some(StateVolume::Repository(repository.parse().unwrap())),
        ..SandboxSpec::of_session(sandbox.clone(), from, SandboxLimits::default())
    };
    local.create(spec).await.unwrap();
    let stream = local.connect(&sandbox).await.unwrap();
    let bridge = Bridge::open(stream, BridgeRole::Client, None).await.unwrap().bridge;
    let argv = ["sh", "-c", script].map(str::to_owned).into();
    let user = Some("10001".to_owned());
    let env = [("PATH".to_owned(), "/bin".to_owned())].into();
    let command = Command { argv, user, env, ..Command::default() };
    let output = bridge.run_command(command).await.unwrap();
    local.remove(&sandbox).await.unwrap();
    output.tail()
}

#[tokio::test]
async fn repository_state_persists_between_sandboxes() {
    let home = Home::new(Driver::Dir);
    let local = home.provider();
    in_state_of(&local, "acme/app", "echo found > /mnt/state/workspace/left").await;
    assert_eq!(in_state_of(&local, "acme/app", "cat /mnt/state/workspace/left").await, "found");
    let other = in_state_of(
        &local,
        "other/app",
        "cat /mnt/state/workspace/left 2>/dev/null || echo nothing",
    )
    .await;
    assert_eq!(other, "nothing");
}

#[tokio::test]
async fn sandbox_starts_without_unavailable_state_volume() {
    let home = Home::new(Driver::Dir);
    let local = home.provider();
    in_state_of(&local, "acme/app", "true").await;
    let [volume] = &home.engine.volumes().unwrap()[..] else {
        panic!("one repository, one volume")
    };
    // Stops the zygote, which would keep the volume mounted.
    home.engine.stop_if_idle().unwrap();
    let image =
        home.folder.path().join("home").join("volumes").join(volume.name.as_str()).join("image");
    fs::remove_file(image).unwrap();
    assert_eq!(in_state_of(&local, "acme/app", "echo on").await, "on");
}

#[tokio::test]
async fn frozen_sandbox_uses_no_cpu_time() {
    let home = Home::new(Driver::Dir);
    let (local, sandbox) = (home.provider(), SandboxId::random());
    let from = StartFrom::Image(IMAGE.into());
    let spec = SandboxSpec::of_session(sandbox.clone(), from, SandboxLimits::default());
    local.create(spec).await.unwrap();
    let stream = local.connect(&sandbox).await.unwrap();
    let bridge = Bridge::open(stream, BridgeRole::Client, None).await.unwrap().bridge;
    let argv = ["sh", "-c", "while :; do :; done"].map(str::to_owned).into();
    let command = Command { argv, ..Command::default() };
    let busy = tokio::spawn(async move { bridge.run_command(command).await.map(drop) });
    let used = async || local.usage(&sandbox).await.unwrap().unwrap().cpu_micros;
    // How often usage is read while it grows by 50 ms.
    let (start, mut reads) = (used().await, 0);
    while used().await < start + 50_000 {
        reads += 1;
    }
    let freezing = local.freeze_control().unwrap();
    freezing.freeze(&sandbox, std::time::Duration::from_secs(60)).await.unwrap();
    let frozen = used().await;
    for _ in 0..reads {
        used().await;
    }
    let later = used().await;
    assert!(later < frozen + 10_000, "{frozen} µs, then {later} µs after {reads} reads");
    local.remove(&sandbox).await.unwrap();
    assert!(busy.await.unwrap().is_err(), "the loop ran until the end");
}
