//! Snapshots and image layers of real sandboxes.

use harvest_engine::{Baseline, Change, Image, LayerId, copy_tree, random_name};
use harvest_proto::{ImageId, SnapshotId, Timestamp};

use super::*;

impl World {
    pub(crate) fn start_from(&self, from: Origin) -> Running {
        self.engine.start(&Spec { id: SandboxId::random(), from, ..self.spec() }).unwrap()
    }

    pub(crate) fn output_from(&self, from: Origin, script: &str) -> String {
        let running = self.start_from(from);
        let said = shell(&running, script);
        self.engine.remove(&running.id).unwrap();
        said.out
    }

    /// Makes an image of the tests' own file tree, with one more layer for each script.
    pub(crate) fn make_image(&self, name: &str, scripts: &[&str]) -> Image {
        let cache = self.engine.layer_cache().unwrap();
        let commit = |folder: &Path| -> LayerId {
            let layer = random_name().parse().unwrap();
            cache.commit(folder, &layer).unwrap();
            layer
        };
        let root = cache.create_folder().unwrap();
        copy_tree(&self.folder.path().join("cache/layers/base"), &root).unwrap();
        let mut layers = vec![commit(&root)];
        let env = [("PATH".to_owned(), "/bin".to_owned())];
        let config = ImageConfig { env: env.into(), ..ImageConfig::default() };
        for script in scripts {
            let from = Origin::Layers { layers: layers.clone(), config: config.clone() };
            let running = self.start_from(from);
            shell(&running, script);
            let folder = cache.create_folder().unwrap();
            cache.take_changes(&running.id, &folder).unwrap();
            self.engine.remove(&running.id).unwrap();
            layers.push(commit(&folder));
        }
        let image = Image {
            id: ImageId::random(),
            name: name.to_owned(),
            bytes: cache.tree_bytes(&layers).unwrap(),
            layers,
            config,
            recipe_key: random_name(),
            created_at: Timestamp::from(std::time::SystemTime::now()),
            source: "test".to_owned(),
        };
        cache.write_image(&image).unwrap();
        image
    }
}

#[test]
fn comparing_snapshots_lists_the_changes_between_them() {
    for world in World::each() {
        let capture = |running: &Running| {
            let snapshot = SnapshotId::random();
            world.engine.capture(&running.id, &snapshot).unwrap();
            snapshot
        };
        let running = world.start();
        shell(
            &running,
            "echo 1 > /file; mkdir /folder; echo kept > /folder/kept; echo same > /same",
        );
        let first = capture(&running);
        shell(
            &running,
            "echo 22 > /file; rm /folder/kept; rm /bin/wc; touch /same; echo same > /same",
        );
        let second = capture(&running);
        let again = world.start_from(Origin::Snapshot(second.clone()));
        shell(&again, "rm -r /folder; mkdir /folder; echo 1 > /folder/new");
        let third = capture(&again);
        let changes = |before: &Baseline, after: &SnapshotId| {
            let found = world.engine.changes(before, after, 100).unwrap();
            let line = |change: &Change| format!("{:?} {}", change.kind, change.path.display());
            found.entries.iter().map(line).collect::<Vec<_>>()
        };
        let of = |snapshot: &SnapshotId| Baseline::Snapshot(snapshot.clone());
        assert_eq!(
            changes(&of(&first), &second),
            ["Changed file", "Removed bin/wc", "Removed folder/kept"]
        );
        assert_eq!(changes(&of(&second), &third), ["Added folder/new"]);
        assert_eq!(changes(&Baseline::StartOf(third.clone()), &third), ["Added folder/new"]);
        let all = changes(&Baseline::StartOf(first.clone()), &third);
        for line in
            ["Added file", "Added same", "Removed bin/wc", "Added folder", "Added folder/new"]
        {
            assert!(all.contains(&line.to_owned()), "{line}: {all:?}");
        }
        assert_eq!(changes(&of(&third), &third), Vec::<String>::new());
        for running in [running, again] {
            world.engine.remove(&running.id).unwrap();
        }
    }
}

#[test]
fn each_snapshot_has_the_disk_of_its_time() {
    for world in World::each() {
        has_the_disk_of_its_time(&world);
    }
}

fn has_the_disk_of_its_time(world: &World) {
    let running = world.start();
    shell(&running, "echo 1 > /file; mkdir /folder; echo kept > /folder/kept; rm /bin/wc");
    let first = SnapshotId::random();
    let captured = world.engine.capture(&running.id, &first).unwrap();
    assert_eq!(captured.snapshot.layers.len(), 2);
    let said = shell(&running, "echo 2 > /file; rm -r /folder; mkdir /folder; echo on");
    assert_eq!(said.out, "on", "the sandbox runs on after a capture");
    let second = SnapshotId::random();
    world.engine.capture(&running.id, &second).unwrap();
    shell(&running, "echo 3 > /file");
    let last = SnapshotId::random();
    world.engine.stop_and_save(&running.id, &last).unwrap();
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
    let look = "cat /file; ls /folder; ls /bin/wc 2>/dev/null";
    assert_eq!(world.output_from(Origin::Snapshot(first), look), "1\nkept");
    assert_eq!(world.output_from(Origin::Snapshot(second), look), "2");
    assert_eq!(world.output_from(Origin::Snapshot(last.clone()), look), "3");
    assert_eq!(world.engine.stop_and_save(&running.id, &last).unwrap().id, last);
}

#[test]
fn a_dead_sandboxs_disk_can_be_saved() {
    for world in World::each() {
        can_be_saved(&world);
    }
}

fn can_be_saved(world: &World) {
    let running = world.start();
    shell(&running, "echo work > /file");
    assert!(
        HostCommand::new("kill").args(["-9", &running.pid.to_string()]).status().unwrap().success()
    );
    world.engine.wait(&running.id).unwrap();
    let snapshot = SnapshotId::random();
    world.engine.stop_and_save(&running.id, &snapshot).unwrap();
    assert_eq!(world.output_from(Origin::Snapshot(snapshot), "cat /file"), "work");
}

#[test]
fn a_capture_freezes_the_writer() {
    for world in World::each() {
        freezes_the_writer(&world);
    }
}

fn freezes_the_writer(world: &World) {
    let running = world.start();
    // Two files that are written in turn: in an inconsistent capture their numbers are far apart.
    let script = "i=0; while :; do i=$((i+1)); echo $i > /tmp/a; echo $i > /tmp/b; done";
    let writer = thread::spawn({
        let running = running.clone();
        move || {
            let endless =
                Command { timeout_millis: Some(60_000), ..command(&["sh", "-c", script]) };
            exec(&running, endless)
        }
    });
    eventually("the writer writes", || !shell(&running, "cat /tmp/b 2>/dev/null").out.is_empty());
    for _ in 0..5 {
        let id = SnapshotId::random();
        world.engine.capture(&running.id, &id).unwrap();
        let seen = world.output_from(Origin::Snapshot(id), "cat /tmp/a; echo; cat /tmp/b");
        let numbers: Vec<i64> =
            seen.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        // A file is empty between truncating and writing; then there is nothing to compare.
        if let [first, second] = numbers[..] {
            assert!((0..=1).contains(&(first - second)), "{seen}");
        }
    }
    world.engine.kill(&running.id).unwrap();
    // The thread fails, because the kill breaks its connection.
    let _ = writer.join();
}

#[test]
fn changes_of_a_sandbox_become_an_image_layer() {
    for world in World::each() {
        let image = world.make_image("small", &["echo hello > /made; rm /bin/wc"]);
        assert_eq!(image.layers.len(), 2);
        let script = "cat /made; ls /bin | grep -c '^wc$'";
        assert_eq!(world.output_from(Origin::Image("small".to_owned()), script), "hello\n0");
        assert!(world.engine.list().unwrap().is_empty());
    }
}

#[test]
fn gc_removes_unused_layers_but_not_running_ones() {
    let world = World::new();
    let image = world.make_image("small", &["echo hello > /made"]);
    let running = world.start_from(Origin::Image("small".to_owned()));
    world.engine.image_remove("small").unwrap();
    world.engine.capture(&running.id, &SnapshotId::random()).unwrap();
    let collected = world.engine.gc(false).unwrap();
    // No record refers to the tests' base layer: the image has a copy of it.
    let names: Vec<_> = collected.layers.iter().map(ToString::to_string).collect();
    assert_eq!(names, ["base"]);
    assert_eq!(shell(&running, "cat /made").out, "hello");
    world.engine.remove(&running.id).unwrap();
    for snapshot in world.engine.snapshots().unwrap() {
        world.engine.snapshot_remove(&snapshot.id).unwrap();
    }
    let collected = world.engine.gc(false).unwrap();
    assert!(image.layers.iter().all(|layer| collected.layers.contains(layer)), "{collected:?}");
    // The world's cleanup needs the base layer.
    fs::create_dir(world.folder.path().join("cache/layers/base")).unwrap();
}

// Unmounting an overlay syncs its disk, which takes longer than a start.
#[test]
fn saved_layer_is_unmounted_before_the_next_start() {
    btrfs::enter_mount_namespace();
    let world = World::new();
    let running = world.start();
    shell(&running, "busybox dd if=/dev/zero of=/large bs=1M count=64 2>/dev/null");
    let snapshot = world.engine.stop_and_save(&running.id, &SnapshotId::random()).unwrap();
    let from = Origin::Snapshot(snapshot.id.clone());
    world.engine.start(&Spec { from, ..world.spec() }).unwrap();
    let layer = world.home.join("layers").join(snapshot.layers.last().unwrap().as_str());
    let at = tempfile::tempdir().unwrap();
    for name in ["upper", "work", "mnt"] {
        fs::create_dir(at.path().join(name)).unwrap();
    }
    // With an index the kernel refuses a layer that another overlay writes to.
    let options = format!(
        "index=on,lowerdir={},upperdir={at}/upper,workdir={at}/work",
        layer.display(),
        at = at.path().display()
    );
    let mounted = HostCommand::new("mount")
        .args(["-t", "overlay", "overlay", "-o", &options])
        .arg(at.path().join("mnt"))
        .output()
        .unwrap();
    assert!(mounted.status.success(), "{mounted:?}");
    assert!(HostCommand::new("umount").arg(at.path().join("mnt")).status().unwrap().success());
}
