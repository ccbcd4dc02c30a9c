//! A home on a disk that is full or read-only.

use super::*;

/// A small file system of its own, until it is dropped.
struct SmallDisk {
    place: PathBuf,
    _folder: tempfile::TempDir,
}

impl SmallDisk {
    /// One with a world whose home is on it, in the order in which they must not be dropped.
    fn with_world() -> (Self, World) {
        let folder = tempfile::tempdir().unwrap();
        let (image, place) = (folder.path().join("image"), folder.path().join("disk"));
        fs::create_dir(&place).unwrap();
        fs::File::create(&image).unwrap().set_len(48 << 20).unwrap();
        let run =
            |command: &mut HostCommand| assert!(command.status().unwrap().success(), "{command:?}");
        run(HostCommand::new("mkfs.ext4").args(["-q", "-m", "0"]).arg(&image));
        run(HostCommand::new("mount").args(["-o", "loop"]).arg(&image).arg(&place));
        let disk = Self { place, _folder: folder };
        let world =
            World::in_home(tempfile::tempdir().unwrap(), disk.place.join("home"), Driver::Dir, &[]);
        (disk, world)
    }

    fn remount(&self, how: &str) {
        let how = format!("remount,{how}");
        // Somebody who is just dying may have something open still.
        eventually(&how, || {
            let done = HostCommand::new("mount").args(["-o", &how]).arg(&self.place).output();
            done.unwrap().status.success()
        });
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Nothing uses it any more, or the test has failed already: no mount and no loop device stays.
        let unmounted = HostCommand::new("umount")
            .args(thread::panicking().then_some("-l"))
            .arg(&self.place)
            .status();
        assert!(thread::panicking() || unmounted.unwrap().success());
    }
}

const FILL: &str =
    "cat /dev/zero > /tmp/fill; i=0; while echo x > /tmp/small-$i; do i=$((i+1)); done";

#[test]
fn a_full_disk_is_the_writers_trouble_and_everything_can_be_cleaned_up_on_it() {
    let (_disk, world) = SmallDisk::with_world();
    let [writer, neighbour] = [world.start(), world.start()];
    shell(&writer, "echo work > /file");
    let before = SnapshotId::random();
    world.engine.capture(&writer.id, &before).unwrap();
    let said = shell(&writer, FILL);
    assert!(said.err.contains("No space left on device"), "{said:?}");
    // Both go on with what needs no room.
    for running in [&writer, &neighbour] {
        assert_eq!(shell(running, "echo on; cat /bin/busybox | wc -c > /dev/null").out, "on");
    }
    // What needs room is refused with a reason, and leaves nothing.
    let listed = world.engine.list().unwrap().len();
    let refused = world.engine.start(&world.spec()).unwrap_err();
    assert!(reasons(&refused).contains("No space left"), "{refused:?}");
    assert_eq!(world.engine.list().unwrap().len(), listed);
    let refused = world.engine.capture(&writer.id, &SnapshotId::random()).unwrap_err();
    assert!(reasons(&refused).contains("No space left"), "{refused:?}");
    assert_eq!(shell(&writer, "cat /file").out, "work");
    // Cleaning up needs none, not even with another zygote.
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
fn a_sandbox_on_a_full_disk_can_be_ended_with_its_disk_kept_once_there_is_room() {
    let (disk, world) = SmallDisk::with_world();
    fs::write(disk.place.join("ballast"), vec![0; 4 << 20]).unwrap();
    let running = world.start();
    shell(&running, "echo work > /file");
    shell(&running, FILL);
    let snapshot = SnapshotId::random();
    // A rename and a line of text: may fit or not, and nothing is lost either way.
    if let Err(error) = world.engine.end_kept(&running.id, &snapshot) {
        assert!(reasons(&error).contains("No space left"), "{error:?}");
        fs::remove_file(disk.place.join("ballast")).unwrap();
        world.engine.end_kept(&running.id, &snapshot).unwrap();
    }
    let layer = world.engine.snapshot(&snapshot).unwrap().unwrap().layers.pop().unwrap();
    let kept = world.home.join("layers").join(layer.as_str()).join("file");
    assert_eq!(fs::read_to_string(kept).unwrap(), "work\n");
}

fn reasons(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[test]
fn a_read_only_home_is_refused_by_name_and_can_be_looked_at() {
    let (disk, world) = SmallDisk::with_world();
    let running = world.start();
    world.engine.kill(&running.id).unwrap();
    world.engine.rest().unwrap();
    eventually("the zygote is gone", || world.zygotes().is_empty());
    disk.remount("ro");
    let refused = world.engine.start(&world.spec()).unwrap_err();
    assert!(reasons(&refused).contains("Read-only file system"), "{refused:?}");
    assert!(reasons(&refused).contains("home"), "{refused:?}");
    assert_eq!(world.engine.list().unwrap(), std::slice::from_ref(&running.id));
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    let error =
        Engine::open(Config { home: disk.place.join("another"), ..world.config() }).unwrap_err();
    assert!(error.to_string().contains("another"), "{error}");
    disk.remount("rw");
    world.engine.remove(&running.id).unwrap();
    assert_eq!(shell(&world.start(), "echo on").out, "on");
}
