//! Volumes: sharing, limits, persistence, and no mounts or devices left on the host after crashes.

use harvest_engine::{
    Backing, DEFAULT_BYTES, STATE_FOLDERS, STATE_INSIDE, Volume, VolumeMount, VolumeName,
    VolumeSpec,
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

    /// Loop devices attached to a file of this world.
    fn devices(&self) -> Vec<PathBuf> {
        let folder = self.folder.path().canonicalize().unwrap();
        let is_ours = |block: &Path| {
            let file = fs::read_to_string(block.join("loop/backing_file")).unwrap_or_default();
            Path::new(file.trim()).starts_with(&folder)
        };
        let blocks = fs::read_dir("/sys/block").unwrap().map(|entry| entry.unwrap().path());
        blocks.filter(|block| is_ours(block)).collect()
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
fn sandboxes_sharing_a_volume_see_the_same_owners() {
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
    assert_eq!(world.devices().len(), 1, "both share one device");
    assert!(!world.is_mounted(), "the host's mount table does not list it");
    let look = "cat /data/mine /data/roots; busybox stat -c %u:%g /data /data/mine /data/roots";
    let seen = "mine\nroots\n10001:10001\n10001:10001\n0:0";
    assert_eq!(shell(&two, look).out, seen);
    shell(&two, "echo more >> /data/mine");
    assert_eq!(shell(&one, "cat /data/mine").out, "mine\nmore");
    assert_eq!(shell(&one, "ls -a /data").out, ".\n..\nmine\nroots");
}

#[test]
fn volumes_are_mounted_nosuid_and_nodev() {
    let world = World::new();
    world.volume("quiet");
    let running = world.start_with(vec![mount("quiet", false)]);
    let options = shell(&running, "grep ' /data ' /proc/self/mountinfo").out;
    assert!(options.contains("nosuid") && options.contains("nodev"), "{options}");
}

#[test]
fn read_only_volumes_refuse_writes_by_root() {
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
fn a_full_volume_affects_only_its_writers() {
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
fn a_volumes_blocks_stay_reserved() {
    let world = World::new();
    let volume = world.volume("mine");
    assert_eq!(volume.backing, Backing::Image);
    let allocated = || fs::metadata(world.image("mine")).unwrap().blocks() * 512;
    assert!(allocated() >= SIZE);
    let running = world.start_with(vec![mount("mine", false)]);
    let busy = "busybox dd if=/dev/zero of=/data/a bs=1M count=4; sync; busybox rm /data/a; sync";
    shell(&running, &busy.replace("sync", "busybox sync"));
    assert!(allocated() >= SIZE, "blocks of deleted files stay reserved");
}

#[test]
fn volumes_larger_than_free_space_are_refused() {
    let world = World::new();
    let spec = VolumeSpec { size_bytes: 1 << 43, ..VolumeSpec::new(name("huge")) };
    let error = world.engine.volume_create(&spec).unwrap_err();
    assert!(matches!(error, EngineError::NoRoom { .. }), "{error}");
    assert!(world.engine.volumes().unwrap().is_empty());
    assert!(!world.home.join("volumes/.new-huge").exists());
}

#[test]
fn killing_zygote_and_sandbox_leaves_no_device() {
    let world = World::new();
    world.volume("kept");
    let running = world.start_with(vec![mount("kept", false)]);
    shell(&running, "echo work > /data/file");
    for pid in world.zygotes().into_iter().chain([running.pid]) {
        assert!(
            HostCommand::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success()
        );
    }
    eventually("the kernel unmounts and detaches everything", || world.devices().is_empty());
    world.engine.remove(&running.id).unwrap();
    let next = world.start_with(vec![mount("kept", false)]);
    assert_eq!(shell(&next, "cat /data/file").out, "work", "removing the sandbox keeps the volume");
    world.engine.remove(&next.id).unwrap();
    // The zygote holds recently used volumes.
    world.engine.stop_if_idle().unwrap();
    eventually("the device is detached with its last user", || world.devices().is_empty());
}

#[test]
fn a_volume_in_use_cannot_be_removed() {
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
fn snapshots_do_not_include_volumes() {
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
fn unfinished_volumes_are_recreated_or_collected() {
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

/// The superblock of a volume's file system, as text.
fn superblock(image: &Path) -> String {
    let output = HostCommand::new("/usr/sbin/dumpe2fs").arg("-h").arg(image).output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn damaged_volumes_are_repaired_before_use() {
    let world = World::new();
    world.volume("cut");
    let (image, copy) = (world.image("cut"), world.folder.path().join("copy"));
    let stop = |running: Running| {
        world.engine.remove(&running.id).unwrap();
        world.engine.stop_if_idle().unwrap();
        eventually("it is unmounted", || world.devices().is_empty());
    };
    let running = world.start_with(vec![mount("cut", false)]);
    shell(&running, "echo work > /data/file; busybox sync");
    // The content of the disk at a power cut.
    fs::copy(&image, &copy).unwrap();
    stop(running);
    fs::rename(&copy, &image).unwrap();
    assert!(superblock(&image).contains("needs_recovery"));
    let running = world.start_with(vec![mount("cut", false)]);
    assert_eq!(shell(&running, "cat /data/file").out, "work");
    assert!(fs::metadata(&image).unwrap().blocks() * 512 >= SIZE, "its blocks are reserved again");
    stop(running);
    let debugfs = HostCommand::new("/usr/sbin/debugfs")
        .args(["-w", "-R", "set_super_value state 3"])
        .arg(&image)
        .output()
        .unwrap();
    assert!(
        debugfs.status.success() && superblock(&image).contains("clean with errors"),
        "{debugfs:?}"
    );
    stop(world.start_with(vec![mount("cut", false)]));
    assert!(!superblock(&image).contains("with errors"));
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
fn state_persists_between_runs() {
    let world = World::new();
    let state = world.engine.state(None, DEFAULT_BYTES).unwrap();
    assert_eq!(state.inside, Path::new(STATE_INSIDE));
    let run = |script: &str| {
        let running = world.start_with(vec![world.engine.state(None, DEFAULT_BYTES).unwrap()]);
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
    assert_eq!(run("readlink /mnt/state/workspace"), "/etc", "a replaced folder stays as it is");
    run("busybox rm /mnt/state/workspace");
    assert_eq!(run("busybox stat -c %u:%g:%a /mnt/state/workspace"), "10001:10001:755");
    assert_eq!(world.engine.volumes().unwrap().len(), 1);
}

#[test]
fn state_takes_only_the_space_it_uses() {
    const USED: u64 = 64 << 20;
    let world = World::new();
    let repository = "acme/shop".parse().unwrap();
    let state = world.engine.state(Some(&repository), DEFAULT_BYTES).unwrap();
    let volume = world.engine.volume(&state.name).unwrap().unwrap();
    assert_eq!((volume.size_bytes, volume.owner.as_deref()), (DEFAULT_BYTES, Some("acme/shop")));
    let taken = || world.engine.volume_bytes(&volume);
    assert!(taken() < 32 << 20, "{} bytes of an empty volume", taken());
    let running = world.start_with(vec![state]);
    shell(&running, "busybox dd if=/dev/urandom of=/mnt/state/a bs=1M count=64; busybox sync");
    assert!(taken() >= USED);
    shell(&running, "busybox rm /mnt/state/a; busybox sync");
    eventually("the blocks of the deleted file are given back", || {
        shell(&running, "busybox sync");
        taken() < USED
    });
}

#[test]
fn full_state_volume_fails_only_its_own_writes() {
    const SIZE: u64 = 64 << 20;
    let world = World::new();
    let state = world.engine.state(None, SIZE).unwrap();
    let volume = world.engine.volume(&state.name).unwrap().unwrap();
    let running = world.start_with(vec![state]);
    let fill = "busybox dd if=/dev/zero of=/mnt/state/a bs=1M count=100 2>&1; busybox sync";
    let full = shell(&running, fill).out;
    assert!(full.contains("No space left on device"), "{full}");
    assert!(world.engine.volume_bytes(&volume) <= SIZE, "the host's disk has lost no more");
    let on = "echo on > /on && busybox rm /mnt/state/a && echo on > /mnt/state/on && cat /on";
    assert_eq!(shell(&running, on).out, "on");
}

#[test]
fn state_that_could_fill_the_disk_is_refused() {
    const HUGE: u64 = 1 << 43;
    let world = World::new();
    let refused =
        |bytes: u64| matches!(world.engine.state(None, bytes), Err(EngineError::NoRoom { .. }));
    assert!(refused(HUGE), "a new one");
    assert!(world.engine.volumes().unwrap().is_empty());
    let state = world.engine.state(None, 64 << 20).unwrap();
    assert!(!refused(64 << 20));
    // The disk has become fuller since the volume was created.
    let record = world.home.join("volumes").join(state.name.as_str()).join("record.json");
    let text = fs::read_to_string(&record).unwrap();
    fs::write(&record, text.replace(&(64u64 << 20).to_string(), &HUGE.to_string())).unwrap();
    assert!(refused(64 << 20), "an existing one");
}

#[test]
fn a_plain_folder_can_back_a_volume() {
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
