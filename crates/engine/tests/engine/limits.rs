//! Limits that hold over time: how much a sandbox writes, how long it lives, what tells of them.

use super::*;

const MIB: u64 = 1 << 20;

/// Runs what should be stopped. Where others give the disk back what it writes, only the minute's round
/// finds out, so that is waited for too.
fn until_stopped(running: &Running, script: &str) -> Said {
    exec(running, Command { timeout_millis: Some(180_000), ..command(&["sh", "-c", script]) })
}

#[test]
fn a_sandbox_that_fills_its_disk_is_stopped_and_all_others_go_on() {
    let world = World::new();
    let other = world.start();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(16 * MIB);
    let running = world.engine.start(&spec).unwrap();
    assert_eq!(world.engine.stopped(&running.id).unwrap(), None);
    // Never more than 500 MB, limit or not.
    let fill = "i=0; while :; do i=$(((i+1)%500)); \
        busybox dd if=/dev/zero of=/tmp/$i bs=1M count=1 2>/dev/null; done";
    let said = until_stopped(&running, fill);
    assert_eq!(said.exit, Exit::Signal(9), "{said:?}");
    let stopped = world.engine.stopped(&running.id).unwrap().unwrap();
    assert_eq!(stopped.limit_bytes, 16 * MIB);
    assert!(stopped.weight_bytes > 16 * MIB, "{stopped:?}");
    assert_eq!(shell(&other, "echo on").out, "on");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
    // Whoever cleans up is not taken for one who goes on writing.
    assert_eq!(shell(&running, "busybox rm -r /tmp/*; ls /tmp | wc -l").out, "0");
    assert_eq!(world.engine.stopped(&running.id).unwrap(), Some(stopped));
    assert_eq!(world.engine.stopped(&other.id).unwrap(), None);
}

#[test]
fn names_without_content_fill_a_disk_too() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(8 * MIB);
    let running = world.engine.start(&spec).unwrap();
    let said = until_stopped(&running, "i=0; while :; do i=$(((i+1)%100000)); : > /tmp/$i; done");
    assert_eq!(said.exit, Exit::Signal(9), "{said:?}");
    assert!(world.engine.stopped(&running.id).unwrap().is_some());
}

#[test]
fn files_without_a_name_fill_a_disk_too() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(16 * MIB);
    let running = world.engine.start(&spec).unwrap();
    let script = "exec 3>/tmp/a 4>/tmp/b; busybox rm /tmp/a /tmp/b; \
        for to in 3 4; do busybox dd if=/dev/zero bs=1M count=12 2>/dev/null >&$to; done; sleep 1000";
    let said = until_stopped(&running, script);
    assert_eq!(said.exit, Exit::Signal(9), "{said:?}");
    assert!(world.engine.stopped(&running.id).unwrap().unwrap().weight_bytes > 16 * MIB);
}

#[test]
fn no_file_becomes_larger_than_the_disk_it_is_on() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(4 * MIB);
    let running = world.engine.start(&spec).unwrap();
    let large =
        command(&["/bin/busybox", "dd", "if=/dev/zero", "of=/tmp/large", "bs=1M", "count=8"]);
    let said = exec(&running, large);
    // SIGXFSZ.
    assert_eq!(said.exit, Exit::Signal(25), "{said:?}");
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    assert_eq!(fs::metadata(upper.join("tmp/large")).unwrap().len(), 4 * MIB);
}

#[test]
fn a_lifetime_ends_a_sandbox_and_its_disk_stays() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.lifetime_secs = Some(1);
    let running = world.engine.start(&spec).unwrap();
    // On a slow machine it may be over by now.
    assert_eq!(world.engine.wait(&running.id).unwrap(), "lifetime");
    assert_eq!(uid(running.pid), None);
    let dead = SandboxState::Dead { reason: "lifetime".to_owned() };
    assert_eq!(world.engine.find(&running.id).unwrap(), dead);
    world.engine.end_kept(&running.id, &harvest_proto::SnapshotId::random()).unwrap();
}

#[test]
fn a_lifetime_survives_the_zygote_that_counted_it() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.lifetime_secs = Some(3);
    let running = world.engine.start(&spec).unwrap();
    let killed = world.zygotes();
    for pid in &killed {
        assert!(
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()
        );
    }
    // It asks, meets nobody and starts the next zygote.
    let _ = world.engine.thaw(&running.id);
    assert!(world.zygotes().iter().all(|pid| !killed.contains(pid)));
    let dead = SandboxState::Dead { reason: "lifetime".to_owned() };
    eventually("its life is over", || world.engine.find(&running.id).unwrap() == dead);
}

#[test]
fn a_command_the_memory_limit_killed_inside_a_pipeline_is_told_from_one_that_failed() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.memory_bytes = 64 << 20;
    let running = world.engine.start(&spec).unwrap();
    let hog = "x=aaaaaaaa; while :; do x=$x$x; done";
    for script in [format!("true | sh -c '{hog}'"), format!("set -o pipefail; sh -c '{hog}' | cat")]
    {
        let said = shell(&running, &script);
        assert_eq!(said.exit, Exit::Oom, "{script}: {said:?}");
    }
    assert_eq!(shell(&running, "exit 137").exit, Exit::Code(137));
}
