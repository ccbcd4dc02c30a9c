//! A zygote outlives the program that started it: what happens when that program is replaced, and
//! when the zygote is asked to exit.

use super::*;

#[test]
fn idle_zygote_of_another_build_is_replaced() {
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
    // A zygote with sandboxes stays their parent whatever was installed meanwhile.
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
fn zygote_with_sandbox_ignores_exit_request() {
    let world = World::new();
    let running = world.start();
    let zygotes = world.zygotes();
    world.engine.stop_if_idle().unwrap();
    // Twice: the first request may reach the zygote while it exits, and keep it.
    for _ in 0..2 {
        world.engine.thaw(&running.id).unwrap();
        world.engine.stop_if_idle().unwrap();
    }
    assert_eq!(world.zygotes(), zygotes);
    assert_eq!(shell(&running, "echo here").out, "here");
}
