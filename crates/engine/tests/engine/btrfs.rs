//! The btrfs store: forks, quotas, growth, crashes and full disks.

#[path = "btrfs/host_disks.rs"]
mod host_disks;

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

/// Whether this host supports a btrfs store; otherwise prints the missing requirement.
pub(crate) fn is_supported() -> bool {
    let missing = if !rustix::process::geteuid().is_root() {
        "root"
    } else if !Path::new("/usr/sbin/mkfs.btrfs").exists() {
        "mkfs.btrfs (package btrfs-progs)"
    } else {
        return true;
    };
    eprintln!("skipped: a btrfs store needs {missing}");
    false
}

/// Moves this thread and its children to a new mount namespace, so that a killed test leaves no
/// mounts and loop devices, with gigabytes of space, behind.
pub(crate) fn enter_mount_namespace() {
    thread_local!(static DONE: Cell<bool> = const { Cell::new(false) });
    if !DONE.replace(true) {
        // SAFETY: no code in this process relies on the mounts of another thread.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE).unwrap();
    }
}

fn is_mounted(home: &Path) -> bool {
    let device = |path: &Path| fs::metadata(path).map(|about| about.dev()).ok();
    let store = home.join("store");
    store.exists() && device(&store) != device(home)
}

/// Whether the store's file is attached to a loop device.
fn is_attached(home: &Path) -> bool {
    let file = home.join("store.btrfs");
    fs::read_dir("/sys/block").unwrap().filter_map(Result::ok).any(|entry| {
        let backing =
            fs::read_to_string(entry.path().join("loop/backing_file")).unwrap_or_default();
        Path::new(backing.trim()) == file
    })
}

/// Unmounts a world's store and waits until its loop device is detached.
pub(crate) fn unmount_store(engine: &Engine, home: &Path) {
    let home = home.canonicalize().unwrap();
    if !home.join("store.btrfs").exists() {
        return;
    }
    let _ = engine.stop_if_idle();
    if !thread::panicking() {
        eventually("the store is unmounted and its device detached", || {
            let _ = engine.stop_if_idle();
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
    fn reopen(&self) -> Engine {
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

    fn capture(&self, running: &Running) -> SnapshotId {
        let id = SnapshotId::random();
        self.engine.capture(&running.id, &id).unwrap();
        id
    }
}

#[test]
fn forks_of_a_snapshot_are_independent() {
    for world in World::each() {
        let source = world.start();
        shell(&source, "echo shared > /file; mkdir /folder; rm /bin/wc");
        let snapshot = world.capture(&source);
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
fn repeated_restarts_from_snapshots_add_no_layers() {
    let Some(world) = World::btrfs() else { return };
    let mut running = world.start();
    for turn in 0..4 {
        shell(&running, &format!("echo {turn} >> /turns"));
        let snapshot = SnapshotId::random();
        let saved = if turn % 2 == 0 {
            let saved = world.engine.capture(&running.id, &snapshot).unwrap().snapshot;
            assert!(saved.durable, "the kernel has committed it");
            world.engine.remove(&running.id).unwrap();
            saved
        } else {
            world.engine.stop_and_save(&running.id, &snapshot).unwrap()
        };
        assert_eq!(saved.layers.len(), 2);
        assert_eq!(saved.sandbox, running.id);
        running = world.start_from(Origin::Snapshot(snapshot));
    }
    assert_eq!(shell(&running, "cat /turns").out, "0\n1\n2\n3");
}

#[test]
fn an_older_snapshot_survives_removing_newer_ones() {
    for world in World::each() {
        let running = world.start();
        let mut ids = Vec::new();
        for turn in 0..3 {
            shell(&running, &format!("echo {turn} > /file; touch /only-{turn}"));
            ids.push(world.capture(&running));
        }
        world.engine.remove(&running.id).unwrap();
        for newer in &ids[1..] {
            world.engine.snapshot_remove(newer).unwrap();
        }
        fs::create_dir_all(world.folder.path().join("cache/layers/base")).unwrap();
        world.engine.gc(false).unwrap();
        let back = world.start_from(Origin::Snapshot(ids[0].clone()));
        assert_eq!(shell(&back, "cat /file; ls -d /only-*").out, "0\n/only-0");
    }
}

#[test]
fn a_store_survives_killing_every_process() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo work > /file");
    let saved = world.capture(&running);
    shell(&running, "echo later > /file");
    world.kill_zygotes();
    HostCommand::new("kill").args(["-9", &running.pid.to_string()]).status().unwrap();
    let again = world.reopen();
    assert!(is_mounted(&world.home), "the store is still mounted");
    again.wait(&running.id).unwrap();
    let last = SnapshotId::random();
    again.stop_and_save(&running.id, &last).unwrap();
    assert_eq!(world.output_from(Origin::Snapshot(last.clone()), "cat /file"), "later");
    // As after a reboot, only the file is left.
    drop(again);
    eventually("the store can be unmounted", || {
        let _ = world.engine.stop_if_idle();
        !is_mounted(&world.home) && !is_attached(&world.home)
    });
    let again = world.reopen();
    assert_eq!(again.snapshots().unwrap().len(), 2);
    drop(again);
    assert_eq!(world.output_from(Origin::Snapshot(saved), "cat /file"), "work");
    assert_eq!(world.output_from(Origin::Snapshot(last), "cat /file"), "later");
}

#[test]
fn a_store_used_elsewhere_is_not_unmounted() {
    let Some(world) = World::btrfs() else { return };
    let other = world.reopen();
    world.engine.stop_if_idle().unwrap();
    assert!(is_mounted(&world.home));
    drop(other);
    eventually("the store is unmounted", || {
        let _ = world.engine.stop_if_idle();
        !is_mounted(&world.home)
    });
    // The next start mounts it again.
    let running = world.start();
    world.engine.stop_if_idle().unwrap();
    assert!(is_mounted(&world.home), "a sandbox runs");
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn an_interrupted_btrfs_capture_can_be_retried() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo 1 > /file");
    let id = SnapshotId::random();
    world.engine.capture(&running.id, &id).unwrap();
    // As after a kill before the record was written and before the thaw.
    fs::remove_file(world.home.join("store/snapshots").join(format!("{}.json", id.part())))
        .unwrap();
    world.engine.freeze(&running.id).unwrap();
    assert_eq!(shell(&running, "echo 2 > /file; cat /file").out, "2", "the zygote thaws it");
    world.engine.capture(&running.id, &id).unwrap();
    assert_eq!(world.output_from(Origin::Snapshot(id), "cat /file"), "2");
    assert_eq!(fs::read_dir(world.home.join("store/partial")).unwrap().count(), 0);
}

#[test]
fn a_quota_stops_only_its_own_sandbox() {
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
    // Deleted files no longer count.
    let again = "rm /tmp/*; busybox sync; busybox dd if=/dev/zero of=/tmp/5 bs=1M count=20 2>&1";
    let said = shell(&running, again).out;
    assert!(!said.contains("quota"), "{said}");
    // Neither does what only a snapshot refers to. A fork has the limit of its own spec.
    let saved = world.capture(&running);
    let fork = Spec { id: SandboxId::random(), from: Origin::Snapshot(saved), ..spec.clone() };
    let fork = world.engine.start(&fork).unwrap();
    let more =
        "rm -f /tmp/*; busybox dd if=/dev/zero of=/tmp/6 bs=1M count=20 2>/dev/null; echo $?";
    assert_eq!(shell(&running, more).out, "0");
    let said = shell(&fork, fill).out;
    assert!(said.contains("quota exceeded"), "{said}");
}

#[test]
fn removing_snapshots_and_sandboxes_frees_space() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    let before = free(&world.home);
    shell(&running, "busybox dd if=/dev/zero of=/big bs=1M count=200 2>/dev/null; busybox sync");
    let saved = world.capture(&running);
    eventually("the file uses space", || free(&world.home) + (150 << 20) < before);
    let usage = world.engine.disk_usage().unwrap();
    assert_eq!(usage.driver, StoreKind::BtrfsFile);
    assert!(usage.sandboxes[0].running && usage.sandboxes[0].bytes > 190 << 20, "{usage:?}");
    assert!(usage.snapshots[0].bytes > 190 << 20, "{usage:?}");
    world.engine.remove(&running.id).unwrap();
    world.engine.snapshot_remove(&saved).unwrap();
    let collected = world.engine.gc(false).unwrap();
    assert_eq!(collected.layers.iter().filter(|layer| layer.as_str() != "base").count(), 1);
    eventually("the space is free again", || {
        // The kernel frees deleted subvolumes between commits, which otherwise happen every 30 s.
        rustix::fs::syncfs(fs::File::open(world.home.join("store")).unwrap()).unwrap();
        free(&world.home) + (20 << 20) > before
    });
    assert_eq!(fs::read_dir(world.home.join("store/trash")).unwrap().count(), 0);
    // The world's cleanup needs the base layer.
    fs::create_dir(world.folder.path().join("cache/layers/base")).unwrap();
}

#[test]
fn removed_snapshots_are_collected_while_their_sandbox_runs() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo 1 > /file");
    let saved = world.capture(&running);
    world.engine.snapshot_remove(&saved).unwrap();
    assert_eq!(world.engine.gc(false).unwrap().layers.len(), 1, "nothing refers to its layer");
    assert_eq!(shell(&running, "cat /file").out, "1");
    let next = world.capture(&running);
    assert_eq!(world.output_from(Origin::Snapshot(next), "cat /file"), "1");
}

#[test]
fn gc_never_removes_layers_about_to_be_used() {
    for world in World::each() {
        // An image, because no record refers to the tests' base layer, which would be collected.
        world.make_image("small", &[]);
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
                        let snapshot = world.capture(&running);
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
fn gc_keeps_cache_layers_of_unmounted_stores() {
    let Some(world) = World::btrfs() else { return };
    let running = world.start();
    shell(&running, "echo saved > /file");
    let saved = SnapshotId::random();
    world.engine.stop_and_save(&running.id, &saved).unwrap();
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
        let _ = world.engine.stop_if_idle();
        !is_mounted(&world.home)
    });
    assert!(other.gc(false).unwrap().layers.is_empty());
    assert!(!is_mounted(&world.home), "it is unmounted again");
    assert_eq!(world.output_from(Origin::Snapshot(saved), "cat /file"), "saved");
}

#[test]
fn each_home_has_its_own_store() {
    let (Some(one), Some(two)) = (World::btrfs(), World::btrfs()) else { return };
    let running = [one.start(), two.start()];
    for (running, text) in running.iter().zip(["one", "two"]) {
        shell(running, &format!("echo {text} > /file"));
    }
    let snapshot = one.capture(&running[0]);
    assert_eq!(one.output_from(Origin::Snapshot(snapshot.clone()), "cat /file"), "one");
    assert!(two.engine.snapshot(&snapshot).unwrap().is_none());
    one.engine.remove(&running[0].id).unwrap();
    assert_eq!(shell(&running[1], "cat /file").out, "two");
}
