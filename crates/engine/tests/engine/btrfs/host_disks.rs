//! The btrfs store on different disks of the host: full ones, btrfs ones, and ones it grows on.

use super::*;

/// A small loop-mounted disk for a home, removed with the test.
struct HostDisk {
    folder: tempfile::TempDir,
}

impl HostDisk {
    fn new(mkfs: &str, mebibytes: u64) -> Self {
        enter_mount_namespace();
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("disk.img");
        File::create(&image).unwrap().set_len(mebibytes << 20).unwrap();
        let run = |program: &str, arguments: &[&str]| {
            assert!(
                HostCommand::new(program).args(arguments).status().unwrap().success(),
                "{program}"
            );
        };
        run(mkfs, &["-q", image.to_str().unwrap()]);
        let disk = Self { folder };
        fs::create_dir(disk.mount_point()).unwrap();
        run(
            "mount",
            &["-o", "loop", image.to_str().unwrap(), disk.mount_point().to_str().unwrap()],
        );
        disk
    }

    fn mount_point(&self) -> PathBuf {
        self.folder.path().join("host")
    }

    /// Uses all free space.
    fn fill(&self) {
        let mut file = File::create(self.mount_point().join("ballast")).unwrap();
        let block = vec![0; 1 << 20];
        while file.write_all(&block).is_ok() {}
        let _ = file.sync_all();
    }
}

impl Drop for HostDisk {
    fn drop(&mut self) {
        let _ = HostCommand::new("umount").arg("--lazy").arg(self.mount_point()).status();
    }
}

#[test]
fn a_full_host_disk_affects_only_the_writer() {
    if !is_supported() {
        return;
    }
    let disk = HostDisk::new("mkfs.ext4", 700);
    let below = disk.mount_point();
    {
        let world = World::in_folder(
            tempfile::tempdir().unwrap(),
            below.to_str().unwrap(),
            Driver::Btrfs,
            &[],
        );
        let (writer, other) = (world.start(), world.start());
        shell(&other, "echo before > /file");
        disk.fill();
        let fill = "busybox dd if=/dev/zero of=/big bs=1M 2>&1; busybox sync; echo $?";
        let said = shell(&writer, fill).out;
        assert!(said.contains("No space left on device"), "{said}");
        // Reading and deleting still work; so do snapshots, which need almost no space.
        assert_eq!(shell(&other, "cat /file").out, "before");
        let saved = world.capture(&other);
        shell(&writer, "rm /big");
        world.engine.remove(&writer.id).unwrap();
        eventually("the writer's space is free", || {
            shell(&other, "echo after > /file; busybox sync; cat /file").out == "after"
        });
        assert_eq!(shell(&other, "cat /file").out, "after");
        let last = SnapshotId::random();
        world.engine.stop_and_save(&other.id, &last).unwrap();
        fs::remove_file(below.join("ballast")).unwrap();
        assert_eq!(world.output_from(Origin::Snapshot(saved), "cat /file"), "before");
        assert_eq!(world.output_from(Origin::Snapshot(last), "cat /file"), "after");
        // After remounting, all checksums are valid.
        eventually("the store is unmounted", || {
            let _ = world.engine.stop_if_idle();
            !is_mounted(&world.home)
        });
        assert_eq!(world.engine.snapshots().unwrap().len(), 2);
        let store = world.home.join("store");
        let scrubbed =
            HostCommand::new("btrfs").args(["scrub", "start", "-Br"]).arg(&store).output().unwrap();
        let said = String::from_utf8_lossy(&scrubbed.stdout);
        assert!(scrubbed.status.success() && said.contains("no errors found"), "{said}");
    }
}

#[test]
fn a_home_on_btrfs_needs_no_store_file() {
    if !is_supported() {
        return;
    }
    let disk = HostDisk::new("mkfs.btrfs", 300);
    let below = disk.mount_point();
    let world =
        World::in_folder(tempfile::tempdir().unwrap(), below.to_str().unwrap(), Driver::Auto, &[]);
    assert_eq!(world.engine.disk_usage().unwrap().driver, StoreKind::Btrfs);
    assert!(!world.home.join("store.btrfs").exists());
    let running = world.start();
    shell(&running, "echo 1 > /file");
    let saved = world.capture(&running);
    shell(&running, "echo 2 > /file");
    let fork = world.start_from(Origin::Snapshot(saved));
    assert_eq!(shell(&fork, "cat /file").out, "1");
    let last = SnapshotId::random();
    assert_eq!(world.engine.stop_and_save(&running.id, &last).unwrap().layers.len(), 2);
    assert_eq!(world.output_from(Origin::Snapshot(last), "cat /file"), "2");
    drop(world);
    drop(disk);
}

#[test]
fn a_store_grows_before_writers_fill_it() {
    if !is_supported() {
        return;
    }
    let disk = HostDisk::new("mkfs.ext4", 1500);
    let below = disk.mount_point();
    let world =
        World::in_folder(tempfile::tempdir().unwrap(), below.to_str().unwrap(), Driver::Btrfs, &[]);
    let size = || world.home.join("store.btrfs").metadata().unwrap().len();
    let running = world.start();
    let before = size();
    let mebibytes = before / (1 << 20) * 4 / 5;
    shell(
        &running,
        &format!("busybox dd if=/dev/zero of=/big bs=1M count={mebibytes} 2>&1; busybox sync"),
    );
    eventually("the store has grown", || size() > before && free(&world.home) > before / 5);
    let said =
        shell(&running, "busybox dd if=/dev/zero of=/more bs=1M count=100 2>&1; busybox sync").out;
    assert!(!said.contains("No space"), "{said}");
    // Every block of the file is reserved.
    let metadata = world.home.join("store.btrfs").metadata().unwrap();
    let allocated = metadata.blocks() * 512;
    assert!(allocated >= metadata.len(), "{allocated} of {}", metadata.len());
    drop(world);
    drop(disk);
}

#[test]
fn a_nearly_full_home_refuses_new_sandboxes() {
    let world = World::new();
    let full = Threshold { permille: 1000, at_least_bytes: 0, at_most_bytes: u64::MAX };
    let open = |thresholds| {
        Engine::open(Config {
            home: world.home.clone(),
            cache: world.folder.path().join("cache"),
            supervisor: PathBuf::from(std::env::var_os("HARVEST_SUPERVISOR").unwrap()),
            zygote: vec![env!("CARGO_BIN_EXE_harvest-zygote").into()],
            driver: Driver::Dir,
            thresholds,
        })
        .unwrap()
    };
    let running = world.start();
    let engine = open(Thresholds { sandbox: full, ..Thresholds::NONE });
    let error = engine.start(&world.spec()).unwrap_err();
    assert!(
        matches!(&error, EngineError::DiskLow { hint, .. } if hint.contains("harvest gc")),
        "{error}"
    );
    assert!(error.to_string().contains("free in"), "{error}");
    let taken = SnapshotId::random();
    engine.capture(&running.id, &taken).expect("snapshots still work");
    let engine = open(Thresholds { snapshot: full, ..Thresholds::NONE });
    engine.capture(&running.id, &taken).expect("a retry needs no space");
    assert!(matches!(
        engine.capture(&running.id, &SnapshotId::random()),
        Err(EngineError::DiskLow { .. })
    ));
    assert_eq!(
        shell(&running, "echo on > /file; cat /file").out,
        "on",
        "running sandboxes are not affected"
    );
    engine
        .stop_and_save(&running.id, &SnapshotId::random())
        .expect("saving by rename needs no space");
}
