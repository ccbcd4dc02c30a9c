//! The store on btrfs: what plain folders cannot do, and what must not happen to it.

#[path = "btrfs/hosts.rs"]
mod hosts;

use std::{
    cell::Cell,
    fs::File,
    sync::atomic::{AtomicBool, Ordering},
};

use harvest_engine::StoreKind;
use harvest_proto::SnapshotId;
use rustix::{
    mount::{MountPropagationFlags, mount_change},
    thread::UnshareFlags,
};

use super::*;

/// Whether this host can hold such a store; says what is missing otherwise.
pub(crate) fn is_possible() -> bool {
    let missing = if !rustix::process::geteuid().is_root() {
        "root"
    } else if !Path::new("/usr/sbin/mkfs.btrfs").exists() {
        "mkfs.btrfs (package btrfs-progs)"
    } else {
        return true;
    };
    eprintln!("skipped: a store on btrfs needs {missing}");
    false
}

/// Gives this thread, and whatever it starts, a mount table of its own: a test that is killed leaves no
/// mount and no loop device, and with them gigabytes, behind.
pub(crate) fn own_mounts() {
    thread_local!(static DONE: Cell<bool> = const { Cell::new(false) });
    if !DONE.replace(true) {
        // SAFETY: nothing in this process relies on seeing the mounts of another thread.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
    }
}

fn is_mounted(home: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|about| about.dev()).ok();
    let store = home.join("store");
    store.exists() && device(&store) != device(home)
}

/// Whether a loop device carries the store's file.
fn is_attached(home: &Path) -> bool {
    let file = home.join("store.btrfs");
    fs::read_dir("/sys/block").unwrap().filter_map(Result::ok).any(|entry| {
        let backing =
            fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        Path::new(backing.trim()) == file
    })
}

/// Leaves no mount and no loop device of a world behind.
pub(crate) fn let_go(engine: &Engine, home: &Path) {
    let home = home.canonicalize().unwrap();
    if !home.join("store.btrfs").exists() {
        return;
    }
    let _ = engine.rest();
    if !thread::panicking() {
        eventually("the store is unmounted and its device gone", || {
            let _ = engine.rest();
            !is_mounted(&home) && !is_attached(&home)
        });
    }
}

/// Bytes free inside a store.
fn free(home: &Path) -> u64 {
    let stat = rustix::fs::statvfs(home.join("store")).unwrap();
    stat.f_bavail * stat.f_frsize
}

impl World {
    fn open_again(&self) -> Engine {
        Engine::open(Config {
            home: self.home.clone(),
            cache: self.folder.path().join("cache"),
            supervisor: PathBuf::from(std::env::var_os("HARVEST_SUPERVISOR").unwrap()),
            zygote: vec![env!("CARGO_BIN_EXE_harvest-zygote").into()],
            driver: Driver::Dir,
            thresholds: Thresholds::NONE,
        })
        .unwrap()
    }

    fn kill_zygotes(&self) {
        for pid in self.zygotes() {
            let _ = HostCommand::new("kill").args(["-9", &pid.to_string()]).status();
        }
        eventually("the zygote is gone", || self.zygotes().is_empty());
    }

    fn captured(&self, running: &Running) -> SnapshotId {
        let id = SnapshotId::random();
        self.engine.capture(&running.id, &id).unwrap();
        id
    }
}

#[test]
fn a_fork_shows_the_disk_of_its_moment_and_goes_its_own_way() {
    for world in World::each() {
        let source = world.start();
        shell(&source, "echo shared > /file; mkdir /folder; rm /bin/wc");
        let snapshot = world.captured(&source);
        let forks: Vec<Running> =
            (0..4).map(|_| world.start_from(Origin::Snapshot(snapshot.clone()))).collect();
        shell(&source, "echo source > /file");
        for (number, fork) in forks.iter().enumerate() {
            let said = shell(
                fork,
                &format!("cat /file; ls -d /folder; ls /bin/wc; echo {number} > /file"),
            );
            assert_eq!(said.out, "shared\n/folder");
        }
        for (number, fork) in forks.iter().enumerate() {
            assert_eq!(shell(fork, "cat /file").out, number.to_string());
        }
        assert_eq!(shell(&source, "cat /file").out, "source");
    }
}

#[test]
fn going_on_from_a_snapshot_again_and_again_adds_no_layers() {
    let Some(world) = World::btrfs() else { return };
    let mut running = world.start();
    for turn in 0..4 {
        shell(&running, &format!("echo {turn} >> /turns"));
        let snapshot = SnapshotId::random();
        let kept = if turn % 2 == 0 {
            let kept = world.engine.capture(&running.id, &snapshot).unwrap().snapshot;
            assert!(kept.durable, "the kernel has written it down");
            world.engine.remove(&running.id).unwrap();
            kept
        } else {
            world.engine.end_kept(&running.id, &snapshot).unwrap()
        };
        assert_eq!(kept.layers.len(), 2);
        assert_eq!(kept.sandbox.as_ref(), Some(&running.id));
        running = world.start_from(Origin::Snapshot(snapshot));
    }
    assert_eq!(shell(&running, "cat /turns").out, "0\n1\n2\n3");
}

#[test]
fn an_older_snapshot_can_be_gone_back_to_after_the_newer_ones_are_removed() {
    for world in World::each() {
        let running = world.start();
        let mut taken = Vec::new();
        for turn in 0..3 {
            shell(&running, &format!("echo {turn} > /file; touch /only-{turn}"));
            taken.push(world.captured(&running));
        }
        world.engine.remove(&running.id).unwrap();
        for newer in &taken[1..] {
            world.engine.snapshot_remove(newer).unwrap();
        }
        fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
        world.engine.gc(false).unwrap();
        let back = world.start_from(Origin::Snapshot(taken[0].clone()));
        assert_eq!(shell(&back, "cat /file; ls -d /only-*").out, "0\n/only-0");
    }
}

#[test]
fn a_store_is_found_again_after_every_process_is_killed() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo work > /file");
    let kept = world.captured(&running);
    shell(&running, "echo later > /file");
    world.kill_zygotes();
    HostCommand::new("kill").args(["-9", &running.pid.to_string()]).status().unwrap();
    let again = world.open_again();
    assert!(is_mounted(&world.home), "nobody has unmounted it");
    again.wait(&running.id).unwrap();
    let last = SnapshotId::random();
    again.end_kept(&running.id, &last).unwrap();
    assert_eq!(world.says(Origin::Snapshot(last.clone()), "cat /file"), "later");
    // And after what is left of a reboot: the file.
    drop(again);
    eventually("the store can be unmounted", || {
        let _ = world.engine.rest();
        !is_mounted(&world.home) && !is_attached(&world.home)
    });
    let again = world.open_again();
    assert_eq!(again.snapshots().unwrap().len(), 2);
    drop(again);
    assert_eq!(world.says(Origin::Snapshot(kept), "cat /file"), "work");
    assert_eq!(world.says(Origin::Snapshot(last), "cat /file"), "later");
}

#[test]
fn a_store_in_use_by_another_process_is_not_unmounted() {
    let Some(world) = World::btrfs() else { return };
    let other = world.open_again();
    world.engine.rest().unwrap();
    assert!(is_mounted(&world.home));
    drop(other);
    eventually("the store is unmounted", || {
        let _ = world.engine.rest();
        !is_mounted(&world.home)
    });
    // It is mounted again for whoever needs it.
    let running = world.start();
    world.engine.rest().unwrap();
    assert!(is_mounted(&world.home), "something runs");
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn a_capture_cut_short_anywhere_is_whole_when_it_is_asked_for_again() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo 1 > /file");
    let id = SnapshotId::random();
    world.engine.capture(&running.id, &id).unwrap();
    // As after kill -9 before the record was written, and before the thaw.
    fs::remove_file(world.home.join("store/snapshots").join(format!("{}.json", id.part())))
        .unwrap();
    world.engine.freeze(&running.id).unwrap();
    assert_eq!(shell(&running, "echo 2 > /file; cat /file").out, "2", "the zygote thaws it");
    world.engine.capture(&running.id, &id).unwrap();
    assert_eq!(world.says(Origin::Snapshot(id), "cat /file"), "2");
    assert_eq!(fs::read_dir(world.home.join("store/partial")).unwrap().count(), 0);
}

#[test]
fn a_limit_stops_only_the_one_who_reaches_it() {
    let Some(world) = World::btrfs() else { return };
    let other = world.start();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(32 << 20);
    let running = world.engine.start(&spec).unwrap();
    let fill = "for i in 1 2 3 4; do busybox dd if=/dev/zero of=/tmp/$i bs=1M count=16; done 2>&1";
    let said = shell(&running, fill).out;
    assert!(said.contains("quota exceeded"), "{said}");
    assert_eq!(
        shell(&other, "busybox dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null; echo $?").out,
        "0"
    );
    // What was deleted is no longer counted.
    let again = "rm /tmp/*; busybox sync; busybox dd if=/dev/zero of=/tmp/5 bs=1M count=20 2>&1";
    let said = shell(&running, again).out;
    assert!(!said.contains("quota"), "{said}");
    // Nor is what only a snapshot holds; a fork has the limit of its own spec.
    let kept = world.captured(&running);
    let fork = Spec { id: SandboxId::random(), from: Origin::Snapshot(kept), ..spec.clone() };
    let fork = world.engine.start(&fork).unwrap();
    let more =
        "rm -f /tmp/*; busybox dd if=/dev/zero of=/tmp/6 bs=1M count=20 2>/dev/null; echo $?";
    assert_eq!(shell(&running, more).out, "0");
    let said = shell(&fork, fill).out;
    assert!(said.contains("quota exceeded"), "{said}");
}

#[test]
fn what_is_removed_comes_free() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    let before = free(&world.home);
    shell(&running, "busybox dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null; busybox sync");
    let kept = world.captured(&running);
    eventually("it takes room", || free(&world.home) + (150 << 20) < before);
    let usage = world.engine.usage().unwrap();
    assert_eq!(usage.driver, StoreKind::BtrfsFile);
    assert!(usage.sandboxes[0].running && usage.sandboxes[0].bytes > 190 << 20, "{usage:?}");
    assert!(usage.snapshots[0].bytes > 190 << 20, "{usage:?}");
    world.engine.remove(&running.id).unwrap();
    world.engine.snapshot_remove(&kept).unwrap();
    let collected = world.engine.gc(false).unwrap();
    assert_eq!(collected.layers.iter().filter(|layer| layer.as_str() != "base").count(), 1);
    eventually("it is free again", || {
        // The kernel takes deleted subvolumes apart between two commits, which come every 30 s by themselves.
        rustix::fs::syncfs(fs::File::open(world.home.join("store")).unwrap()).unwrap();
        free(&world.home) + (20 << 20) > before
    });
    assert_eq!(fs::read_dir(world.home.join("store/trash")).unwrap().count(), 0);
    // What is planned from when the world ends.
    fs::create_dir(world.folder.path().join("cache/layers/base")).unwrap();
}

#[test]
fn a_snapshot_that_is_removed_goes_while_its_sandbox_goes_on() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo 1 > /file");
    let kept = world.captured(&running);
    world.engine.snapshot_remove(&kept).unwrap();
    assert_eq!(world.engine.gc(false).unwrap().layers.len(), 1, "nothing stands on it");
    assert_eq!(shell(&running, "cat /file").out, "1");
    let next = world.captured(&running);
    assert_eq!(world.says(Origin::Snapshot(next), "cat /file"), "1");
}

#[test]
fn collecting_never_takes_what_somebody_is_about_to_use() {
    for world in World::each() {
        // An image of its own: the tests' layer is in no record and would be collected.
        world.recipe_folder();
        let recipe = harvest_engine::Recipe::parse(
            "name = \"small\"\nfrom = { folder = \"tree\" }",
            &world.folder.path().join("recipe"),
        );
        let options = harvest_engine::BuildOptions::default();
        world.engine.image_build(&recipe.unwrap(), options, &mut |_| {}).unwrap();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    world.engine.gc(false).unwrap();
                }
            });
            let users = [0, 1].map(|user| {
                let world = &world;
                scope.spawn(move || {
                    let spec = Spec { from: Origin::Image("small".to_owned()), ..world.spec() };
                    let mut running = world.engine.start(&spec).unwrap();
                    for turn in 0..6 {
                        let seen = shell(
                            &running,
                            &format!("PATH=/bin; echo {user}{turn} > /file; cat /file"),
                        );
                        assert_eq!(seen.out, format!("{user}{turn}"));
                        let snapshot = world.captured(&running);
                        let fork = world.start_from(Origin::Snapshot(snapshot.clone()));
                        world.engine.snapshot_remove(&snapshot).unwrap();
                        assert_eq!(shell(&fork, "PATH=/bin; cat /file").out, seen.out);
                        world.engine.remove(&running.id).unwrap();
                        running = fork;
                    }
                })
            });
            let ended = users.map(|user| user.join());
            done.store(true, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok));
        });
        fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
    }
}

#[test]
fn a_home_whose_store_is_not_mounted_keeps_its_layers_in_a_shared_cache() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo kept > /file");
    let kept = SnapshotId::random();
    world.engine.end_kept(&running.id, &kept).unwrap();
    let other = Engine::open(Config {
        home: world.folder.path().join("other"),
        cache: world.folder.path().join("cache"),
        supervisor: PathBuf::from(std::env::var_os("HARVEST_SUPERVISOR").unwrap()),
        zygote: vec![env!("CARGO_BIN_EXE_harvest-zygote").into()],
        driver: Driver::Dir,
        thresholds: Thresholds::NONE,
    })
    .unwrap();
    eventually("the store is unmounted", || {
        let _ = world.engine.rest();
        !is_mounted(&world.home)
    });
    assert!(other.gc(false).unwrap().layers.is_empty());
    assert!(!is_mounted(&world.home), "and it is left as it was");
    assert_eq!(world.says(Origin::Snapshot(kept), "cat /file"), "kept");
}

#[test]
fn two_homes_have_two_stores() {
    let (Some(one), Some(two)) = (World::btrfs(), World::btrfs()) else { return };
    let running = [one.start(), two.start()];
    for (running, text) in running.iter().zip(["one", "two"]) {
        shell(running, &format!("echo {text} > /file"));
    }
    let snapshot = one.captured(&running[0]);
    assert_eq!(one.says(Origin::Snapshot(snapshot.clone()), "cat /file"), "one");
    assert!(two.engine.snapshot(&snapshot).unwrap().is_none());
    one.engine.remove(&running[0].id).unwrap();
    assert_eq!(shell(&running[1], "cat /file").out, "two");
}
