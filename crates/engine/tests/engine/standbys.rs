//! Tests of standby processes: no privileged process stays inside, none outlives its zygote, and a
//! sandbox gets its own limits.

use super::*;

/// Live processes of the pid namespace whose first process this is.
fn inside(pid: u32) -> Vec<u32> {
    let link = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let wanted = link(pid);
    processes()
        .into_iter()
        .filter(|process| link(*process) == wanted && uid(*process).is_some())
        .collect()
}

/// Processes in cgroups that belong to no started sandbox: standbys.
fn standby_processes(world: &World, running: &Running) -> Vec<String> {
    let own = world.groups_of(&running.id);
    let all = world
        .groups()
        .into_iter()
        .flat_map(|group| parts(&group).into_iter().map(move |part| group.join(part)));
    let standbys = all.filter(|group| !own.contains(group));
    let groups = standbys
        .flat_map(|part| [part.clone(), part.join("supervisor"), part.join("work/commands")]);
    let lines =
        groups.map(|group| fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default());
    lines.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[test]
fn no_privileged_process_remains_in_started_sandbox() {
    let world = World::new();
    for _ in 0..3 {
        let running = world.start();
        let range = range(&running);
        for pid in inside(running.pid) {
            assert!(
                uid(pid).is_none_or(|uid| uid / 65536 == range),
                "{pid} is in another id range"
            );
        }
    }
}

#[test]
fn standbys_die_with_their_zygote() {
    let world = World::new();
    let running = world.start();
    if !world.keeps_standbys() {
        return;
    }
    eventually("a standby", || !standby_processes(&world, &running).is_empty());
    for pid in world.zygotes() {
        // Helper processes have its name for a moment and may already be gone.
        let _ = HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    eventually("the end of the standbys", || standby_processes(&world, &running).is_empty());
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn standby_count_follows_the_largest_burst() {
    let world = World::new();
    if !world.keeps_standbys() {
        return;
    }
    let standbys = |group: &Path| {
        let own = world.engine.list().unwrap().len();
        parts(group).len().saturating_sub(own)
    };
    world.start();
    let group = world.groups().remove(0);
    let mut bursts = 0;
    // Two standbys are always kept; a busy host may spread a burst out.
    eventually("more than two standbys", || {
        if bursts < 5 && standbys(&group) <= 2 {
            bursts += 1;
            std::thread::scope(|scope| (0..5).for_each(|_| drop(scope.spawn(|| world.start()))));
        }
        standbys(&group) > 2
    });
}

#[test]
fn standby_counts_track_preforked_used_and_missed() {
    let world = World::new();
    assert_eq!(world.engine.standby_counts().unwrap(), None, "asking starts no zygote");
    world.start();
    let counts = || world.engine.standby_counts().unwrap().unwrap();
    let first = counts();
    assert_eq!((first.used, first.missed), (0, 1));
    if !world.keeps_standbys() {
        return;
    }
    eventually("a standby", || counts().ready > 0);
    world.start();
    let second = counts();
    assert_eq!((second.used, second.missed), (1, 1));
    assert!(second.preforked > second.ready, "process became a sandbox: {second:?}");
}

#[test]
fn sandbox_memory_may_exceed_its_standbys_limit() {
    let world = World::new();
    let first = world.start();
    if world.keeps_standbys() {
        eventually("a standby", || !standby_processes(&world, &first).is_empty());
    }
    let limits = Limits { memory_bytes: 8 << 30, ..Limits::default() };
    let spec = Spec { limits, ..world.spec() };
    world.engine.start(&spec).unwrap();
    let work = world.groups_of(&spec.id).into_iter().map(|group| group.join("work"));
    let limit =
        work.flat_map(|work| ["memory.limit_in_bytes", "memory.max"].map(|file| work.join(file)));
    let found: Vec<String> = limit.filter_map(|file| fs::read_to_string(file).ok()).collect();
    assert_eq!(found, [format!("{}\n", 8u64 << 30)]);
}

#[test]
fn client_may_send_before_the_welcome() {
    let world = World::new();
    let running = world.start();
    let mut client = SupervisorClient::dial_pipelined(&running.bridge).unwrap();
    let command = Command { argv: vec!["echo".into(), "one".into()], ..Command::default() };
    let mut output = Vec::new();
    for _ in 0..2 {
        let exit = client
            .exec(command.clone(), b"", &mut |_, bytes| output.extend_from_slice(bytes))
            .unwrap();
        assert_eq!(exit, Exit::Code(0));
    }
    assert_eq!(output, b"one\none\n");
}
