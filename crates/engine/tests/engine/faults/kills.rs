//! kill -9 of whoever takes part, at moments that look random and are the same in every run.

use super::*;

#[test]
fn a_zygote_killed_during_anything_is_replaced_and_nothing_is_lost() {
    let world = World::new();
    let mut dice = Dice(7);
    let mut kept = world.start();
    for round in 0..24 {
        let act = dice.below(4);
        let acting = thread::spawn({
            let (engine, spec, id) = (world.engine.clone(), world.spec(), kept.id.clone());
            move || match act {
                0 => engine.start(&spec).map(|running| engine.remove(&running.id)).map(drop),
                1 => engine.capture(&id, &SnapshotId::random()).map(drop),
                2 => engine.freeze(&id).and_then(|()| engine.thaw(&id)),
                _ => engine.remove(&id),
            }
        });
        thread::sleep(Duration::from_micros(dice.below(6000)));
        for pid in world.zygotes() {
            signal(pid, "-9");
        }
        let result = acting.join().unwrap();
        // What was under way may fail, with a reason; whatever was there before goes on, or is gone.
        if act == 3 {
            world.engine.remove(&kept.id).unwrap();
            assert_eq!(
                world.engine.find(&kept.id).unwrap(),
                SandboxState::Gone,
                "{round}: {result:?}"
            );
            kept = world.start();
        }
        let said =
            exec(&kept, Command { timeout_millis: Some(30_000), ..command(&["echo", "on"]) });
        assert_eq!(said.out, "on", "{round}: {act} {result:?} {said:?}");
    }
    for id in world.engine.list().unwrap() {
        world.engine.remove(&id).unwrap();
    }
    world.engine.gc(false).unwrap();
}

#[test]
fn a_sandbox_whose_pid_1_is_killed_dies_whole_and_keeps_its_disk() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let working = thread::spawn({
        let bridge = running.bridge.clone();
        let script = "echo work > /file; (setsid sleep 1000 &); sleep 1000";
        move || {
            Guest::dial(&bridge).unwrap().exec(command(&["sh", "-c", script]), &[], &mut |_, _| {})
        }
    });
    eventually("it works", || shell(&running, "cat /file").out == "work");
    assert!(signal(running.pid, "-9"));
    assert!(working.join().unwrap().is_err(), "its caller hears of it");
    assert_eq!(world.engine.wait(&running.id).unwrap(), "signal 9");
    assert_eq!(processes_of(range), [0u32; 0]);
    let snapshot = SnapshotId::random();
    world.engine.end_kept(&running.id, &snapshot).unwrap();
    let again =
        world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
    assert_eq!(shell(&again, "cat /file").out, "work");
}

#[test]
fn a_sandbox_goes_on_when_whoever_froze_it_is_killed_and_the_zygote_too() {
    let world = World::new();
    let running = world.start();
    for with_zygote in [false, true] {
        let caller = Caller::new(&world, "freeze", &running.id, &SnapshotId::random());
        eventually("it stands still", || world.is_frozen(&running.id));
        caller.kill();
        if with_zygote {
            assert!(world.zygotes().into_iter().all(|pid| signal(pid, "-9")));
            // Whoever asks next brings the next zygote, which owes nobody a freeze.
            assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Running(_)));
            world.engine.start(&world.spec()).unwrap();
        }
        eventually("it goes on", || !world.is_frozen(&running.id));
        assert_eq!(shell(&running, "echo on").out, "on");
    }
}

impl World {
    /// Whether a sandbox's work stands still.
    pub(super) fn is_frozen(&self, id: &SandboxId) -> bool {
        let states = self.groups().into_iter().flat_map(|group| {
            ["freezer.state", "cgroup.freeze"]
                .map(|file| group.join(id.part()).join("work").join(file))
        });
        states
            .filter_map(|file| fs::read_to_string(file).ok())
            .any(|text| matches!(text.trim(), "FROZEN" | "1"))
    }
}

#[test]
fn a_capture_cut_short_leaves_a_sandbox_that_goes_on_and_whole_snapshots() {
    let world = World::new();
    let running = world.start();
    shell(
        &running,
        "mkdir /many; i=0; while [ $i -lt 400 ]; do echo $i > /many/$i; i=$((i+1)); done",
    );
    let mut dice = Dice(11);
    for round in 0..4 {
        let taken = world.engine.snapshots().unwrap().len();
        let caller = Caller::new(&world, "capture", &running.id, &SnapshotId::random());
        eventually("it captures", || world.engine.snapshots().unwrap().len() > taken);
        shell(&running, &format!("echo {round} > /round; touch /many/*"));
        thread::sleep(Duration::from_micros(dice.below(20_000)));
        caller.kill();
        // Without a time limit a command would wait for the thaw, however late.
        let said =
            exec(&running, Command { timeout_millis: Some(30_000), ..command(&["cat", "/round"]) });
        assert_eq!(said.out, round.to_string(), "{said:?}");
    }
    let last = SnapshotId::random();
    world.engine.capture(&running.id, &last).unwrap();
    world.engine.gc(false).unwrap();
    let partial: Vec<_> = fs::read_dir(world.home.join("partial")).unwrap().collect();
    assert!(partial.is_empty(), "{partial:?}");
    // The last one and some other are whole.
    let some = world.engine.snapshots().unwrap().swap_remove(0).id;
    for snapshot in [last, some] {
        let again =
            world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
        assert_eq!(shell(&again, "ls /many | wc -l").out, "400");
    }
}

#[test]
fn an_end_with_a_snapshot_cut_short_anywhere_is_finished_by_the_next_call() {
    let world = World::new();
    let mut dice = Dice(13);
    for round in 0..10 {
        let running = world.start();
        shell(&running, &format!("echo {round} > /file"));
        let snapshot = SnapshotId::random();
        let caller = Caller::new(&world, "end_kept", &running.id, &snapshot);
        // From before it begins until after its end: it takes a few milliseconds.
        thread::sleep(Duration::from_micros(5000 + dice.below(20_000)));
        caller.kill();
        let kept = world.engine.end_kept(&running.id, &snapshot).unwrap();
        assert_eq!(kept.id, snapshot);
        let again =
            world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
        assert_eq!(shell(&again, "cat /file").out, round.to_string());
        world.engine.remove(&again.id).unwrap();
        assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
    }
}

#[test]
fn many_callers_at_once_bring_one_zygote() {
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
fn a_sandbox_is_removed_in_the_middle_of_its_commands() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let commands: Vec<_> = (0..4)
        .map(|_| {
            let bridge = running.bridge.clone();
            let endless =
                command(&["sh", "-c", "echo up; while :; do echo $RANDOM > /tmp/x; done"]);
            let (said, heard) = std::sync::mpsc::channel();
            let running = thread::spawn(move || {
                let mut guest = Guest::dial(&bridge).unwrap();
                guest.exec(endless, &[], &mut |_, _| said.send(()).unwrap_or(()))
            });
            heard.recv().unwrap();
            running
        })
        .collect();
    world.engine.remove(&running.id).unwrap();
    for command in commands {
        assert!(command.join().unwrap().is_err(), "its bridge broke");
    }
    assert_eq!(processes_of(range), [0u32; 0]);
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
}

#[test]
fn a_sandbox_frozen_by_somebody_else_can_be_killed() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
    for group in world.groups() {
        let work = group.join(running.id.part()).join("work");
        for (file, value) in [("freezer.state", "FROZEN"), ("cgroup.freeze", "1")] {
            if work.join(file).exists() {
                fs::write(work.join(file), value).unwrap();
            }
        }
    }
    eventually("it stands still", || world.is_frozen(&running.id));
    world.engine.remove(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
}

#[test]
fn a_freeze_that_comes_while_a_sandbox_is_killed_keeps_nobody_from_dying() {
    let world = World::new();
    for _ in 0..4 {
        let running = world.start();
        let range = range(&running);
        // Many take a while to die.
        shell(
            &running,
            "i=0; while [ $i -lt 200 ]; do (sleep 1000 >/dev/null 2>&1 &); i=$((i+1)); done",
        );
        let (engine, id) = (world.engine.clone(), running.id.clone());
        // A capture at the end of a turn that is deleted, over and over.
        let freezing =
            thread::spawn(
                move || while engine.freeze(&id).and_then(|()| engine.thaw(&id)).is_ok() {},
            );
        world.engine.remove(&running.id).unwrap();
        freezing.join().unwrap();
        assert_eq!(processes_of(range), [0u32; 0]);
    }
}
