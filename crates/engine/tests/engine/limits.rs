//! Tests of the disk limit, the lifetime and their reports.

use super::*;

const MIB: u64 = 1 << 20;

/// Runs a script that should be killed. While other processes free space on the disk, only the scan
/// every minute finds it, so the timeout is generous.
fn run_until_killed(running: &Running, script: &str) -> CommandOutput {
    exec(running, Command { timeout_millis: Some(180_000), ..command(&["sh", "-c", script]) })
}

#[test]
fn disk_limit_kills_only_the_sandbox_over_it() {
    let world = World::new();
    let other = world.start();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(16 * MIB);
    let running = world.engine.start(&spec).unwrap();
    assert_eq!(world.engine.last_disk_limit_stop(&running.id).unwrap(), None);
    // Writes at most 500 MB even without the limit.
    let fill = "i=0; while :; do i=$(((i+1)%500)); \
        busybox dd if=/dev/zero of=/tmp/$i bs=1M count=1 2>/dev/null; done";
    let output = run_until_killed(&running, fill);
    assert_eq!(output.exit, Exit::Signal(9), "{output:?}");
    let stopped = world.engine.last_disk_limit_stop(&running.id).unwrap().unwrap();
    assert_eq!(stopped.limit_bytes, 16 * MIB);
    assert!(stopped.used_bytes > 16 * MIB, "{stopped:?}");
    assert_eq!(shell(&other, "echo on").out, "on");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
    // Cleaning up does not count as further growth.
    assert_eq!(shell(&running, "busybox rm -r /tmp/*; ls /tmp | wc -l").out, "0");
    assert_eq!(world.engine.last_disk_limit_stop(&running.id).unwrap(), Some(stopped));
    assert_eq!(world.engine.last_disk_limit_stop(&other.id).unwrap(), None);
}

#[test]
fn empty_files_count_against_the_disk_limit() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(8 * MIB);
    let running = world.engine.start(&spec).unwrap();
    let output =
        run_until_killed(&running, "i=0; while :; do i=$(((i+1)%100000)); : > /tmp/$i; done");
    assert_eq!(output.exit, Exit::Signal(9), "{output:?}");
    assert!(world.engine.last_disk_limit_stop(&running.id).unwrap().is_some());
}

#[test]
fn unlinked_files_count_against_the_disk_limit() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(16 * MIB);
    let running = world.engine.start(&spec).unwrap();
    let script = "exec 3>/tmp/a 4>/tmp/b; busybox rm /tmp/a /tmp/b; \
        for to in 3 4; do busybox dd if=/dev/zero bs=1M count=12 2>/dev/null >&$to; done; sleep 1000";
    let output = run_until_killed(&running, script);
    assert_eq!(output.exit, Exit::Signal(9), "{output:?}");
    assert!(world.engine.last_disk_limit_stop(&running.id).unwrap().unwrap().used_bytes > 16 * MIB);
}

#[test]
fn file_cannot_exceed_the_disk_limit() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.writable_bytes = Some(4 * MIB);
    let running = world.engine.start(&spec).unwrap();
    let large =
        command(&["/bin/busybox", "dd", "if=/dev/zero", "of=/tmp/large", "bs=1M", "count=8"]);
    let output = exec(&running, large);
    // SIGXFSZ.
    assert_eq!(output.exit, Exit::Signal(25), "{output:?}");
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    assert_eq!(fs::metadata(upper.join("tmp/large")).unwrap().len(), 4 * MIB);
}

#[test]
fn lifetime_ends_sandbox_and_keeps_its_disk() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.lifetime_secs = Some(1);
    let running = world.engine.start(&spec).unwrap();
    // On a slow host the lifetime may already be over.
    assert_eq!(world.engine.wait(&running.id).unwrap(), "lifetime");
    assert_eq!(uid(running.pid), None);
    let dead = SandboxState::Dead { reason: "lifetime".to_owned() };
    assert_eq!(world.engine.find(&running.id).unwrap(), dead);
    world.engine.stop_and_save(&running.id, &harvest_proto::SnapshotId::random()).unwrap();
}

#[test]
fn lifetime_survives_a_zygote_restart() {
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
    // The request finds no zygote and starts the next one.
    let _ = world.engine.thaw(&running.id);
    assert!(world.zygotes().iter().all(|pid| !killed.contains(pid)));
    let dead = SandboxState::Dead { reason: "lifetime".to_owned() };
    eventually("the end of its lifetime", || world.engine.find(&running.id).unwrap() == dead);
}

#[test]
fn oom_kill_inside_a_pipeline_is_reported() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.memory_bytes = 64 << 20;
    let running = world.engine.start(&spec).unwrap();
    let allocate = "x=aaaaaaaa; while :; do x=$x$x; done";
    for script in
        [format!("true | sh -c '{allocate}'"), format!("set -o pipefail; sh -c '{allocate}' | cat")]
    {
        let output = shell(&running, &script);
        assert_eq!(output.exit, Exit::Oom, "{script}: {output:?}");
    }
    assert_eq!(shell(&running, "exit 137").exit, Exit::Code(137));
}

#[test]
fn all_processes_together_cannot_exhaust_host_files() {
    let world = World::new();
    let running = world.start();
    let limit =
        |kind: &str| shell(&running, &format!("ulimit -{kind}n")).out.parse::<u64>().unwrap();
    let (soft, hard) = (limit("S"), limit("H"));
    assert_eq!(soft, 1024);
    let host = fs::read_to_string("/proc/sys/fs/file-max").unwrap();
    let host = host.trim().parse::<u64>().unwrap();
    // Pid 1 needs 8,192, also where the host's table is too small for that; `doctor` then warns.
    let fits = hard * u64::from(Limits::default().pids) <= host / 2;
    assert!(fits || hard <= 8192, "{hard} of {host}");
}
