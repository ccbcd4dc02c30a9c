//! Records that are torn, garbled or of another boot: found, named, removable; nothing that lives is
//! mistaken for what they tell of.

use super::*;

impl World {
    fn record(&self, id: &SandboxId, name: &str) -> PathBuf {
        self.home.join("sandboxes").join(id.part()).join(name)
    }
}

#[test]
fn a_garbled_record_is_named_and_its_sandbox_can_be_removed() {
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
            // Others are not held up by it.
            let of = world.engine.list_of(Owner::Kept).unwrap();
            assert_eq!(of.contains(&running.id), file == "state.json", "{of:?}");
            assert!(of.contains(&other.id), "{of:?}");
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
fn a_garbled_record_does_not_keep_the_next_zygote_from_its_work() {
    let world = World::new();
    let [garbled, whole] = [world.start(), world.start()];
    let range = range(&garbled);
    fs::write(world.record(&garbled.id, "state.json"), "{").unwrap();
    assert!(world.zygotes().into_iter().all(|pid| signal(pid, "-9")));
    world.engine.start(&world.spec()).unwrap();
    assert_eq!(shell(&whole, "echo on").out, "on");
    // Nobody knows whose it is: it has no owner, so it ends.
    eventually("what nobody can tell of is ended", || processes_of(range).is_empty());
    world.engine.remove(&garbled.id).unwrap();
}

#[test]
fn what_ran_when_the_power_was_cut_is_found_dead_whatever_is_left_of_its_state() {
    let world = World::new();
    let running = world.start();
    world.engine.kill(&running.id).unwrap();
    world.engine.rest().unwrap();
    eventually("the zygote is gone", || world.zygotes().is_empty());
    fs::write(world.record(&running.id, "state.json"), "").unwrap();
    let found = world.engine.find(&running.id).unwrap();
    assert!(
        matches!(&found, SandboxState::Dead { reason } if reason.contains("state.json")),
        "{found:?}"
    );
    world.engine.start_again(&running.id).unwrap();
}

#[test]
fn a_sandbox_whose_end_found_no_room_on_the_disk_can_be_started_again() {
    let world = World::new();
    let [running, _other] = [world.start(), world.start()];
    let state = fs::read(world.record(&running.id, "state.json")).unwrap();
    world.engine.kill(&running.id).unwrap();
    fs::write(world.record(&running.id, "state.json"), state).unwrap();
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    let again = world.engine.start_again(&running.id).unwrap();
    assert_eq!(shell(&again, "echo on").out, "on");
    assert!(matches!(world.engine.start_again(&running.id), Err(EngineError::Exists { .. })));
}

#[test]
fn a_record_of_another_boot_tells_of_no_living_process() {
    let world = World::new();
    let running = world.start();
    world.engine.kill(&running.id).unwrap();
    world.engine.rest().unwrap();
    eventually("the zygote is gone", || world.zygotes().is_empty());
    // As after a power cut: it says that it runs, and by chance its pid is somebody's again.
    let mut bystander = Sleeper::new();
    let stat = fs::read_to_string(format!("/proc/{}/stat", bystander.0.id())).unwrap();
    let started: u64 =
        stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
    let state = serde_json::json!({
        "state": "running", "boot": "another", "pid": bystander.0.id(), "started": started,
        "first_id": 0x7000_0000u32, "owner_started": null,
    });
    fs::write(world.record(&running.id, "state.json"), state.to_string()).unwrap();
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    world.engine.kill(&running.id).unwrap();
    let snapshot = SnapshotId::random();
    world.engine.end_kept(&running.id, &snapshot).unwrap();
    assert!(bystander.0.try_wait().unwrap().is_none(), "the bystander lives");
}
