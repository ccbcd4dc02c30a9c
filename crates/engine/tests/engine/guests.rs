//! What a guest on the bridge can rely on: streams that flow both ways, trees that are copied without
//! a shell, a sandbox that goes on with the disk it left.

use std::os::unix::fs::PermissionsExt;

use harvest_engine::guest::Heard;

use super::*;

fn guest(running: &Running) -> Guest {
    Guest::dial(&running.bridge).unwrap()
}

#[test]
fn a_dead_sandbox_goes_on_with_the_disk_it_left() {
    World::each().for_each(|world| goes_on(&world));
}

fn goes_on(world: &World) {
    let running = world.start();
    shell(&running, "echo kept > /f; mkdir /d; chown 10001:10001 /d");
    assert!(matches!(world.engine.start_again(&running.id), Err(EngineError::Exists { .. })));
    for _ in 0..2 {
        world.engine.kill(&running.id).unwrap();
        let again = world.engine.start_again(&running.id).unwrap();
        assert_eq!(again.id, running.id);
        assert_eq!(shell(&again, "cat /f; ls -ldn /d | grep -c ' 10001 '").out, "kept\n1");
    }
    let snapshot = harvest_proto::SnapshotId::random();
    world.engine.end_kept(&running.id, &snapshot).unwrap();
    assert!(world.engine.start_again(&running.id).is_err(), "its disk is a snapshot's now");
    world.engine.snapshot_remove(&snapshot).unwrap();
}

#[test]
fn a_sandbox_that_cannot_be_started_again_keeps_its_disk() {
    let world = World::new();
    let running = world.start();
    shell(&running, "echo kept > /f");
    world.engine.kill(&running.id).unwrap();
    let (base, away) =
        (world.folder.path().join("cache/layers/base"), world.folder.path().join("away"));
    fs::rename(&base, &away).unwrap();
    assert!(world.engine.start_again(&running.id).is_err());
    fs::rename(&away, &base).unwrap();
    let again = world.engine.start_again(&running.id).unwrap();
    assert_eq!(shell(&again, "cat /f").out, "kept");
}

#[test]
fn a_start_that_was_written_down_and_failed_can_be_tried_again() {
    let world = World::new();
    let running = world.start();
    shell(&running, "echo kept > /f");
    world.engine.kill(&running.id).unwrap();
    let record = world.home.join("sandboxes").join(running.id.part()).join("record.json");
    let whole = fs::read_to_string(&record).unwrap();
    // What pid 1 is told grows with the environment until it does not fit: after all has been written down.
    let mut refusals = Vec::new();
    for length in (0..4096).step_by(64).map(|less| 192 * 1024 - less) {
        let env = format!(r#""env":{{"LONG":"{}"}},"created_at""#, "x".repeat(length));
        fs::write(&record, whole.replace(r#""env":{},"created_at""#, &env)).unwrap();
        match world.engine.start_again(&running.id) {
            Ok(_) => break,
            Err(error) => refusals.push(format!("{error:?}")),
        }
    }
    assert!(refusals.iter().any(|reason| reason.contains("pid 1")), "{refusals:?}");
    assert!(!refusals.iter().any(|reason| reason.contains("started before")), "{refusals:?}");
    world.engine.kill(&running.id).unwrap();
    fs::write(&record, &whole).unwrap();
    let again = world.engine.start_again(&running.id).unwrap();
    assert_eq!(shell(&again, "cat /f").out, "kept");
}

#[test]
fn what_is_sealed_refuses_every_name_at_once() {
    let world = World::new();
    let spec = Spec { network: Network::Nothing, ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    // Far longer than a refusal takes, far shorter than a name waits for a gateway.
    let lookup = command(&["/bin/busybox", "nslookup", "forge.example"]);
    let said = exec(&running, Command { timeout_millis: Some(60_000), ..lookup });
    assert!(said.exit == Exit::Code(1) && said.out.contains("NXDOMAIN"), "{said:?}");
    let reach = shell(&running, "/bin/busybox nc 192.0.2.1 80");
    assert_eq!(reach.exit, Exit::Code(1), "{reach:?}");
    assert_eq!(world.engine.inspect(&spec.id).unwrap().unwrap().spec.network, Network::Nothing);
}

#[test]
fn sandboxes_of_sessions_are_told_from_those_of_people() {
    let world = World::new();
    let mine = world.start();
    let spec = Spec { owner: Owner::Sessions, ..world.spec() };
    let theirs = world.engine.start(&spec).unwrap();
    for (owner, running) in [(Owner::Kept, &mine), (Owner::Sessions, &theirs)] {
        assert_eq!(world.engine.list_of(owner).unwrap(), std::slice::from_ref(&running.id));
    }
    // What people take by hand of a session's sandbox is theirs: only the session's own captures are its.
    let snapshot = harvest_proto::SnapshotId::random;
    let by_hand = world.engine.capture(&theirs.id, &snapshot()).unwrap().snapshot;
    let its_own = world.engine.capture_for_sessions(&theirs.id, &snapshot()).unwrap().snapshot;
    assert_eq!((by_hand.of_sessions, its_own.of_sessions), (false, true));
}

#[test]
fn input_flows_while_output_does() {
    const BYTES: usize = 8 << 20;
    let world = World::new();
    let running = world.start();
    let (mut live, input) = guest(&running).live(command(&["cat"]), true).unwrap();
    let feeding = thread::spawn(move || {
        let mut input = input.unwrap();
        let piece: Vec<u8> = (0..100_000u32).map(|byte| (byte % 251) as u8).collect();
        let mut left = BYTES;
        while left > 0 {
            let now = left.min(piece.len());
            assert!(input.write(&piece[..now]).unwrap());
            left -= now;
        }
        input.end().unwrap();
    });
    let mut all = Vec::new();
    let exit = loop {
        match live.listen().unwrap() {
            Heard::Output(_, bytes) => all.extend(bytes),
            Heard::Exited { exit, .. } => break exit,
        }
    };
    feeding.join().unwrap();
    assert_eq!((exit, all.len()), (Exit::Code(0), BYTES));
    assert!(
        all.chunks(100_000).all(|piece| (0..piece.len()).all(|at| piece[at] == (at % 251) as u8))
    );
}

#[test]
fn who_writes_to_a_command_that_has_ended_is_let_go() {
    let world = World::new();
    let running = world.start();
    let (mut live, input) = guest(&running).live(command(&["true"]), true).unwrap();
    let feeding = thread::spawn(move || {
        let mut input = input.unwrap();
        // Until nobody reads, or the bridge is closed: both are an end.
        while matches!(input.write(&[0; 65536]), Ok(true)) {}
    });
    while !matches!(live.listen().unwrap(), Heard::Exited { .. }) {}
    drop(live);
    feeding.join().unwrap();
}

#[test]
fn a_command_dies_with_whoever_follows_it() {
    let world = World::new();
    let running = world.start();
    let script = "(setsid sleep 98765 &); echo on; sleep 98765";
    let (mut live, _) = guest(&running).live(command(&["sh", "-c", script]), false).unwrap();
    assert!(matches!(live.listen().unwrap(), Heard::Output(..)));
    assert_eq!(shell(&running, "ps | grep -c '[s]leep 98765'").out, "2");
    drop(live);
    eventually("the command and all it started are dead", || {
        shell(&running, "ps | grep -c '[s]leep 98765'").out == "0"
    });
}

#[test]
fn a_tree_comes_back_as_it_went_in() {
    let world = World::new();
    let running = world.start();
    let (source, back) = (world.folder.path().join("source"), world.folder.path().join("back"));
    fs::create_dir_all(source.join("a/empty")).unwrap();
    fs::write(source.join("a/run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(source.join("a/run"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(source.join("a/empty"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(source.join("-rf *"), vec![7u8; 300_000]).unwrap();
    symlink("/nowhere", source.join("link")).unwrap();
    let copied = guest(&running).copy_in(&source, "/tree", Some("10001")).unwrap();
    assert_eq!((copied.files, copied.bytes, copied.skipped), (2, 300_010, 0));
    assert_eq!(shell(&running, "ls -ln /tree/a/run | grep -c ' 10001 '").out, "1");
    guest(&running).copy_out("/tree", &back).unwrap();
    let mode = |path: &str| fs::symlink_metadata(back.join(path)).unwrap().mode() & 0o7777;
    assert_eq!((mode("a/run"), mode("a/empty")), (0o750, 0o700));
    assert_eq!(fs::read_link(back.join("link")).unwrap(), Path::new("/nowhere"));
    assert_eq!(fs::read(back.join("-rf *")).unwrap(), vec![7u8; 300_000]);
}

#[test]
fn what_comes_out_of_a_sandbox_stays_in_its_target_and_gains_no_rights() {
    let world = World::new();
    let running = world.start();
    let (target, victim) = (world.folder.path().join("target"), world.folder.path().join("victim"));
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("file"), "mine").unwrap();
    let trap = victim.display();
    // First links to the outside, then a folder and a file in their places.
    shell(&running, &format!("mkdir /t; ln -s {trap} /t/folder; ln -s {trap}/file /t/file"));
    guest(&running).copy_out("/t", &target).unwrap();
    assert!(target.join("folder").is_symlink(), "a link is copied as one");
    let second = "rm() { /bin/busybox rm \"$@\"; }; rm /t/folder /t/file; mkdir /t/folder; \
                  echo theirs > /t/file; echo theirs > /t/folder/new; /bin/busybox chmod 6755 /t/file";
    shell(&running, second);
    assert!(
        guest(&running).copy_out("/t", &target).is_err(),
        "a link in a folder's place is not entered"
    );
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 1, "nothing new outside");
    assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "mine");
    fs::remove_file(target.join("folder")).unwrap();
    guest(&running).copy_out("/t", &target).unwrap();
    assert_eq!(fs::symlink_metadata(target.join("file")).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_to_string(target.join("folder/new")).unwrap(), "theirs\n");
    assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "mine");
}

#[test]
fn a_copy_that_fails_leaves_what_was_there() {
    let world = World::new();
    let running = world.start();
    let folder = world.folder.path().join("copies");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), "mine").unwrap();
    // A file by its kind, which cannot be read.
    assert!(guest(&running).copy_out("/proc/1/mem", &folder.join("file")).is_err());
    assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "mine");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no half copy is left");
    shell(&running, "echo theirs > /tmp/file");
    guest(&running).copy_out("/tmp/file", &folder.join("file")).unwrap();
    assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "theirs\n");
}

#[test]
fn a_folder_with_more_entries_than_fit_a_reply_is_copied_whole() {
    let world = World::new();
    let running = world.start();
    let name = "n".repeat(200);
    let script = format!(
        "mkdir /many; i=0; while [ $i -lt 6000 ]; do : > /many/$i-{name}; i=$((i+1)); done"
    );
    assert_eq!(shell(&running, &script).exit, Exit::Code(0));
    assert!(guest(&running).list("/many").is_err(), "it does not fit one");
    let target = world.folder.path().join("many");
    assert_eq!(guest(&running).copy_out("/many", &target).unwrap().files, 6000);
    assert_eq!(fs::read_dir(&target).unwrap().count(), 6000);
}

#[test]
fn a_working_folder_that_only_the_image_names_is_made() {
    let world = World::new();
    let mut spec = world.spec();
    if let Origin::Layers { config, .. } = &mut spec.from {
        config.workdir = "/w/x".to_owned();
    }
    let running = world.engine.start(&spec).unwrap();
    assert_eq!(shell(&running, "pwd").out, "/w/x");
    // One that a command names must be there: it may be a slip.
    let refused = guest(&running).exec(
        Command { cwd: Some("/y".to_owned()), ..command(&["true"]) },
        &[],
        &mut |_, _| {},
    );
    assert!(refused.is_err(), "{refused:?}");
}
