//! A home on a disk that is full or read-only.

use super::*;

/// A small mounted file system, unmounted when dropped.
struct SmallDisk {
    mount_point: PathBuf,
    _folder: tempfile::TempDir,
}

impl SmallDisk {
    /// A disk and a world whose home is on it; the world must be dropped first.
    fn with_world() -> (Self, World) {
        let folder = tempfile::tempdir().unwrap();
        let (image, mount_point) = (folder.path().join("image"), folder.path().join("disk"));
        fs::create_dir(&mount_point).unwrap();
        fs::File::create(&image).unwrap().set_len(48 << 20).unwrap();
        let run =
            |command: &mut HostCommand| assert!(command.status().unwrap().success(), "{command:?}");
        run(HostCommand::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        run(HostCommand::new("mount").args(["-o", "loop"]).arg(&image).arg(&mount_point));
        let disk = Self { mount_point, _folder: folder };
        let world = World::in_home(
            tempfile::tempdir().unwrap(),
            disk.mount_point.join("home"),
            Driver::Dir,
            &[],
        );
        (disk, world)
    }

    fn remount(&self, options: &str) {
        let options = format!("remount,{options}");
        // A dying process may still have a file open.
        eventually(&options, || {
            let done =
                HostCommand::new("mount").args(["-o", &options]).arg(&self.mount_point).output();
            done.unwrap().status.success()
        });
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Unused by now, or the test has failed already: no mount and no loop device may stay.
        let unmounted = HostCommand::new("umount")
            .args(thread::panicking().then_some("-l"))
            .arg(&self.mount_point)
            .status();
        assert!(thread::panicking() || unmounted.unwrap().success());
    }
}

const FILL: &str =
    "cat /dev/zero > /tmp/fill; i=0; while echo x > /tmp/small-$i; do i=$((i+1)); done";

#[test]
fn full_disk_affects_only_writers_and_allows_cleanup() {
    let (_disk, world) = SmallDisk::with_world();
    let [writer, neighbour] = [world.start(), world.start()];
    shell(&writer, "echo work > /file");
    let before = SnapshotId::random();
    world.engine.capture(&writer.id, &before).unwrap();
    let output = shell(&writer, FILL);
    assert!(output.err.contains("No space left on device"), "{output:?}");
    // Both sandboxes continue with work that needs no space.
    for running in [&writer, &neighbour] {
        assert_eq!(shell(running, "echo on; cat /bin/busybox | wc -c > /dev/null").out, "on");
    }
    // Operations that need space are refused with a reason and leave nothing.
    let listed = world.engine.list().unwrap().len();
    let refused = world.engine.start(&world.spec()).unwrap_err();
    assert!(error_chain(&refused).contains("No space left"), "{refused:?}");
    assert_eq!(world.engine.list().unwrap().len(), listed);
    let refused = world.engine.capture(&writer.id, &SnapshotId::random()).unwrap_err();
    assert!(error_chain(&refused).contains("No space left"), "{refused:?}");
    assert_eq!(shell(&writer, "cat /file").out, "work");
    // Cleanup needs no space, not even with a new zygote.
    assert!(world.zygotes().into_iter().all(|pid| signal(pid, "-9")));
    world.engine.kill(&neighbour.id).unwrap();
    world.engine.remove(&neighbour.id).unwrap();
    world.engine.remove(&writer.id).unwrap();
    world.engine.gc(false).unwrap();
    let again =
        world.engine.start(&Spec { from: Origin::Snapshot(before), ..world.spec() }).unwrap();
    assert_eq!(shell(&again, "cat /file").out, "work");
}

#[test]
fn stop_and_save_succeeds_after_freeing_space() {
    let (disk, world) = SmallDisk::with_world();
    fs::write(disk.mount_point.join("ballast"), vec![0; 4 << 20]).unwrap();
    let running = world.start();
    shell(&running, "echo work > /file");
    shell(&running, FILL);
    let snapshot = SnapshotId::random();
    // A rename and a line of text: may or may not fit, and nothing is lost either way.
    if let Err(error) = world.engine.stop_and_save(&running.id, &snapshot) {
        assert!(error_chain(&error).contains("No space left"), "{error:?}");
        fs::remove_file(disk.mount_point.join("ballast")).unwrap();
        world.engine.stop_and_save(&running.id, &snapshot).unwrap();
    }
    let layer = world.engine.snapshot(&snapshot).unwrap().unwrap().layers.pop().unwrap();
    let saved = world.home.join("layers").join(layer.as_str()).join("file");
    assert_eq!(fs::read_to_string(saved).unwrap(), "work\n");
}

fn error_chain(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[test]
fn read_only_home_refuses_starts_but_allows_inspection() {
    let (disk, world) = SmallDisk::with_world();
    let running = world.start();
    world.engine.kill(&running.id).unwrap();
    world.engine.stop_if_idle().unwrap();
    eventually("the zygote to exit", || world.zygotes().is_empty());
    disk.remount("ro");
    let refused = world.engine.start(&world.spec()).unwrap_err();
    assert!(error_chain(&refused).contains("Read-only file system"), "{refused:?}");
    assert!(error_chain(&refused).contains("home"), "{refused:?}");
    assert_eq!(world.engine.list().unwrap(), std::slice::from_ref(&running.id));
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    let error = Engine::open(Config { home: disk.mount_point.join("another"), ..world.config() })
        .unwrap_err();
    assert!(error.to_string().contains("another"), "{error}");
    disk.remount("rw");
    world.engine.remove(&running.id).unwrap();
    assert_eq!(shell(&world.start(), "echo on").out, "on");
}
