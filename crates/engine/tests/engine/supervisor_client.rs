//! The supervisor client: commands, copies of trees without a shell, and restarts with the same
//! disk.

use std::os::unix::fs::PermissionsExt;

use super::{bridge_files::BridgeFiles, *};
use harvest_engine::supervisor_client::{copy_in, copy_out};
use harvest_proto::bridge::FileRequest;

fn client(running: &Running) -> SupervisorClient {
    SupervisorClient::dial(&running.bridge).unwrap()
}

fn files(running: &Running) -> BridgeFiles {
    BridgeFiles::dial(running)
}

#[test]
fn a_dead_sandbox_restarts_with_its_disk() {
    World::each().for_each(|world| restarts_with_its_disk(&world));
}

fn restarts_with_its_disk(world: &World) {
    let running = world.start();
    shell(&running, "echo kept > /f; mkdir /d; chown 10001:10001 /d");
    assert!(matches!(world.engine.restart(&running.id), Err(EngineError::Exists { .. })));
    for _ in 0..2 {
        world.engine.kill(&running.id).unwrap();
        let again = world.engine.restart(&running.id).unwrap();
        assert_eq!(again.id, running.id);
        assert_eq!(shell(&again, "cat /f; ls -ldn /d | grep -c ' 10001 '").out, "kept\n1");
    }
    let snapshot = harvest_proto::SnapshotId::random();
    world.engine.stop_and_save(&running.id, &snapshot).unwrap();
    assert!(world.engine.restart(&running.id).is_err(), "its disk has become a snapshot");
    world.engine.snapshot_remove(&snapshot).unwrap();
}

#[test]
fn a_failed_restart_keeps_the_disk() {
    let world = World::new();
    let running = world.start();
    shell(&running, "echo kept > /f");
    world.engine.kill(&running.id).unwrap();
    let (base, away) =
        (world.folder.path().join("cache/layers/base"), world.folder.path().join("away"));
    fs::rename(&base, &away).unwrap();
    assert!(world.engine.restart(&running.id).is_err());
    fs::rename(&away, &base).unwrap();
    let again = world.engine.restart(&running.id).unwrap();
    assert_eq!(shell(&again, "cat /f").out, "kept");
}

#[test]
fn a_recorded_but_failed_start_can_be_retried() {
    let world = World::new();
    let running = world.start();
    shell(&running, "echo kept > /f");
    world.engine.kill(&running.id).unwrap();
    let record = world.home.join("sandboxes").join(running.id.part()).join("record.json");
    let original = fs::read_to_string(&record).unwrap();
    // The environment grows until the launch message of pid 1 does not fit, after the start is
    // recorded.
    let mut refusals = Vec::new();
    for length in (0..4096).step_by(64).map(|less| 192 * 1024 - less) {
        let env = format!(r#""env":{{"LONG":"{}"}},"#, "x".repeat(length));
        let changed = original.replacen(r#""env":{},"#, &env, 1);
        assert_ne!(changed, original);
        fs::write(&record, changed).unwrap();
        match world.engine.restart(&running.id) {
            Ok(_) => break,
            Err(error) => refusals.push(format!("{error:?}")),
        }
    }
    assert!(refusals.iter().any(|reason| reason.contains("pid 1")), "{refusals:?}");
    assert!(!refusals.iter().any(|reason| reason.contains("started before")), "{refusals:?}");
    world.engine.kill(&running.id).unwrap();
    fs::write(&record, &original).unwrap();
    let again = world.engine.restart(&running.id).unwrap();
    assert_eq!(shell(&again, "cat /f").out, "kept");
}

#[test]
fn a_sandbox_without_network_refuses_lookups_at_once() {
    let world = World::new();
    let spec = Spec { network: Network::Nothing, ..world.spec() };
    let running = world.engine.start(&spec).unwrap();
    // Far longer than a refusal takes, far shorter than a lookup waits for a gateway.
    let lookup = command(&["/bin/busybox", "nslookup", "forge.example"]);
    let said = exec(&running, Command { timeout_millis: Some(60_000), ..lookup });
    assert!(said.exit == Exit::Code(1) && said.out.contains("NXDOMAIN"), "{said:?}");
    let reach = shell(&running, "/bin/busybox nc 192.0.2.1 80");
    assert_eq!(reach.exit, Exit::Code(1), "{reach:?}");
    assert_eq!(world.engine.inspect(&spec.id).unwrap().unwrap().spec.network, Network::Nothing);
}

#[test]
fn sandboxes_are_listed_with_their_owner() {
    let world = World::new();
    let standalone = world.start();
    let spec = Spec { owner: Owner::Sessions, ..world.spec() };
    let of_session = world.engine.start(&spec).unwrap();
    let listed = world.engine.owners().unwrap();
    for (owner, running) in [(Owner::Standalone, &standalone), (Owner::Sessions, &of_session)] {
        assert!(listed.contains(&(running.id.clone(), owner, None)), "{listed:?}");
    }
    // A manual snapshot of a session's sandbox belongs to the user, not to the session.
    let snapshot = harvest_proto::SnapshotId::random;
    let manual = world.engine.capture(&of_session.id, &snapshot()).unwrap().snapshot;
    let by_session =
        world.engine.capture_for_sessions(&of_session.id, &snapshot()).unwrap().snapshot;
    assert_eq!((manual.of_sessions, by_session.of_sessions), (false, true));
}

#[test]
fn a_copied_tree_keeps_content_and_modes() {
    let world = World::new();
    let running = world.start();
    let (source, back) = (world.folder.path().join("source"), world.folder.path().join("back"));
    fs::create_dir_all(source.join("a/empty")).unwrap();
    fs::write(source.join("a/run"), "#!/bin/sh\n").unwrap();
    fs::set_permissions(source.join("a/run"), fs::Permissions::from_mode(0o750)).unwrap();
    fs::set_permissions(source.join("a/empty"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(source.join("-rf *"), vec![7u8; 300_000]).unwrap();
    symlink("/nowhere", source.join("link")).unwrap();
    shell(&running, "mkdir /tree; chown 10001:10001 /tree");
    let copied = copy_in(&mut files(&running), &source, "/tree", Some("10001")).unwrap();
    assert_eq!((copied.files, copied.bytes, copied.special.len()), (2, 300_010, 0));
    assert_eq!(shell(&running, "ls -ln /tree/a/run | grep -c ' 10001 '").out, "1");
    copy_out(&mut files(&running), "/tree", &back).unwrap();
    let mode = |path: &str| fs::symlink_metadata(back.join(path)).unwrap().mode() & 0o7777;
    assert_eq!((mode("a/run"), mode("a/empty")), (0o750, 0o700));
    assert_eq!(fs::read_link(back.join("link")).unwrap(), Path::new("/nowhere"));
    assert_eq!(fs::read(back.join("-rf *")).unwrap(), vec![7u8; 300_000]);
}

#[test]
fn copies_stay_in_the_target_without_set_id() {
    let world = World::new();
    let running = world.start();
    let (target, victim) = (world.folder.path().join("target"), world.folder.path().join("victim"));
    fs::create_dir(&victim).unwrap();
    fs::write(victim.join("file"), "mine").unwrap();
    let trap = victim.display();
    // First links to the outside, then a folder and a file with the same names.
    shell(&running, &format!("mkdir /t; ln -s {trap} /t/folder; ln -s {trap}/file /t/file"));
    copy_out(&mut files(&running), "/t", &target).unwrap();
    assert!(target.join("folder").is_symlink(), "a link is copied as a link");
    let second = "rm() { /bin/busybox rm \"$@\"; }; rm /t/folder /t/file; mkdir /t/folder; \
                  echo theirs > /t/file; echo theirs > /t/folder/new; /bin/busybox chmod 6755 /t/file";
    shell(&running, second);
    assert!(
        copy_out(&mut files(&running), "/t", &target).is_err(),
        "a link in place of a folder is not followed"
    );
    assert_eq!(fs::read_dir(&victim).unwrap().count(), 1, "nothing new outside");
    assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "mine");
    fs::remove_file(target.join("folder")).unwrap();
    copy_out(&mut files(&running), "/t", &target).unwrap();
    assert_eq!(fs::symlink_metadata(target.join("file")).unwrap().mode() & 0o7777, 0o755);
    assert_eq!(fs::read_to_string(target.join("folder/new")).unwrap(), "theirs\n");
    assert_eq!(fs::read_to_string(victim.join("file")).unwrap(), "mine");
}

#[test]
fn a_failed_copy_leaves_the_existing_file() {
    let world = World::new();
    let running = world.start();
    let folder = world.folder.path().join("copies");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), "mine").unwrap();
    // A regular file that cannot be read.
    assert!(copy_out(&mut files(&running), "/proc/1/mem", &folder.join("file")).is_err());
    assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "mine");
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no partial copy is left");
    shell(&running, "echo theirs > /tmp/file");
    copy_out(&mut files(&running), "/tmp/file", &folder.join("file")).unwrap();
    assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "theirs\n");
}

#[test]
fn folders_too_large_for_one_reply_are_copied() {
    let world = World::new();
    let running = world.start();
    let name = "n".repeat(200);
    let script = format!(
        "mkdir /many; i=0; while [ $i -lt 6000 ]; do : > /many/$i-{name}; i=$((i+1)); done"
    );
    assert_eq!(shell(&running, &script).exit, Exit::Code(0));
    let list = FileRequest::List { path: "/many".to_owned(), after: None };
    assert!(files(&running).request(list).is_err(), "it does not fit one reply");
    let target = world.folder.path().join("many");
    assert_eq!(copy_out(&mut files(&running), "/many", &target).unwrap().files, 6000);
    assert_eq!(fs::read_dir(&target).unwrap().count(), 6000);
}

#[test]
fn the_images_working_folder_is_created() {
    let world = World::new();
    let mut spec = world.spec();
    if let Origin::Layers { config, .. } = &mut spec.from {
        config.workdir = "/w/x".to_owned();
    }
    let running = world.engine.start(&spec).unwrap();
    assert_eq!(shell(&running, "pwd").out, "/w/x");
    // A command's own working folder must exist: a missing one may be a typo.
    let refused = client(&running).exec(
        Command { cwd: Some("/y".to_owned()), ..command(&["true"]) },
        &[],
        &mut |_, _| {},
    );
    assert!(refused.is_err(), "{refused:?}");
}
