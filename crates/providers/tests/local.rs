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
use harvest_providers::{Local, contract};

const IMAGE: &str = "contract";

/// A home and a cache of its own. Whatever the suite leaves in it when it fails is ended.
struct Home {
    engine: Engine,
    _folder: tempfile::TempDir,
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
        Self { engine, _folder: folder }
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
    let found = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).is_file());
    fs::copy(found.expect("a static busybox (package busybox-static)"), root.join("bin/busybox")).unwrap();
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
    if Path::new("/usr/sbin/mkfs.btrfs").exists() {
        keeps_the_contract(Driver::Btrfs).await;
    } else {
        eprintln!("skipped: no mkfs.btrfs (package btrfs-progs)");
    }
}

async fn keeps_the_contract(driver: Driver) {
    let home = Home::new(driver);
    contract::run(Arc::new(Local::new(home.engine.clone(), Limits::default())), IMAGE).await;
    assert!(home.engine.list().unwrap().is_empty(), "the suite leaves no sandbox");
}
