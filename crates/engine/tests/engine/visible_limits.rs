//! Tests that programs see the limits of their sandbox and not the size of the host.

use super::*;

const MEMORY: u64 = 192 << 20;

fn limited(world: &World) -> Running {
    let mut spec = world.spec();
    spec.limits = Limits {
        memory_bytes: MEMORY,
        cpu_millis_per_second: 1000,
        pids: 300,
        ..Limits::default()
    };
    world.engine.start(&spec).unwrap()
}

#[test]
fn programs_see_the_limits_of_their_sandbox() {
    let world = World::new();
    let running = limited(&world);
    let value = |script: &str| shell(&running, script).out;
    assert_eq!(
        value("grep MemTotal /proc/meminfo"),
        format!("MemTotal:         {} kB", MEMORY / 1024)
    );
    assert_eq!(value("busybox nproc"), "1");
    assert_eq!(value("grep -c ^processor /proc/cpuinfo"), "1");
    let online = value("cat /sys/devices/system/cpu/online");
    assert!(online.parse::<u32>().is_ok(), "{online}");
    assert_eq!(value("cat /sys/fs/cgroup/memory.max"), MEMORY.to_string());
    assert_eq!(value("cat /sys/fs/cgroup/pids.max"), "300");
    assert_eq!(value("cat /sys/fs/cgroup/cpu.max"), "100000 100000");
}

/// A value of `/proc/meminfo` in MiB.
fn memory(running: &Running, name: &str) -> u64 {
    let kib = shell(running, &format!("busybox awk '/^{name}:/ {{ print $2 }}' /proc/meminfo")).out;
    kib.parse::<u64>().unwrap_or_else(|_| panic!("{name}: {kib}")) / 1024
}

#[test]
fn available_memory_follows_use() {
    let world = World::new();
    let running = limited(&world);
    let before = memory(&running, "MemAvailable");
    assert!(before > 160, "{before}");
    // What a command that runs already sees, too: it ends when the file has changed.
    let fill = "grep MemAvailable /proc/meminfo > /tmp/before; \
        busybox dd if=/dev/zero of=/dev/shm/x bs=1M count=64 2> /dev/null; \
        while busybox grep -q -F -f /tmp/before /proc/meminfo; do busybox sleep 0.05; done";
    assert_eq!(shell(&running, fill).out, "");
    let after = memory(&running, "MemAvailable");
    assert!((before - 80..=before - 60).contains(&after), "{before} {after}");
    assert!(memory(&running, "Shmem") >= 64 && memory(&running, "MemTotal") == 192);
    shell(&running, "rm /dev/shm/x");
    assert!(memory(&running, "MemAvailable") + 8 > before);
}

/// The mount point of a cgroup file system, its root, and its super block options.
fn cgroup_mounts(mountinfo: &str) -> Vec<(String, String, String)> {
    let parse = |line: &str| {
        let (left, right) = line.split_once(" - ")?;
        let (mut left, mut right) = (left.split(' ').skip(3), right.split(' '));
        let kind = right.next()?;
        let (root, at) = (left.next()?, left.next()?);
        kind.starts_with("cgroup")
            .then(|| (at.into(), root.into(), right.next_back().unwrap().into()))
    };
    mountinfo.lines().filter_map(parse).collect()
}

// What a JVM does: it joins the mount point and the path of its cgroup, or takes the mount point
// where the mount's root is that cgroup.
#[test]
fn runtimes_find_their_memory_limit_through_proc() {
    let world = World::new();
    let running = limited(&world);
    let own = shell(&running, "cat /proc/self/cgroup").out;
    let mounts = cgroup_mounts(&shell(&running, "cat /proc/self/mountinfo").out);
    let path = |controller: &str| {
        own.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            let has = fields.next()?.split(',').any(|name| name == controller);
            has.then(|| fields.next().unwrap().to_owned())
        })
    };
    let v1 = mounts.iter().any(|(_, _, options)| options.contains("memory"));
    let (controller, file) =
        if v1 { ("memory", "memory.limit_in_bytes") } else { ("", "memory.max") };
    let path = path(controller).unwrap_or_else(|| panic!("{own}"));
    let (at, root, _) = mounts
        .iter()
        .find(|(_, _, options)| !v1 || options.split(',').any(|option| option == "memory"))
        .unwrap_or_else(|| panic!("{mounts:?}"));
    let folder = if v1 && *root == path { at.clone() } else { format!("{at}{path}") };
    let limit = shell(&running, &format!("cat {folder}/{file}")).out;
    assert_eq!(limit, MEMORY.to_string(), "{own}\n{mounts:?}");
    // A JVM gives up unless it finds all of these.
    for wanted in ["cpu", "cpuacct", "cpuset", "memory"].iter().filter(|_| v1) {
        let mounted = |options: &str| options.split(',').any(|option| option == *wanted);
        assert!(mounts.iter().any(|(_, _, options)| mounted(options)), "{wanted}: {mounts:?}");
    }
}

#[test]
fn shown_limits_cannot_be_changed_from_inside() {
    let world = World::new();
    let (running, _other) = (limited(&world), world.start());
    let write = "for file in /proc/meminfo $(busybox find /sys -type f -o -type d); do \
        { echo 1 > $file; } 2>/dev/null && echo wrote $file; \
        { : > $file/x; } 2>/dev/null && echo created $file/x; done; true";
    assert_eq!(shell(&running, write).out, "");
    assert_eq!(shell(&running, "cat /sys/fs/cgroup/memory.max").out, MEMORY.to_string());
    // The cgroups of the home and of its other sandboxes.
    let seen = shell(&running, "busybox find /sys -name 'harvest*' -o -name supervisor").out;
    assert_eq!(seen, "");
    assert_eq!(
        shell(&running, "ls /sys").out.split_whitespace().collect::<Vec<_>>(),
        ["devices", "fs"]
    );
}
