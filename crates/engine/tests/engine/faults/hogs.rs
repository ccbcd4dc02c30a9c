//! Commands that take all they can get. Pid 1, other sandboxes and the host go on.

use super::*;

fn small(world: &World) -> Running {
    let limits = Limits { memory_bytes: 64 << 20, pids: 64, ..Limits::default() };
    world.engine.start(&Spec { limits, binds: probes::probe_binds(), ..world.spec() }).unwrap()
}

#[test]
fn a_fork_bomb_leaves_its_neighbour_alone_and_can_be_removed_while_it_goes_off() {
    let world = World::new();
    let [bombed, neighbour] = [small(&world), small(&world)];
    let range = range(&bombed);
    let bomb = thread::spawn({
        let bombed = bombed.clone();
        move || {
            let mut guest = Guest::dial(&bombed.bridge).unwrap();
            guest.exec(probes::probe_command("bomb", 0), &[], &mut |_, _| {})
        }
    });
    eventually("all processes are taken", || processes_of(range).len() >= 40);
    assert_eq!(shell(&neighbour, "true | true | echo fine").out, "fine");
    world.engine.remove(&bombed.id).unwrap();
    assert!(bomb.join().unwrap().is_err(), "its bridge broke");
    assert_eq!(processes_of(range), [0u32; 0]);
    assert_eq!(shell(&neighbour, "true | true | echo fine").out, "fine");
}

#[test]
fn shared_memory_that_fills_up_hurts_its_writer_only() {
    let world = World::new();
    let running = small(&world);
    let fill = shell(&running, "cat /dev/zero > /dev/shm/all");
    assert_ne!(fill.exit, Exit::Code(0), "{fill:?}");
    assert_eq!(shell(&running, "echo fine").out, "fine");
    assert_eq!(shell(&running, "rm /dev/shm/all && echo fine").out, "fine");
    assert_eq!(world.engine.find(&running.id).unwrap(), SandboxState::Running(running.clone()));
}

#[test]
fn files_larger_than_the_memory_limit_can_be_written_and_read() {
    let world = World::new();
    let running = small(&world);
    let said =
        shell(&running, "head -c 100000000 /dev/zero > /tmp/large && cat /tmp/large | wc -c");
    assert_eq!((said.exit, said.out.as_str()), (Exit::Code(0), "100000000"));
}

#[test]
fn names_by_the_ten_thousand_are_the_sandboxes_own_memory() {
    let world = World::new();
    let running = small(&world);
    // Each name asked for and not found is remembered by the kernel.
    let script =
        "i=0; while [ $i -lt 40000 ]; do [ -e /tmp/no-such-name-$i ]; i=$((i+1)); done; echo done";
    let said = shell(&running, script);
    assert!(matches!(said.exit, Exit::Code(0) | Exit::Oom), "{said:?}");
    assert_eq!(shell(&running, "echo fine").out, "fine");
}
