//! A zygote outlives the program that started it: what happens to it when the program is replaced,
//! and when it is asked to go.

use super::*;

#[test]
fn a_zygote_of_another_build_gives_way_once_it_has_nothing_to_look_after() {
    let world = World::new();
    let first = world.start();
    let old = world.zygotes();
    let newer = world.folder.path().join("newer/harvest-zygote");
    fs::create_dir(newer.parent().unwrap()).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_harvest-zygote"), &newer).unwrap();
    let upgraded = Engine::open(Config {
        home: world.home.clone(),
        cache: world.folder.path().join("cache"),
        supervisor: std::env::var_os("HARVEST_SUPERVISOR").unwrap_or_default().into(),
        zygote: vec![newer.into()],
        driver: Driver::Dir,
        thresholds: Thresholds::NONE,
    })
    .unwrap();
    // Who has sandboxes stays their parent, whatever has been installed meanwhile.
    let second = upgraded.start(&world.spec()).unwrap();
    assert_eq!(world.zygotes(), old);
    for running in [first, second] {
        upgraded.remove(&running.id).unwrap();
    }
    let third = upgraded.start(&world.spec()).unwrap();
    let new = world.zygotes();
    assert!(new.len() == 1 && new != old, "{old:?} {new:?}");
    assert_eq!(shell(&third, "echo here").out, "here");
    upgraded.remove(&third.id).unwrap();
}

#[test]
fn a_zygote_asked_to_rest_does_not_leave_its_sandbox() {
    let world = World::new();
    let running = world.start();
    let zygotes = world.zygotes();
    world.engine.rest().unwrap();
    // Twice: the first question may find it on its way out, and keep it.
    for _ in 0..2 {
        world.engine.thaw(&running.id).unwrap();
        world.engine.rest().unwrap();
    }
    assert_eq!(world.zygotes(), zygotes);
    assert_eq!(shell(&running, "echo here").out, "here");
}
