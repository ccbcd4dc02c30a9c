//! The ways around what a lesser host lacks, taken on this one.

use super::*;

/// A world whose zygote believes that its host lacks something.
fn world_without(lack: &str) -> World {
    World::with_zygote("", &["--without", lack])
}

#[test]
fn without_nftables_the_door_is_reached_through_the_older_tables() {
    let world = world_without("nftables");
    let running = world.start();
    let door = UnixListener::bind(&running.door).unwrap();
    fs::set_permissions(&running.door, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    thread::spawn(move || {
        for stream in door.incoming() {
            thread::spawn(move || gateway(stream.unwrap()));
        }
    });
    let said = shell(&running, "wget -q -O - http://forge.example:8080/hello");
    assert_eq!(said.out, "forge.example:8080 says hello", "{said:?}");
    assert_ne!(shell(&running, "wget -q -O - http://elsewhere.example/").exit, Exit::Code(0));
}
