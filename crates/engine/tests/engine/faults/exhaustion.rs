//! Commands that use up their limits. Pid 1, other sandboxes and the host are not affected.

use super::*;

fn start_small(world: &World) -> Running {
    let limits = Limits { memory_bytes: 64 << 20, pids: 64, ..Limits::default() };
    world.engine.start(&Spec { limits, binds: probes::probe_binds(), ..world.spec() }).unwrap()
}

#[test]
fn fork_bomb_spares_neighbours_and_can_be_removed() {
    let world = World::new();
    let [bombed, neighbour] = [start_small(&world), start_small(&world)];
    let range = range(&bombed);
    let bomb = thread::spawn({
        let bombed = bombed.clone();
        move || {
            let mut client = SupervisorClient::dial(&bombed.bridge).unwrap();
            client.exec(probes::probe_command("bomb", 0), &[], &mut |_, _| {})
        }
    });
    eventually("the process limit", || processes_of(range).len() >= 40);
    assert_eq!(shell(&neighbour, "true | true | echo fine").out, "fine");
    world.engine.remove(&bombed.id).unwrap();
    assert!(bomb.join().unwrap().is_err(), "the bridge broke");
    assert_eq!(processes_of(range), [0u32; 0]);
    assert_eq!(shell(&neighbour, "true | true | echo fine").out, "fine");
}

#[test]
fn full_shared_memory_affects_only_its_writer() {
    let world = World::new();
    let running = start_small(&world);
    let fill = shell(&running, "cat /dev/zero > /dev/shm/all");
    assert_ne!(fill.exit, Exit::Code(0), "{fill:?}");
    assert_eq!(shell(&running, "echo fine").out, "fine");
    assert_eq!(shell(&running, "rm /dev/shm/all && echo fine").out, "fine");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
}

#[test]
fn files_larger_than_the_memory_limit_work() {
    let world = World::new();
    let running = start_small(&world);
    let output =
        shell(&running, "head -c 100000000 /dev/zero > /tmp/large && cat /tmp/large | wc -c");
    assert_eq!((output.exit, output.out.as_str()), (Exit::Code(0), "100000000"));
}

#[test]
fn failed_lookups_count_as_sandbox_memory() {
    let world = World::new();
    let running = start_small(&world);
    // The kernel caches every failed lookup.
    let script =
        "i=0; while [ $i -lt 40000 ]; do [ -e /tmp/no-such-name-$i ]; i=$((i+1)); done; echo done";
    let output = shell(&running, script);
    assert!(matches!(output.exit, Exit::Code(0) | Exit::Oom), "{output:?}");
    assert_eq!(shell(&running, "echo fine").out, "fine");
}
