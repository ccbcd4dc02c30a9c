//! kill -9 of every participant, at pseudo-random moments that are the same in every run.

use super::*;

#[test]
fn killed_zygote_is_replaced_without_losing_sandboxes() {
    let world = World::new();
    let mut random = Random(7);
    let mut kept = world.start();
    for round in 0..24 {
        let act = random.below(4);
        let operation = thread::spawn({
            let (engine, spec, id) = (world.engine.clone(), world.spec(), kept.id.clone());
            move || match act {
                0 => engine.start(&spec).map(|running| engine.remove(&running.id)).map(drop),
                1 => engine.capture(&id, &SnapshotId::random()).map(drop),
                2 => engine.freeze(&id).and_then(|()| engine.thaw(&id)),
                _ => engine.remove(&id),
            }
        });
        thread::sleep(Duration::from_micros(random.below(6000)));
        for pid in world.zygotes() {
            signal(pid, "-9");
        }
        let result = operation.join().unwrap();
        // The operation may fail, with a reason; an existing sandbox survives or is gone.
        if act == 3 {
            world.engine.remove(&kept.id).unwrap();
            assert_eq!(
                world.engine.find(&kept.id).unwrap(),
                SandboxState::Gone,
                "{round}: {result:?}"
            );
            kept = world.start();
        }
        let output =
            exec(&kept, Command { timeout_millis: Some(30_000), ..command(&["echo", "on"]) });
        assert_eq!(output.out, "on", "{round}: {act} {result:?} {output:?}");
    }
    for id in world.engine.list().unwrap() {
        world.engine.remove(&id).unwrap();
    }
    world.engine.gc(false).unwrap();
}

#[test]
fn killing_pid_1_ends_sandbox_and_keeps_disk() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let command_thread = thread::spawn({
        let bridge = running.bridge.clone();
        let script = "echo work > /file; (setsid sleep 1000 &); sleep 1000";
        move || {
            SupervisorClient::dial(&bridge).unwrap().exec(
                command(&["sh", "-c", script]),
                &[],
                &mut |_, _| {},
            )
        }
    });
    eventually("the command to write its file", || shell(&running, "cat /file").out == "work");
    assert!(signal(running.pid, "-9"));
    assert!(command_thread.join().unwrap().is_err(), "the caller gets an error");
    assert_eq!(world.engine.wait(&running.id).unwrap(), "signal 9");
    assert_eq!(processes_of(range), [0u32; 0]);
    let snapshot = SnapshotId::random();
    world.engine.stop_and_save(&running.id, &snapshot).unwrap();
    let again =
        world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
    assert_eq!(shell(&again, "cat /file").out, "work");
}

#[test]
fn freeze_ends_when_caller_and_zygote_die() {
    let world = World::new();
    let running = world.start();
    for with_zygote in [false, true] {
        let caller = Caller::new(&world, "freeze", &running.id, &SnapshotId::random());
        eventually("the freeze", || world.is_frozen(&running.id));
        caller.kill();
        if with_zygote {
            assert!(world.zygotes().into_iter().all(|pid| signal(pid, "-9")));
            // The next request starts the next zygote, which knows of no freeze.
            assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Running(_)));
            world.engine.start(&world.spec()).unwrap();
        }
        eventually("the thaw", || !world.is_frozen(&running.id));
        assert_eq!(shell(&running, "echo on").out, "on");
    }
}

impl World {
    /// Whether a sandbox's work is frozen.
    pub(super) fn is_frozen(&self, id: &SandboxId) -> bool {
        let states = self.groups_of(id).into_iter().flat_map(|group| {
            ["freezer.state", "cgroup.freeze"].map(|file| group.join("work").join(file))
        });
        states
            .filter_map(|file| fs::read_to_string(file).ok())
            .any(|text| matches!(text.trim(), "FROZEN" | "1"))
    }
}

#[test]
fn interrupted_capture_thaws_sandbox_and_keeps_snapshots() {
    let world = World::new();
    let running = world.start();
    shell(
        &running,
        "mkdir /many; i=0; while [ $i -lt 400 ]; do echo $i > /many/$i; i=$((i+1)); done",
    );
    let mut random = Random(11);
    for round in 0..4 {
        let taken = world.engine.snapshots().unwrap().len();
        let caller = Caller::new(&world, "capture", &running.id, &SnapshotId::random());
        eventually("a capture", || world.engine.snapshots().unwrap().len() > taken);
        shell(&running, &format!("echo {round} > /round; touch /many/*"));
        thread::sleep(Duration::from_micros(random.below(20_000)));
        caller.kill();
        // Without a timeout a command would wait for the thaw, however late.
        let output =
            exec(&running, Command { timeout_millis: Some(30_000), ..command(&["cat", "/round"]) });
        assert_eq!(output.out, round.to_string(), "{output:?}");
    }
    let last = SnapshotId::random();
    world.engine.capture(&running.id, &last).unwrap();
    world.engine.gc(false).unwrap();
    let partial: Vec<_> = fs::read_dir(world.home.join("partial")).unwrap().collect();
    assert!(partial.is_empty(), "{partial:?}");
    // The last snapshot and another one are complete.
    let some = world.engine.snapshots().unwrap().swap_remove(0).id;
    for snapshot in [last, some] {
        let again =
            world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
        assert_eq!(shell(&again, "ls /many | wc -l").out, "400");
    }
}

#[test]
fn interrupted_stop_and_save_is_finished_by_retry() {
    let world = World::new();
    let mut random = Random(13);
    for round in 0..10 {
        let running = world.start();
        shell(&running, &format!("echo {round} > /file"));
        let snapshot = SnapshotId::random();
        let caller = Caller::new(&world, "stop_and_save", &running.id, &snapshot);
        // From before it begins until after its end: stopping takes a few milliseconds.
        thread::sleep(Duration::from_micros(5000 + random.below(20_000)));
        caller.kill();
        let kept = world.engine.stop_and_save(&running.id, &snapshot).unwrap();
        assert_eq!(kept.id, snapshot);
        let again =
            world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
        assert_eq!(shell(&again, "cat /file").out, round.to_string());
        world.engine.remove(&again.id).unwrap();
        assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
    }
}

#[test]
fn concurrent_callers_start_one_zygote() {
    let world = World::new();
    let started: Vec<Running> = thread::scope(|scope| {
        let starts: Vec<_> = (0..6).map(|_| scope.spawn(|| world.start())).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    assert_eq!(world.zygotes().len(), 1);
    for running in started {
        assert_eq!(shell(&running, "echo on").out, "on");
    }
}

#[test]
fn sandbox_can_be_removed_during_commands() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let commands: Vec<_> = (0..4)
        .map(|_| {
            let bridge = running.bridge.clone();
            let endless =
                command(&["sh", "-c", "echo up; while :; do echo $RANDOM > /tmp/x; done"]);
            let (sender, receiver) = std::sync::mpsc::channel();
            let running = thread::spawn(move || {
                let mut client = SupervisorClient::dial(&bridge).unwrap();
                client.exec(endless, &[], &mut |_, _| sender.send(()).unwrap_or(()))
            });
            receiver.recv().unwrap();
            running
        })
        .collect();
    world.engine.remove(&running.id).unwrap();
    for command in commands {
        assert!(command.join().unwrap().is_err(), "the bridge broke");
    }
    assert_eq!(processes_of(range), [0u32; 0]);
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
}

#[test]
fn killed_pid_1_of_frozen_sandbox_is_noticed() {
    let world = World::new();
    for with_zygote in [false, true] {
        let running = world.start();
        let range = range(&running);
        shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
        world.engine.freeze_for(&running.id, Duration::from_secs(600)).unwrap();
        if with_zygote {
            assert!(world.zygotes().into_iter().all(|pid| signal(pid, "-9")));
        }
        assert!(signal(running.pid, "-9"));
        // The next request starts the next zygote.
        let _ = world.engine.thaw(&SandboxId::random());
        let is_dead = || matches!(world.engine.find(&running.id), Ok(SandboxState::Dead { .. }));
        eventually("the end of the sandbox", is_dead);
        assert_eq!(processes_of(range), [0u32; 0]);
    }
}

#[test]
fn externally_frozen_sandbox_can_be_killed() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
    for group in world.groups_of(&running.id) {
        let work = group.join("work");
        for (file, value) in [("freezer.state", "FROZEN"), ("cgroup.freeze", "1")] {
            if work.join(file).exists() {
                fs::write(work.join(file), value).unwrap();
            }
        }
    }
    eventually("the freeze", || world.is_frozen(&running.id));
    world.engine.remove(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
}

#[test]
fn freeze_during_kill_does_not_block_it() {
    let world = World::new();
    for _ in 0..4 {
        let running = world.start();
        let range = range(&running);
        // Many processes take a while to die.
        shell(
            &running,
            "i=0; while [ $i -lt 200 ]; do (sleep 1000 >/dev/null 2>&1 &); i=$((i+1)); done",
        );
        let (engine, id) = (world.engine.clone(), running.id.clone());
        // Like a capture at the end of a turn whose session is deleted, repeatedly.
        let freezing =
            thread::spawn(
                move || while engine.freeze(&id).and_then(|()| engine.thaw(&id)).is_ok() {},
            );
        world.engine.remove(&running.id).unwrap();
        freezing.join().unwrap();
        assert_eq!(processes_of(range), [0u32; 0]);
    }
}
