//! Tests of how sandboxes start, run, freeze and end, and of what survives their zygote.

use super::*;

#[test]
fn command_runs_in_private_namespaces() {
    let world = World::new();
    let running = world.start();
    for kind in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let inside = shell(&running, &format!("readlink /proc/self/ns/{kind}"));
        let host = fs::read_link(format!("/proc/self/ns/{kind}")).unwrap();
        assert!(inside.out.starts_with(kind), "{inside:?}");
        assert_ne!(inside.out, host.to_string_lossy(), "{kind}");
    }
    let seen = shell(&running, "ls /proc | grep -c '^[0-9]'");
    assert!(seen.out.parse::<usize>().unwrap() < 12, "{seen:?}");
    assert_eq!(shell(&running, "hostname").out, format!("sbx-{}", running.id.part()));
    assert_eq!(shell(&running, "exit 3").exit, Exit::Code(3));
}

#[test]
fn files_on_disk_keep_unmapped_owner_ids() {
    let world = World::new();
    let running = world.start();
    let output = shell(
        &running,
        "touch /root/mine /tmp/theirs && chown 10001:10001 /tmp/theirs && ls -n /tmp /root",
    );
    assert_eq!(output.exit, Exit::Code(0), "{output:?}");
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    for (path, id) in [("root/mine", 0), ("tmp/theirs", 10_001)] {
        let about = fs::metadata(upper.join(path)).unwrap();
        assert_eq!((about.uid(), about.gid()), (id, id), "{path}");
    }
    assert!(uid(running.pid).unwrap() >= 0x7000_0000);
    assert_eq!(shell(&running, "id -u").out, "0");
}

#[test]
fn kill_ends_the_whole_process_tree() {
    let world = World::new();
    let running = world.start();
    let range = range(&running);
    let left = shell(
        &running,
        "(setsid sh -c '(sleep 1000 & sleep 1000) & sleep 1000' >/dev/null 2>&1 &) ; echo ok",
    );
    assert_eq!(left.out, "ok", "{left:?}");
    eventually("three sleepers", || processes_of(range).len() > 3);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
    assert_eq!(world.engine.wait(&running.id).unwrap(), "killed");
    let dead = SandboxState::Dead { reason: "killed".to_owned() };
    assert_eq!(world.engine.find(&running.id).unwrap(), dead);
    world.engine.kill(&running.id).unwrap();
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    assert!(upper.is_dir(), "the disk stays");
    world.engine.remove(&running.id).unwrap();
    world.engine.remove(&running.id).unwrap();
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Gone);
}

#[test]
fn fork_bomb_hits_only_its_own_limit() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.pids = 64;
    spec.binds = probes::probe_binds();
    let running = world.engine.start(&spec).unwrap();
    let bomb = Command { timeout_millis: Some(1500), ..probes::probe_command("bomb", 0) };
    assert_eq!(exec(&running, bomb).exit, Exit::Timeout);
    assert_eq!(shell(&running, "echo fine").out, "fine");
    let still_running = SandboxState::Running(running.clone());
    assert_eq!(world.engine.find(&running.id).unwrap(), still_running);
}

#[test]
fn memory_hog_is_killed_alone_and_counted() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.memory_bytes = 64 << 20;
    let running = world.engine.start(&spec).unwrap();
    let hog = shell(&running, "x=aaaaaaaa; while :; do x=$x$x; done");
    assert!(matches!(hog.exit, Exit::Oom), "{hog:?}");
    let kills: u64 = world
        .groups_of(&spec.id)
        .iter()
        .flat_map(|group| {
            ["memory.oom_control", "memory.events"].map(|file| group.join("work").join(file))
        })
        .filter_map(|file| fs::read_to_string(file).ok())
        .filter_map(|text| {
            text.lines().find_map(|line| line.strip_prefix("oom_kill ")?.parse::<u64>().ok())
        })
        .sum();
    assert!(kills > 0);
    assert_eq!(shell(&running, "echo fine").out, "fine");
}

#[test]
fn next_zygote_adopts_sandboxes_of_a_killed_one() {
    let world = World::new();
    let running = world.start();
    let waiting = thread::spawn({
        let (engine, id) = (world.engine.clone(), running.id.clone());
        move || engine.wait(&id)
    });
    let killed = world.zygotes();
    for pid in &killed {
        assert!(
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()
        );
    }
    // The waiting thread sees the broken connection and starts the next zygote.
    eventually("the next zygote", || world.zygotes().iter().any(|pid| !killed.contains(pid)));
    assert_eq!(shell(&running, "echo on").out, "on");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
    let range = range(&running);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), "killed");
    assert_eq!(processes_of(range), [0u32; 0]);
}

#[test]
fn preforked_sandbox_gets_its_own_name_and_limits() {
    let world = World::new();
    let first = world.start();
    if world.keeps_standbys() {
        eventually("a standby", || parts(&world.groups()[0]).len() > 2);
    }
    let limits = Limits { pids: 33, memory_bytes: 48 << 20, ..Limits::default() };
    let running = world.engine.start(&Spec { limits, ..world.spec() }).unwrap();
    assert_eq!(shell(&running, "hostname").out, format!("sbx-{}", running.id.part()));
    assert_eq!(shell(&running, "ulimit -n").out, "1024");
    let groups = world.groups_of(&running.id);
    let found = |file: &str| {
        groups
            .iter()
            .map(|group| group.join("work").join(file))
            .filter_map(|file| fs::read_to_string(file).ok())
            .map(|text| text.trim().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(found("pids.max"), ["33"]);
    assert_eq!(
        [found("memory.limit_in_bytes"), found("memory.max")].concat(),
        [(48 << 20).to_string()]
    );
    assert_ne!(range(&running), range(&first));
    world.engine.kill(&running.id).unwrap();
    assert!(groups.iter().all(|group| !group.exists()));
    assert_eq!(shell(&first, "echo on").out, "on");
}

#[test]
fn zygote_killed_during_start_leaves_no_partial_sandbox() {
    let world = World::new();
    let mut whole = 0;
    for round in 0..16u64 {
        let spec = world.spec();
        let starting = thread::spawn({
            let (engine, spec) = (world.engine.clone(), spec.clone());
            move || engine.start(&spec)
        });
        // The kill comes a little later each time: before, during and after the start.
        thread::sleep(Duration::from_micros(round * 500));
        for pid in world.zygotes() {
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        }
        match starting.join().unwrap() {
            Ok(running) => {
                assert_eq!(shell(&running, "echo whole").out, "whole");
                whole += 1;
            }
            Err(error) => {
                let found = world.engine.find(&spec.id).unwrap();
                assert_eq!(found, SandboxState::Gone, "after {error}");
            }
        }
    }
    let listed = world.engine.list().unwrap();
    assert_eq!(listed.len(), whole);
    for id in listed {
        assert!(matches!(world.engine.find(&id).unwrap(), SandboxState::Running(_)));
    }
    // The next start makes the next zygote clean up; all remaining cgroups belong to live
    // sandboxes.
    let last = world.start();
    for group in world.groups() {
        let parts = parts(&group);
        let mut living = world.engine.list().unwrap();
        living.retain(|id| {
            let groups = world.groups_of(id);
            groups.iter().any(|group| parts.contains(&named(group)))
        });
        assert_eq!(living.len(), whole + 1);
        assert!(living.contains(&last.id));
        // Other cgroups belong to standbys.
        assert!(parts.len() <= whole + 1 + 2, "{parts:?}");
    }
}

#[test]
fn sandbox_that_died_without_zygote_is_dead() {
    let world = World::new();
    let running = world.start();
    for pid in world.zygotes().iter().chain([&running.pid]) {
        HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    eventually("the death of pid 1", || uid(running.pid).is_none());
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    assert_eq!(world.engine.list().unwrap(), std::slice::from_ref(&running.id));
    assert!(world.engine.wait(&running.id).is_ok());
}

fn has_claim(range: u32) -> bool {
    Path::new("/run/harvest-ids").join((range - 0x7000_0000 / 65536).to_string()).exists()
}

#[test]
fn sandbox_is_removed_with_its_owner() {
    let world = World::new();
    let mut owner = Sleeper::new();
    let spec = Spec { owner: Owner::Process(owner.0.id()), ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    let range = range(&running);
    assert!(has_claim(range));
    assert_eq!(shell(&running, "echo on").out, "on");
    let groups = world.groups_of(&running.id);
    owner.end();
    eventually("the removal of the sandbox", || {
        world.engine.find(&running.id).unwrap() == SandboxState::Gone
    });
    assert_eq!(processes_of(range), [0u32; 0]);
    assert!(!has_claim(range));
    assert!(!running.bridge.parent().unwrap().exists());
    assert!(groups.iter().all(|group| !group.exists()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*world.folder.path().to_string_lossy()));
}

#[test]
fn start_fails_when_owner_has_exited() {
    let world = World::new();
    let mut owner = Sleeper::new();
    owner.end();
    let spec = Spec { owner: Owner::Process(owner.0.id()), ..world.spec() };
    assert!(matches!(world.engine.start(&spec), Err(EngineError::Refused { .. })));
    assert_eq!(world.engine.find(&spec.id).unwrap(), SandboxState::Gone);
}

#[test]
fn concurrent_homes_never_share_id_ranges() {
    let worlds = [World::new(), World::new()];
    let started: Vec<Running> = thread::scope(|scope| {
        let starts: Vec<_> = worlds
            .iter()
            .flat_map(|world| (0..4).map(move |_| world))
            .map(|world| scope.spawn(|| world.start()))
            .collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    let mut ranges: Vec<u32> = started.iter().map(range).collect();
    ranges.sort_unstable();
    ranges.dedup();
    assert_eq!(ranges.len(), 8);
}

#[test]
fn failed_start_reports_why_and_leaves_nothing() {
    let world = World::new();
    let bind = Bind { source: "/etc/hostname".into(), inside: "/bin/busybox/x".into() };
    let spec = Spec { binds: vec![bind], ..world.spec() };
    let error = world.engine.start(&spec).unwrap_err();
    assert!(error.to_string().contains("/bin/busybox/x"), "{error}");
    assert_eq!(world.engine.find(&spec.id).unwrap(), SandboxState::Gone);
    assert!(world.groups().iter().all(|group| !group.join(spec.id.part()).exists()));
    let missing = Spec { from: Origin::Image("none".to_owned()), ..world.spec() };
    assert!(matches!(world.engine.start(&missing), Err(EngineError::ImageMissing { .. })));
    let running = world.start();
    let again = Spec { id: running.id.clone(), ..world.spec() };
    assert!(matches!(world.engine.start(&again), Err(EngineError::Exists { .. })));
}

#[test]
fn image_links_cannot_escape_the_root() {
    let world = World::new();
    let outside = world.folder.path().join("outside");
    fs::create_dir(&outside).unwrap();
    let base = world.folder.path().join("cache/layers/base");
    for name in ["dev", "etc", "proc"] {
        fs::remove_dir(base.join(name)).unwrap();
        symlink(&outside, base.join(name)).unwrap();
        assert!(
            matches!(world.engine.start(&world.spec()), Err(EngineError::Refused { .. })),
            "{name}"
        );
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        fs::remove_file(base.join(name)).unwrap();
        fs::create_dir(base.join(name)).unwrap();
    }
    fs::rename(base.join("etc"), base.join("other")).unwrap();
    symlink("/other", base.join("etc")).unwrap();
    assert!(shell(&world.start(), "cat /other/resolv.conf").out.contains("198.18.0.1"));
}

#[test]
fn home_with_long_path_works() {
    let world = World::at(&["long"; 30].join("/"));
    let running = world.start();
    assert!(running.bridge.as_os_str().len() > 130);
    assert_eq!(shell(&running, "echo on").out, "on");
}

/// A check whether a sandbox is frozen.
fn is_frozen(world: &World, running: &Running) -> impl Fn() -> bool + use<> {
    let groups = world.groups_of(&running.id);
    move || {
        let files = groups.iter().flat_map(|group| {
            ["freezer.state", "cgroup.freeze"].map(|file| group.join("work").join(file))
        });
        files
            .filter_map(|file| fs::read_to_string(file).ok())
            .any(|state| matches!(state.trim(), "FROZEN" | "1"))
    }
}

#[test]
fn freeze_expires_and_frozen_sandbox_can_be_killed() {
    let world = World::new();
    let running = world.start();
    let frozen = is_frozen(&world, &running);
    shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
    world.engine.freeze(&running.id).unwrap();
    assert!(frozen());
    world.engine.thaw(&running.id).unwrap();
    assert!(!frozen());
    world.engine.freeze(&running.id).unwrap();
    eventually("the freeze to expire", || !frozen());
    world.engine.freeze(&running.id).unwrap();
    let range = range(&running);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
    assert!(matches!(world.engine.freeze(&running.id), Err(EngineError::NotRunning { .. })));
}

#[test]
fn thaw_is_skipped_while_a_disk_is_saved() {
    let world = World::new();
    let running = world.start();
    let frozen = is_frozen(&world, &running);
    // The lock that a snapshot in progress holds.
    let lock = fs::File::open(world.home.join("sandboxes").join(running.id.part())).unwrap();
    lock.lock().unwrap();
    world.engine.freeze_for(&running.id, Duration::from_secs(600)).unwrap();
    world.engine.thaw_unless_saving(&running.id).unwrap();
    assert!(frozen(), "a copy of a running disk would be inconsistent");
    drop(lock);
    world.engine.thaw_unless_saving(&running.id).unwrap();
    assert!(!frozen());
}

#[test]
fn zygote_survives_broken_clients() {
    let world = World::new();
    let running = world.start();
    let zygotes = world.zygotes();
    let socket = world.home.join("run/zygote.sock");
    for bytes in [&b"{"[..], b"", b"{\"ask\":\"start\"}", &[0xff; 4096]] {
        let client = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::SEQPACKET,
            None,
        )
        .unwrap();
        rustix::net::connect(&client, &rustix::net::SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::send(&client, bytes, rustix::net::SendFlags::NOSIGNAL).unwrap();
    }
    assert_eq!(shell(&running, "echo on").out, "on");
    world.engine.freeze(&running.id).unwrap();
    world.engine.thaw(&running.id).unwrap();
    assert_eq!(world.zygotes(), zygotes);
}

#[test]
fn plan_prints_every_step() {
    let world = World::new();
    let plan = world.engine.plan(&world.spec()).unwrap().to_string();
    for word in ["claim_ids", "clone", "overlay", "mask", "root", "capabilities", "seccomp", "exec"]
    {
        assert!(plan.contains(word), "{word} is missing in\n{plan}");
    }
}

#[test]
fn zygote_keeps_no_variables_but_path() {
    let world = World::new();
    let _running = world.start();
    let [zygote] = world.zygotes()[..] else { panic!("one zygote: {:?}", world.zygotes()) };
    let environment = fs::read(format!("/proc/{zygote}/environ")).unwrap();
    let names: Vec<&[u8]> = environment
        .split(|byte| *byte == 0)
        .filter_map(|variable| variable.split(|byte| *byte == b'=').next())
        .filter(|name| !name.is_empty())
        .collect();
    assert_eq!(names, [b"PATH"]);
    assert!(std::env::vars_os().count() > 1, "control: this process has more");
}
