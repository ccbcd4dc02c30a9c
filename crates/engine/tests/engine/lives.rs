//! How sandboxes start, run, stand still and end, and what of it survives their zygote.

use super::*;

#[test]
fn a_command_runs_in_all_namespaces_and_sees_only_its_own_processes() {
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
fn ids_on_disk_are_canonical_and_ids_of_processes_are_not() {
    let world = World::new();
    let running = world.start();
    let said = shell(
        &running,
        "touch /root/mine /tmp/theirs && chown 10001:10001 /tmp/theirs && ls -n /tmp /root",
    );
    assert_eq!(said.exit, Exit::Code(0), "{said:?}");
    let upper = world.home.join("sandboxes").join(running.id.part()).join("upper");
    for (path, id) in [("root/mine", 0), ("tmp/theirs", 10_001)] {
        let about = fs::metadata(upper.join(path)).unwrap();
        assert_eq!((about.uid(), about.gid()), (id, id), "{path}");
    }
    assert!(uid(running.pid).unwrap() >= 0x7000_0000);
    assert_eq!(shell(&running, "id -u").out, "0");
}

#[test]
fn the_whole_tree_dies_on_kill_however_it_hides() {
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
fn a_fork_bomb_hurts_only_its_own_work() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.pids = 64;
    spec.binds = probes::probe_binds();
    let running = world.engine.start(&spec).unwrap();
    let bomb = Command { timeout_millis: Some(1500), ..probes::probe_command("bomb", 0) };
    assert_eq!(exec(&running, bomb).exit, Exit::Timeout);
    assert_eq!(shell(&running, "echo fine").out, "fine");
    let running_still = SandboxState::Running(running.clone());
    assert_eq!(world.engine.find(&running.id).unwrap(), running_still);
}

#[test]
fn a_memory_hog_dies_alone_and_is_counted() {
    let world = World::new();
    let mut spec = world.spec();
    spec.limits.memory_bytes = 64 << 20;
    let running = world.engine.start(&spec).unwrap();
    let hog = shell(&running, "x=aaaaaaaa; while :; do x=$x$x; done");
    assert!(matches!(hog.exit, Exit::Oom), "{hog:?}");
    let kills: u64 = world
        .groups()
        .iter()
        .flat_map(|group| {
            ["memory.oom_control", "memory.events"]
                .map(|file| group.join(spec.id.part()).join("work").join(file))
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
fn a_sandbox_goes_on_when_the_zygote_is_killed_and_the_next_one_adopts_it() {
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
    // The waiting thread meets the broken connection and starts the next zygote.
    eventually("the next zygote", || world.zygotes().iter().any(|pid| !killed.contains(pid)));
    assert_eq!(shell(&running, "echo on").out, "on");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
    let range = range(&running);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(waiting.join().unwrap().unwrap(), "killed");
    assert_eq!(processes_of(range), [0u32; 0]);
}

#[test]
fn a_sandbox_grown_ahead_of_time_has_its_own_name_and_limits() {
    let world = World::new();
    let first = world.start();
    let plan = world.engine.plan(&world.spec()).unwrap();
    let joins_late = plan
        .steps
        .iter()
        .any(|step| matches!(step, harvest_engine::Step::Clone { into: None, .. }));
    if joins_late {
        eventually("something grows ahead", || parts(&world.groups()[0]).len() > 2);
    }
    let limits = Limits { pids: 33, memory_bytes: 48 << 20, ..Limits::default() };
    let running = world.engine.start(&Spec { limits, ..world.spec() }).unwrap();
    assert_eq!(shell(&running, "hostname").out, format!("sbx-{}", running.id.part()));
    assert_eq!(shell(&running, "ulimit -n").out, "1024");
    let found = |file: &str| {
        let files = world
            .groups()
            .into_iter()
            .map(|group| group.join(running.id.part()).join("work").join(file));
        files
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
    assert!(world.groups().iter().all(|group| !group.join(running.id.part()).exists()));
    assert_eq!(shell(&first, "echo on").out, "on");
}

#[test]
fn a_zygote_killed_at_any_moment_of_a_start_leaves_a_whole_sandbox_or_none() {
    let world = World::new();
    let mut whole = 0;
    for round in 0..16u64 {
        let spec = world.spec();
        let starting = thread::spawn({
            let (engine, spec) = (world.engine.clone(), spec.clone());
            move || engine.start(&spec)
        });
        // The blow falls a little later each time: before, during and after the start.
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
    // The next start makes the next zygote clear up; what is left belongs to the living.
    let last = world.start();
    for group in world.groups() {
        let parts = parts(&group);
        let mut living = world.engine.list().unwrap();
        living.retain(|id| parts.contains(&id.part().to_owned()));
        assert_eq!(living.len(), whole + 1);
        assert!(living.contains(&last.id));
        // Besides them those of processes kept ready.
        assert!(parts.len() <= whole + 1 + 2, "{parts:?}");
    }
}

#[test]
fn a_sandbox_that_died_while_no_zygote_looked_is_found_dead() {
    let world = World::new();
    let running = world.start();
    for pid in world.zygotes().iter().chain([&running.pid]) {
        HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    eventually("pid 1 is dead", || uid(running.pid).is_none());
    assert!(matches!(world.engine.find(&running.id).unwrap(), SandboxState::Dead { .. }));
    assert_eq!(world.engine.list().unwrap(), std::slice::from_ref(&running.id));
    assert!(world.engine.wait(&running.id).is_ok());
}

fn claims_of(range: u32) -> bool {
    Path::new("/run/harvest-ids").join((range - 0x7000_0000 / 65536).to_string()).exists()
}

#[test]
fn nothing_is_left_of_a_sandbox_whose_owner_is_gone() {
    let world = World::new();
    let mut owner = Sleeper::new();
    let spec = Spec { owner: Owner::Process(owner.0.id()), ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    let range = range(&running);
    assert!(claims_of(range));
    assert_eq!(shell(&running, "echo on").out, "on");
    owner.end();
    eventually("the sandbox is gone", || {
        world.engine.find(&running.id).unwrap() == SandboxState::Gone
    });
    assert_eq!(processes_of(range), [0u32; 0]);
    assert!(!claims_of(range));
    assert!(!running.bridge.parent().unwrap().exists());
    assert!(world.groups().iter().all(|group| !group.join(running.id.part()).exists()));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&*world.folder.path().to_string_lossy()));
}

#[test]
fn a_sandbox_is_refused_when_its_owner_is_gone_already() {
    let world = World::new();
    let mut owner = Sleeper::new();
    owner.end();
    let spec = Spec { owner: Owner::Process(owner.0.id()), ..world.spec() };
    assert!(matches!(world.engine.start(&spec), Err(EngineError::Refused { .. })));
    assert_eq!(world.engine.find(&spec.id).unwrap(), SandboxState::Gone);
}

#[test]
fn two_homes_at_once_never_share_a_range_of_ids() {
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
fn a_start_that_fails_says_why_and_leaves_nothing() {
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
fn an_image_cannot_lead_the_set_up_out_of_its_root() {
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
fn a_home_with_a_long_path_works() {
    let world = World::at(&["long"; 30].join("/"));
    let running = world.start();
    assert!(running.bridge.as_os_str().len() > 130);
    assert_eq!(shell(&running, "echo on").out, "on");
}

/// Whether it stands still, at any time.
fn is_frozen(world: &World, running: &Running) -> impl Fn() -> bool + use<> {
    let group =
        world.groups().into_iter().find(|group| group.to_string_lossy().contains("freezer"));
    let group =
        group.unwrap_or_else(|| world.groups()[0].clone()).join(running.id.part()).join("work");
    move || {
        ["freezer.state", "cgroup.freeze"]
            .iter()
            .filter_map(|file| fs::read_to_string(group.join(file)).ok())
            .any(|state| matches!(state.trim(), "FROZEN" | "1"))
    }
}

#[test]
fn a_freeze_nobody_renews_ends_and_a_frozen_sandbox_can_be_killed() {
    let world = World::new();
    let running = world.start();
    let frozen = is_frozen(&world, &running);
    shell(&running, "(setsid sleep 1000 >/dev/null 2>&1 &); true");
    world.engine.freeze(&running.id).unwrap();
    assert!(frozen());
    world.engine.thaw(&running.id).unwrap();
    assert!(!frozen());
    world.engine.freeze(&running.id).unwrap();
    eventually("the freeze ends by itself", || !frozen());
    world.engine.freeze(&running.id).unwrap();
    let range = range(&running);
    world.engine.kill(&running.id).unwrap();
    assert_eq!(processes_of(range), [0u32; 0]);
    assert!(matches!(world.engine.freeze(&running.id), Err(EngineError::NotRunning { .. })));
}

#[test]
fn who_is_roused_goes_on_unless_its_disk_is_being_kept() {
    let world = World::new();
    let running = world.start();
    let frozen = is_frozen(&world, &running);
    // As whoever keeps a disk holds it.
    let kept = fs::File::open(world.home.join("sandboxes").join(running.id.part())).unwrap();
    kept.lock().unwrap();
    world.engine.freeze_for(&running.id, Duration::from_secs(600)).unwrap();
    world.engine.rouse(&running.id).unwrap();
    assert!(frozen(), "a copy of what goes on is torn");
    drop(kept);
    world.engine.rouse(&running.id).unwrap();
    assert!(!frozen());
}

#[test]
fn a_zygote_survives_clients_that_talk_nonsense_or_go_away() {
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
fn a_plan_prints_every_step_to_the_sandbox() {
    let world = World::new();
    let plan = world.engine.plan(&world.spec()).unwrap().to_string();
    for word in ["claim_ids", "clone", "overlay", "mask", "root", "capabilities", "seccomp", "exec"]
    {
        assert!(plan.contains(word), "{word} is missing in\n{plan}");
    }
}
