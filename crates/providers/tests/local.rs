//! The contract on the real machine: the engine, the zygote and the supervisor as they ship. Needs
//! root, a static `busybox` of the host (package busybox-static) and `make build` before it.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
};

use harvest_engine::{BuildOptions, Config, Driver, Engine, Limits, Recipe, Thresholds};
use harvest_proto::{
    SandboxId,
    bridge::{Command, Role},
};
use harvest_providers::{Local, contract};
use harvest_session::{
    bridge::Bridge,
    provider::{Provider, StartFrom, StartOrder},
};

const IMAGE: &str = "contract";

/// A home and a cache of its own. Whatever the suite leaves in it when it fails is ended.
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
        engine.image_build(&recipe, BuildOptions::default(), &mut |_| {}).unwrap();
        Self { engine, folder }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        for sandbox in self.engine.list().unwrap_or_default() {
            let _ = self.engine.remove(&sandbox);
        }
        let _ = self.engine.rest();
    }
}

/// The program beside this test's own folder: `…/target/debug/harvest`.
fn harvest() -> PathBuf {
    let here = std::env::current_exe().unwrap();
    here.parent().and_then(Path::parent).unwrap().join("harvest")
}

fn built(program: PathBuf) -> PathBuf {
    assert!(program.is_file(), "`{}` is not there: run `make build` first", program.display());
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
async fn the_local_provider_keeps_the_contract() {
    keeps_the_contract(Driver::Dir).await;
}

#[tokio::test]
async fn the_local_provider_keeps_the_contract_on_btrfs() {
    const NAME: &str = "the_local_provider_keeps_the_contract_on_btrfs";
    const INSIDE: &str = "HARVEST_TEST_INSIDE";
    if !Path::new("/usr/sbin/mkfs.btrfs").exists() {
        eprintln!("skipped: no mkfs.btrfs (package btrfs-progs)");
    } else if std::env::var_os(INSIDE).is_some() {
        keeps_the_contract(Driver::Btrfs).await;
    } else {
        // In a mount table of its own: killed, it leaves no store mounted.
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

async fn keeps_the_contract(driver: Driver) {
    let home = Home::new(driver);
    contract::run(Arc::new(Local::new(home.engine.clone(), Limits::default())), IMAGE).await;
    assert!(home.engine.list().unwrap().is_empty(), "the suite leaves no sandbox");
}

/// Runs a command in a sandbox that has this repository's state, and answers what it said.
async fn in_state_of(local: &Local, repository: &str, script: &str) -> String {
    let sandbox = SandboxId::random();
    let (from, state) = (StartFrom::Image(IMAGE.into()), Some(repository.to_owned()));
    local.start(StartOrder { sandbox: sandbox.clone(), from, state }).await.unwrap();
    let stream = local.dial(&sandbox).await.unwrap();
    let bridge = Bridge::open(stream, Role::Guest, None).await.unwrap().bridge;
    let argv = ["sh", "-c", script].map(str::to_owned).into();
    let user = Some("10001".to_owned());
    let env = [("PATH".to_owned(), "/bin".to_owned())].into();
    let command = Command { argv, user, env, ..Command::default() };
    let ended = bridge.run_command(command, 4096).await.unwrap();
    local.end(&sandbox).await.unwrap();
    String::from_utf8_lossy(&ended.stdout).trim().to_owned()
}

#[tokio::test]
async fn what_one_run_leaves_in_its_repositorys_state_the_next_one_finds() {
    let home = Home::new(Driver::Dir);
    let local = Local::new(home.engine.clone(), Limits::default());
    in_state_of(&local, "acme/app", "echo found > /mnt/state/workspace/left").await;
    assert_eq!(in_state_of(&local, "acme/app", "cat /mnt/state/workspace/left").await, "found");
    let other =
        in_state_of(&local, "acme-app", "cat /mnt/state/workspace/left || echo nothing").await;
    assert_eq!(other, "nothing");
}

#[tokio::test]
async fn a_sandbox_whose_state_cannot_be_had_starts_without() {
    let home = Home::new(Driver::Dir);
    let local = Local::new(home.engine.clone(), Limits::default());
    in_state_of(&local, "acme/app", "true").await;
    let [volume] = &home.engine.volumes().unwrap()[..] else {
        panic!("one repository, one volume")
    };
    // No zygote holds it mounted.
    home.engine.rest().unwrap();
    let image =
        home.folder.path().join("home").join("volumes").join(volume.name.as_str()).join("image");
    fs::remove_file(image).unwrap();
    assert_eq!(in_state_of(&local, "acme/app", "echo on").await, "on");
}
