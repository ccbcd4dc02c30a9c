//! Volumes: shared, limited, kept, and gone from the host's tables whatever dies.

use harvest_engine::{
    Backing, EXEC_STATE, STATE_FOLDERS, STATE_INSIDE, Volume, VolumeMount, VolumeName, VolumeSpec,
};
use harvest_proto::SnapshotId;

use super::*;

const SIZE: u64 = 8 << 20;
const FILES: u64 = 200;

fn name(text: &str) -> VolumeName {
    text.parse().unwrap()
}

fn mount(volume: &str, read_only: bool) -> VolumeMount {
    VolumeMount { name: name(volume), inside: "/data".into(), read_only }
}

impl World {
    fn volume(&self, volume: &str) -> Volume {
        let spec = VolumeSpec { size_bytes: SIZE, files: FILES, ..VolumeSpec::new(name(volume)) };
        self.engine.volume_create(&spec).unwrap()
    }

    fn start_with(&self, mounts: Vec<VolumeMount>) -> Running {
        self.engine.start(&Spec { volumes: mounts, ..self.spec() }).unwrap()
    }

    /// Loop devices that carry a file of this world.
    fn devices(&self) -> Vec<PathBuf> {
        let folder = self.folder.path().canonicalize().unwrap();
        let carries = |block: &Path| {
            let file = fs::read_to_string(block.join("loop/backing_file")).unwrap_or_default();
            Path::new(file.trim()).starts_with(&folder)
        };
        let blocks = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path());
        blocks.filter(|block| carries(block)).collect()
    }

    fn is_mounted(&self) -> bool {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        self.devices().iter().any(|device| mounts.contains(&format!("/dev/{} ", named(device))))
    }

    fn image(&self, volume: &str) -> PathBuf {
        self.home.join("volumes").join(volume).join("image")
    }
}

#[test]
fn two_sandboxes_share_a_volume_and_see_the_same_owners() {
    let world = World::new();
    world.volume("shared");
    let [one, two] = [0, 1].map(|_| world.start_with(vec![mount("shared", false)]));
    assert_ne!(range(&one), range(&two));
    let user = Command {
        user: Some("10001".to_owned()),
        ..command(&["sh", "-c", "echo mine > /data/mine"])
    };
    assert_eq!(exec(&one, user).exit, Exit::Code(0));
    shell(&one, "echo roots > /data/roots");
    assert_eq!(world.devices().len(), 1, "one device for both");
    assert!(!world.is_mounted(), "the host's own table knows nothing of it");
    let look = "cat /data/mine /data/roots; busybox stat -c %u:%g /data /data/mine /data/roots";
    let seen = "mine\nroots\n10001:10001\n10001:10001\n0:0";
    assert_eq!(shell(&two, look).out, seen);
    shell(&two, "echo more >> /data/mine");
    assert_eq!(shell(&one, "cat /data/mine").out, "mine\nmore");
    assert_eq!(shell(&one, "ls -a /data").out, ".\n..\nmine\nroots");
}

#[test]
fn a_volume_carries_neither_set_uid_programs_nor_devices() {
    let world = World::new();
    world.volume("quiet");
    let running = world.start_with(vec![mount("quiet", false)]);
    let options = shell(&running, "grep ' /data ' /proc/self/mountinfo").out;
    assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
}

#[test]
fn a_read_only_volume_is_read_only_even_for_root() {
    let world = World::new();
    world.volume("notes");
    let writer = world.start_with(vec![mount("notes", false)]);
    shell(&writer, "echo kept > /data/note");
    let reader = world.start_with(vec![mount("notes", true)]);
    for attempt in [
        "echo x > /data/note",
        "busybox rm /data/note",
        "mount -o remount,rw /data && echo x > /data/x",
    ] {
        assert_ne!(shell(&reader, attempt).exit, Exit::Code(0), "{attempt}");
    }
    assert_eq!(shell(&reader, "cat /data/note").out, "kept");
    assert_eq!(shell(&writer, "echo on > /data/note; cat /data/note").out, "on");
}

#[test]
fn a_full_volume_is_full_for_who_writes_to_it_and_for_nobody_else() {
    let world = World::new();
    for volume in ["bytes", "names"] {
        world.volume(volume);
    }
    let running = world.start_with(vec![
        mount("bytes", false),
        VolumeMount { inside: "/names".into(), ..mount("names", false) },
    ]);
    let said = shell(&running, "busybox dd if=/dev/zero of=/data/large bs=1M count=32 2>&1");
    assert!(said.exit == Exit::Code(1) && said.out.contains("No space left"), "{said:?}");
    let said =
        shell(&running, "i=0; while touch /names/$i 2>/dev/null; do i=$((i+1)); done; echo $i");
    let files: u64 = said.out.parse().unwrap();
    assert!((FILES..FILES * 2).contains(&files), "{files}");
    assert_eq!(shell(&running, "echo on > /file && cat /file").out, "on");
    assert_eq!(
        shell(&running, "busybox rm /names/1 && echo on > /names/new && cat /names/new").out,
        "on"
    );
}

#[test]
fn a_volumes_blocks_are_its_own_from_the_beginning_to_the_end() {
    let world = World::new();
    let volume = world.volume("mine");
    assert_eq!(volume.backing, Backing::Image);
    let taken = || fs::metadata(world.image("mine")).unwrap().blocks() * 512;
    assert!(taken() >= SIZE);
    let running = world.start_with(vec![mount("mine", false)]);
    let busy = "busybox dd if=/dev/zero of=/data/a bs=1M count=4; sync; busybox rm /data/a; sync";
    shell(&running, &busy.replace("sync", "busybox sync"));
    assert!(taken() >= SIZE, "what a sandbox deletes stays the volume's");
}

#[test]
fn a_volume_the_host_has_no_room_for_is_refused_and_leaves_nothing() {
    let world = World::new();
    let spec = VolumeSpec { size_bytes: 1 << 43, ..VolumeSpec::new(name("huge")) };
    let error = world.engine.volume_create(&spec).unwrap_err();
    assert!(matches!(error, EngineError::NoRoom { .. }), "{error}");
    assert!(world.engine.volumes().unwrap().is_empty());
    assert!(!world.home.join("volumes/.new-huge").exists());
}

#[test]
fn killing_the_zygote_and_the_sandbox_leaves_no_device_and_no_mount() {
    let world = World::new();
    world.volume("kept");
    let running = world.start_with(vec![mount("kept", false)]);
    shell(&running, "echo work > /data/file");
    for pid in world.zygotes().into_iter().chain([running.pid]) {
        assert!(
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()
        );
    }
    eventually("the kernel takes everything down", || world.devices().is_empty());
    world.engine.remove(&running.id).unwrap();
    let next = world.start_with(vec![mount("kept", false)]);
    assert_eq!(shell(&next, "cat /data/file").out, "work", "a deleted sandbox leaves the volume");
    world.engine.remove(&next.id).unwrap();
    // It holds what was used a moment ago.
    world.engine.rest().unwrap();
    eventually("the device goes with its last user", || world.devices().is_empty());
}

#[test]
fn a_volume_in_use_cannot_be_removed_and_a_removed_one_not_be_used() {
    let world = World::new();
    world.volume("busy");
    let again = world.engine.volume_create(&VolumeSpec::new(name("busy")));
    assert!(matches!(again, Err(EngineError::VolumeExists { .. })));
    let running = world.start_with(vec![mount("busy", true)]);
    let refused = world.engine.volume_remove(&name("busy"));
    assert!(matches!(refused, Err(EngineError::VolumeInUse { .. })), "{refused:?}");
    assert_eq!(shell(&running, "ls /data && echo on").out, "on");
    world.engine.remove(&running.id).unwrap();
    for _ in 0..2 {
        world.engine.volume_remove(&name("busy")).unwrap();
    }
    assert_eq!(world.engine.volume(&name("busy")).unwrap(), None);
    assert_eq!(fs::read_dir(world.home.join("volumes")).unwrap().count(), 0);
    let spec = Spec { volumes: vec![mount("busy", false)], ..world.spec() };
    assert!(matches!(world.engine.start(&spec), Err(EngineError::VolumeMissing { .. })));
    assert_eq!(world.engine.find(&spec.id).unwrap(), SandboxState::Gone);
}

#[test]
fn a_snapshot_does_not_hold_what_is_in_a_volume() {
    let world = World::new();
    world.volume("apart");
    let running = world.start_with(vec![mount("apart", false)]);
    shell(&running, "echo inside > /data/file; echo beside > /file");
    let snapshot = SnapshotId::random();
    world.engine.capture(&running.id, &snapshot).unwrap();
    let restored =
        world.engine.start(&Spec { from: Origin::Snapshot(snapshot), ..world.spec() }).unwrap();
    assert_eq!(shell(&restored, "cat /file; ls /data").out, "beside");
}

#[test]
fn a_volume_begun_by_who_was_killed_is_made_again_or_swept() {
    let world = World::new();
    for half in ["again", "never"] {
        let folder = world.home.join("volumes").join(format!(".new-{half}"));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("image"), "half").unwrap();
    }
    world.volume("again");
    let running = world.start_with(vec![mount("again", false)]);
    assert_eq!(shell(&running, "echo on > /data/file; cat /data/file").out, "on");
    let names = |volumes: Vec<Volume>| -> Vec<String> {
        volumes.into_iter().map(|volume| volume.name.to_string()).collect()
    };
    assert_eq!(names(world.engine.volumes().unwrap()), ["again"]);
    world.engine.gc(false).unwrap();
    assert!(!world.home.join("volumes/.new-never").exists());
    assert_eq!(names(world.engine.volumes().unwrap()), ["again"]);
    assert_eq!(shell(&running, "cat /data/file").out, "on");
}

/// What the file system says of itself.
fn about(image: &Path) -> String {
    let said = HostCommand::new("/usr/sbin/dumpe2fs").arg("-h").arg(image).output().unwrap().stdout;
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn a_volume_that_was_not_unmounted_or_has_errors_is_mended_before_it_is_used() {
    let world = World::new();
    world.volume("cut");
    let (image, copy) = (world.image("cut"), world.folder.path().join("copy"));
    let ends = |running: Running| {
        world.engine.remove(&running.id).unwrap();
        world.engine.rest().unwrap();
        eventually("it is unmounted", || world.devices().is_empty());
    };
    let running = world.start_with(vec![mount("cut", false)]);
    shell(&running, "echo work > /data/file; busybox sync");
    // What is on the disk when the power goes.
    fs::copy(&image, &copy).unwrap();
    ends(running);
    fs::rename(&copy, &image).unwrap();
    assert!(about(&image).contains("needs_recovery"));
    let running = world.start_with(vec![mount("cut", false)]);
    assert_eq!(shell(&running, "cat /data/file").out, "work");
    assert!(fs::metadata(&image).unwrap().blocks() * 512 >= SIZE, "and has its blocks again");
    ends(running);
    let debugfs = HostCommand::new("/usr/sbin/debugfs")
        .args(["-w", "-R", "set_super_value state 3"])
        .arg(&image)
        .output()
        .unwrap();
    assert!(debugfs.status.success() && about(&image).contains("clean with errors"), "{debugfs:?}");
    ends(world.start_with(vec![mount("cut", false)]));
    assert!(!about(&image).contains("with errors"));
}

#[test]
fn many_starts_at_once_share_one_device() {
    let world = World::new();
    world.volume("crowd");
    let started: Vec<Running> = thread::scope(|scope| {
        let starts: Vec<_> =
            (0..6).map(|_| scope.spawn(|| world.start_with(vec![mount("crowd", false)]))).collect();
        starts.into_iter().map(|start| start.join().unwrap()).collect()
    });
    assert_eq!(world.devices().len(), 1);
    for running in &started {
        assert_eq!(shell(running, "echo on >> /data/file; echo $?").out, "0");
    }
    assert_eq!(shell(&started[0], "wc -l < /data/file").out, "6");
}

#[test]
fn what_one_run_leaves_in_its_state_the_next_one_finds() {
    let world = World::new();
    let state = world.engine.state(&name(EXEC_STATE)).unwrap();
    assert_eq!(state.inside, Path::new(STATE_INSIDE));
    let run = |script: &str| {
        let running = world.start_with(vec![world.engine.state(&name(EXEC_STATE)).unwrap()]);
        let user = Some("10001".to_owned());
        let said = exec(&running, Command { user, ..command(&["sh", "-c", script]) });
        world.engine.remove(&running.id).unwrap();
        assert_eq!(said.exit, Exit::Code(0), "{said:?}");
        said.out
    };
    for folder in STATE_FOLDERS {
        run(&format!("echo {folder} > /mnt/state/{folder}/left"));
    }
    assert_eq!(run("cd /mnt/state; cat .cache/left */left; ls -A").lines().count(), 8);
    run("busybox rm -r /mnt/state/workspace; ln -s /etc /mnt/state/workspace");
    assert_eq!(run("readlink /mnt/state/workspace"), "/etc", "what a run has made of it stays");
    run("busybox rm /mnt/state/workspace");
    assert_eq!(run("busybox stat -c %u:%g:%a /mnt/state/workspace"), "10001:10001:755");
    assert_eq!(world.engine.volumes().unwrap().len(), 1);
}

#[test]
fn a_plain_folder_can_be_a_volume_too() {
    let world = World::new();
    let volume = world.volume("plain");
    let folder = world.home.join("volumes/plain");
    fs::remove_file(folder.join("image")).unwrap();
    fs::create_dir(folder.join("files")).unwrap();
    let record = Volume { backing: Backing::Folder, ..volume };
    fs::write(folder.join("record.json"), serde_json::to_vec(&record).unwrap()).unwrap();
    let running = world.start_with(vec![mount("plain", false)]);
    shell(&running, "echo on > /data/file");
    assert_eq!(fs::read_to_string(folder.join("files/file")).unwrap(), "on\n");
    let refused = world.engine.volume_remove(&name("plain"));
    assert!(matches!(refused, Err(EngineError::VolumeInUse { .. })), "{refused:?}");
    world.engine.remove(&running.id).unwrap();
    world.engine.volume_remove(&name("plain")).unwrap();
    assert!(!folder.exists());
}
