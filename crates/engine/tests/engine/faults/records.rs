//! Records that are corrupt or of another boot are reported and removable, and no live process is
//! mistaken for theirs.

use super::*;

impl World {
    fn record(&self, id: &SandboxId, name: &str) -> PathBuf {
        self.home.join("sandboxes").join(id.part()).join(name)
    }
}

#[test]
fn corrupt_record_is_named_and_sandbox_removable() {
    for file in ["state.json", "record.json"] {
        for text in ["", "{\"state\":\"runn", "\0\0\0\0", "[]"] {
            let world = World::new();
            let [running, other] = [world.start(), world.start()];
            let range = range(&running);
            let path = world.record(&running.id, file);
            fs::write(&path, text).unwrap();
            assert_eq!(world.engine.list().unwrap().len(), 2);
            let error = if file == "state.json" {
                world.engine.find(&running.id).unwrap_err()
            } else {
                world.engine.gc(true).unwrap_err()
            };
            assert!(error.to_string().contains(file), "{error}");
            // Other sandboxes are not affected.
            let owners = world.engine.owners().unwrap();
            let listed: Vec<_> = owners.into_iter().map(|(id, ..)| id).collect();
            assert_eq!(listed.contains(&running.id), file == "state.json", "{listed:?}");
            assert!(listed.contains(&other.id), "{listed:?}");
            assert_eq!(shell(&other, "echo on").out, "on");
            world.start();
            world.engine.remove(&running.id).unwrap();
            assert_eq!(processes_of(range), [0u32; 0], "{file} {text:?}");
            assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
            world.engine.gc(true).unwrap();
        }
    }
}

#[test]
fn corrupt_record_does_not_block_the_next_zygote() {
    let world = World::new();
    let [corrupt, whole] = [world.start(), world.start()];
    let range = range(&corrupt);
    fs::write(world.record(&corrupt.id, "state.json"), "{").unwrap();
    assert!(world.zygotes().into_iter().all(|pid| signal(pid, "-9")));
    world.engine.start(&world.spec()).unwrap();
    assert_eq!(shell(&whole, "echo on").out, "on");
    // Without a readable state the sandbox cannot be adopted, so it is killed.
    eventually("the unknown sandbox to end", || processes_of(range).is_empty());
    world.engine.remove(&corrupt.id).unwrap();
}

#[test]
fn sandbox_with_empty_state_is_found_dead() {
    let world = World::new();
    let running = world.start();
    world.engine.kill(&running.id).unwrap();
    world.engine.stop_if_idle().unwrap();
    eventually("the zygote to exit", || world.zygotes().is_empty());
    fs::write(world.record(&running.id, "state.json"), "").unwrap();
    let found = world.engine.find(&running.id).unwrap();
    assert!(
        matches!(&found, SandboxState::Dead { reason } if reason.contains("state.json")),
        "{found:?}"
    );
    world.engine.restart(&running.id).unwrap();
}

#[test]
fn sandbox_with_unrecorded_end_can_be_restarted() {
    let world = World::new();
    let [running, _other] = [world.start(), world.start()];
    let state = fs::read(world.record(&running.id, "state.json")).unwrap();
    world.engine.kill(&running.id).unwrap();
    fs::write(world.record(&running.id, "state.json"), state).unwrap();
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    let restarted = world.engine.restart(&running.id).unwrap();
    assert_eq!(shell(&restarted, "echo on").out, "on");
    assert!(matches!(world.engine.restart(&running.id), Err(EngineError::Exists { .. })));
}

#[test]
fn record_of_another_boot_is_dead() {
    let world = World::new();
    let running = world.start();
    world.engine.kill(&running.id).unwrap();
    world.engine.stop_if_idle().unwrap();
    eventually("the zygote to exit", || world.zygotes().is_empty());
    // As after a power cut: the state says `running`, and its pid now belongs to another process.
    let mut unrelated = Sleeper::new();
    let stat = fs::read_to_string(format!("/proc/{}/stat", unrelated.0.id())).unwrap();
    let started: u64 =
        stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
    let state = serde_json::json!({
        "state": "running", "boot": "another", "pid": unrelated.0.id(), "started": started,
        "first_id": 0x7000_0000u32, "owner_started": null,
    });
    fs::write(world.record(&running.id, "state.json"), state.to_string()).unwrap();
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    world.engine.kill(&running.id).unwrap();
    let snapshot = SnapshotId::random();
    world.engine.stop_and_save(&running.id, &snapshot).unwrap();
    assert!(unrelated.0.try_wait().unwrap().is_none(), "the unrelated process is alive");
}
