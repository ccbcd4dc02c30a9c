//! Sandboxes whose supervisor waits for them: nothing of the host is left inside, nothing outlives the
//! zygote it waited with, and limits are the sandbox's own.

use super::*;

/// Living processes of the pid namespace this process is the first of.
fn inside(pid: u32) -> Vec<u32> {
    let link = |pid: u32| fs::read_link(format!("/proc/{pid}/ns/pid")).ok();
    let wanted = link(pid);
    processes().into_iter().filter(|one| link(*one) == wanted && uid(*one).is_some()).collect()
}

/// Processes in the cgroups of what is not this sandbox: seeds.
fn waiting(world: &World, running: &Running) -> Vec<String> {
    let parts = world.groups().into_iter().flat_map(|group| {
        let own = running.id.part().to_owned();
        parts(&group).into_iter().filter(move |part| *part != own).map(move |part| group.join(part))
    });
    let groups =
        parts.flat_map(|part| [part.clone(), part.join("supervisor"), part.join("work/commands")]);
    let lines =
        groups.map(|group| fs::read_to_string(group.join("cgroup.procs")).unwrap_or_default());
    lines.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()).collect()
}

fn has_seeds(world: &World) -> bool {
    let plan = world.engine.plan(&world.spec()).unwrap();
    plan.steps.iter().any(|step| matches!(step, harvest_engine::Step::Clone { into: None, .. }))
}

#[test]
fn nobody_with_the_hosts_powers_is_left_inside_a_sandbox_that_has_started() {
    let world = World::new();
    for _ in 0..3 {
        let running = world.start();
        let range = range(&running);
        for pid in inside(running.pid) {
            assert!(uid(pid).is_none_or(|uid| uid / 65536 == range), "{pid} is of another range");
        }
    }
}

#[test]
fn seeds_end_when_their_zygote_is_killed() {
    let world = World::new();
    let running = world.start();
    if !has_seeds(&world) {
        return;
    }
    eventually("a seed", || !waiting(&world, &running).is_empty());
    for pid in world.zygotes() {
        // What it does beside has its name for a moment, and may be gone already.
        let _ = HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
    }
    eventually("their end", || waiting(&world, &running).is_empty());
    assert_eq!(shell(&running, "echo on").out, "on");
}

#[test]
fn as_many_seeds_wait_as_sandboxes_were_started_at_once() {
    let world = World::new();
    if !has_seeds(&world) {
        return;
    }
    let seeds = |group: &Path| {
        let own: Vec<String> =
            world.engine.list().unwrap().iter().map(|id| id.part().to_owned()).collect();
        parts(group).into_iter().filter(|part| !own.contains(part)).count()
    };
    world.start();
    let group = world.groups().remove(0);
    let mut bursts = 0;
    // Two wait always; a burst that a busy machine spreads out is not one.
    eventually("more than two seeds", || {
        if bursts < 5 && seeds(&group) <= 2 {
            bursts += 1;
            std::thread::scope(|scope| (0..5).for_each(|_| drop(scope.spawn(|| world.start()))));
        }
        seeds(&group) > 2
    });
}

#[test]
fn seeds_are_counted_as_they_are_grown_used_and_missed() {
    let world = World::new();
    assert_eq!(world.engine.seeds().unwrap(), None, "to ask starts no zygote");
    world.start();
    let counts = || world.engine.seeds().unwrap().unwrap();
    let first = counts();
    assert_eq!((first.used, first.missed), (0, 1));
    if !has_seeds(&world) {
        return;
    }
    eventually("a seed", || counts().ready > 0);
    world.start();
    let second = counts();
    assert_eq!((second.used, second.missed), (1, 1));
    assert!(second.grown > second.ready, "one of those grown is a sandbox now: {second:?}");
}

#[test]
fn a_sandbox_may_have_more_memory_than_the_seed_it_came_from() {
    let world = World::new();
    let first = world.start();
    if has_seeds(&world) {
        eventually("a seed", || !waiting(&world, &first).is_empty());
    }
    let limits = Limits { memory_bytes: 8 << 30, ..Limits::default() };
    let spec = Spec { limits, ..world.spec() };
    world.engine.start(&spec).unwrap();
    let work = world.groups().into_iter().map(|group| group.join(spec.id.part()).join("work"));
    let limit =
        work.flat_map(|work| ["memory.limit_in_bytes", "memory.max"].map(|file| work.join(file)));
    let found: Vec<String> = limit.filter_map(|file| fs::read_to_string(file).ok()).collect();
    assert_eq!(found, [format!("{}\n", 8u64 << 30)]);
}

#[test]
fn a_guest_may_ask_before_it_is_welcome() {
    let world = World::new();
    let running = world.start();
    let mut guest = Guest::hail(&running.bridge).unwrap();
    let command = Command { argv: vec!["echo".into(), "one".into()], ..Command::default() };
    let mut said = Vec::new();
    for _ in 0..2 {
        let exit = guest
            .exec(command.clone(), b"", &mut |_, bytes| said.extend_from_slice(bytes))
            .unwrap();
        assert_eq!(exit, Exit::Code(0));
    }
    assert_eq!(said, b"one\none\n");
}
