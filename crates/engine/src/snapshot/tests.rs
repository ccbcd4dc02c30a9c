//! The rules snapshots keep, on real overlay mounts in a mount namespace of the test's own.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    ffi::CString,
    fmt::Write as _,
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink},
    panic,
    path::{Path, PathBuf},
    thread,
    time::{Duration, SystemTime},
};

use proptest::prelude::*;
use rustix::{
    fs::Mode,
    mount::{MountFlags, MountPropagationFlags},
    thread::UnshareFlags,
};

use super::{capture::LONGEST_CHAIN, index::Index, *};
use crate::{changes::How, disk::tests::Temporary, tree};

const BASE: &str = "baselayer";

/// A sandbox's disk without its processes.
struct Machine {
    disk: Temporary,
    sandbox: SandboxDisk,
}

impl Machine {
    fn new() -> Self {
        let disk = Disk::temporary();
        let base = disk.layers().join(BASE);
        fs::create_dir_all(base.join("a/b")).unwrap();
        fs::create_dir_all(base.join("d/e")).unwrap();
        for file in ["f", "a/f", "a/b/f", "d/e/f", "c"] {
            fs::write(base.join(file), file).unwrap();
        }
        let sandbox = SandboxDisk {
            id: SandboxId::random(),
            layers: vec![BASE.parse().unwrap()],
            config: ImageConfig::default(),
            parent: None,
            limit: None,
            of_sessions: false,
        };
        let folder = disk.sandbox(&sandbox.id);
        for part in ["upper", "work", "merged"] {
            fs::create_dir_all(folder.join(part)).unwrap();
        }
        Self { disk, sandbox }
    }

    fn path(&self, part: &str) -> PathBuf {
        self.disk.sandbox(&self.sandbox.id).join(part)
    }

    fn mount(&self) {
        let options = format!(
            "lowerdir={},upperdir={},workdir={},redirect_dir=nofollow,index=off,metacopy=off",
            self.disk.layers().join(BASE).display(),
            self.path("upper").display(),
            self.path("work").display()
        );
        mount_overlay(&self.path("merged"), &options);
    }

    fn capture(&self) -> Result<Captured, EngineError> {
        self.capture_as(&SnapshotId::random())
    }

    fn capture_as(&self, id: &SnapshotId) -> Result<Captured, EngineError> {
        self.disk.capture(&self.sandbox, id, &Still { runs: true, freeze: &|| Ok(()), thaw: &|| Ok(()) })
    }

    fn end_as(&self, id: &SnapshotId) -> Result<Snapshot, EngineError> {
        let there = self.path("record.json").parent().unwrap().exists();
        let sandbox = there.then_some(&self.sandbox);
        self.disk.end_kept(&self.sandbox.id, sandbox, id, &|| {
            trash::throw_away(&self.disk.sandbox(&self.sandbox.id), &self.disk.trash())
        })
    }

    fn shown(&self, snapshot: &Snapshot) -> BTreeMap<PathBuf, String> {
        let layers: Vec<_> = snapshot
            .layers
            .iter()
            .rev()
            .map(|layer| self.disk.layer_path(layer).unwrap().display().to_string())
            .collect();
        let at = self.disk.home().join("shown");
        fs::create_dir_all(&at).unwrap();
        // Overlay wants two lower layers when there is no upper one.
        let empty = self.disk.home().join("empty");
        fs::create_dir_all(&empty).unwrap();
        mount_overlay(&at, &format!("lowerdir={}:{}", layers.join(":"), empty.display()));
        let shown = describe(&at);
        rustix::mount::unmount(&at, rustix::mount::UnmountFlags::empty()).unwrap();
        shown
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // Most were never mounted; of the others nothing would be removed below a mount.
        let _ = rustix::mount::unmount(self.path("merged"), rustix::mount::UnmountFlags::DETACH);
    }
}

fn mount_overlay(at: &Path, options: &str) {
    let options = CString::new(options).unwrap();
    rustix::mount::mount("overlay", at, "overlay", MountFlags::empty(), Some(options.as_c_str())).unwrap();
}

/// Runs in a mount namespace that ends with it.
fn apart<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> T {
    let run = thread::spawn(|| {
        // SAFETY: only this thread's file system view changes; descriptors stay shared.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }.unwrap();
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", private).unwrap();
        run()
    });
    run.join().unwrap_or_else(|cause| panic::resume_unwind(cause))
}

/// Everything a reader can see of a tree, one line per path.
fn describe(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut seen = BTreeMap::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(path) = waiting.pop() {
        let meta = fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut line = format!("{:o} {}:{}", meta.mode(), meta.uid(), meta.gid());
        if meta.is_dir() {
            waiting.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if meta.is_symlink() {
            write!(line, " -> {}", fs::read_link(&path).unwrap().display()).unwrap();
        } else if meta.is_file() {
            write!(line, " {}.{} {:?}", meta.mtime(), meta.mtime_nsec(), fs::read(&path).unwrap()).unwrap();
        }
        seen.insert(path.strip_prefix(root).unwrap().to_owned(), line);
    }
    seen
}

#[derive(Debug, Clone)]
enum Edit {
    Write(String, u8),
    Append(String),
    Folder(String),
    Remove(String),
    Rename(String, String),
    Link(String, String),
    Symlink(String),
    Mode(String, u32),
    Owner(String, u32),
    Pipe(String),
    Socket(String),
    /// Time for the kernel's clock to move on, so that times can be trusted.
    Settle,
}

fn edit(root: &Path, edit: &Edit) {
    let at = |path: &String| root.join(path);
    // Opening a pipe would wait for its other end, and a link is not to be followed here.
    if let Edit::Write(path, _) | Edit::Append(path) | Edit::Mode(path, _) | Edit::Owner(path, _) = edit
        && fs::symlink_metadata(at(path)).is_ok_and(|meta| !meta.is_file() && !meta.is_dir())
    {
        return;
    }
    // Many edits make no sense where they fall; the kernel says so and the tree stays as it is.
    let _ = match edit {
        Edit::Write(path, byte) => fs::write(at(path), vec![*byte; usize::from(*byte) * 40]),
        Edit::Append(path) => fs::read(at(path)).and_then(|old| fs::write(at(path), [old, vec![1]].concat())),
        Edit::Folder(path) => fs::create_dir(at(path)),
        Edit::Remove(path) => fs::remove_file(at(path)).or_else(|_| fs::remove_dir_all(at(path))),
        Edit::Rename(from, to) => fs::rename(at(from), at(to)),
        Edit::Link(from, to) => fs::hard_link(at(from), at(to)),
        Edit::Symlink(path) => symlink("f", at(path)),
        Edit::Mode(path, mode) => fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)),
        Edit::Owner(path, id) => chown(at(path), Some(*id), Some(*id)),
        Edit::Pipe(path) => rustix::fs::mkfifoat(rustix::fs::CWD, at(path), Mode::RUSR).map_err(Into::into),
        Edit::Socket(path) => std::os::unix::net::UnixListener::bind(at(path)).map(drop),
        Edit::Settle => {
            let until = SystemTime::now() + Duration::from_millis(25);
            while SystemTime::now() < until {
                thread::yield_now();
            }
            Ok(())
        }
    };
}

fn any_path() -> impl Strategy<Value = String> {
    proptest::collection::vec(prop_oneof![Just("a"), Just("b"), Just("d"), Just("f")], 1..4)
        .prop_map(|parts| parts.join("/"))
}

fn any_edit() -> impl Strategy<Value = Edit> {
    prop_oneof![
        4 => (any_path(), any::<u8>()).prop_map(|(path, byte)| Edit::Write(path, byte)),
        1 => any_path().prop_map(Edit::Append),
        4 => any_path().prop_map(Edit::Folder),
        5 => any_path().prop_map(Edit::Remove),
        5 => (any_path(), any_path()).prop_map(|(from, to)| Edit::Rename(from, to)),
        2 => (any_path(), any_path()).prop_map(|(from, to)| Edit::Link(from, to)),
        1 => any_path().prop_map(Edit::Symlink),
        1 => (any_path(), 0u32..0o7777).prop_map(|(path, mode)| Edit::Mode(path, mode)),
        1 => (any_path(), 0u32..3).prop_map(|(path, id)| Edit::Owner(path, id)),
        1 => any_path().prop_map(Edit::Pipe),
        1 => any_path().prop_map(Edit::Socket),
        2 => Just(Edit::Settle),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn the_layers_of_a_capture_show_what_the_sandbox_shows(
        turns in proptest::collection::vec(proptest::collection::vec(any_edit(), 0..10), 1..6),
    ) {
        let differences = apart(move || {
            let machine = Machine::new();
            machine.mount();
            let mut taken = Vec::new();
            for edits in turns {
                // Some before the first pass, the rest while it has been made and nothing stands still yet.
                let (before, meanwhile) = edits.split_at(edits.len() / 2);
                for one in before {
                    edit(&machine.path("merged"), one);
                }
                let live = RefCell::default();
                let freeze = || {
                    for one in meanwhile {
                        edit(&machine.path("merged"), one);
                    }
                    *live.borrow_mut() = describe(&machine.path("merged"));
                    Ok(())
                };
                let still = Still { runs: true, freeze: &freeze, thaw: &|| Ok(()) };
                let captured = machine.disk.capture(&machine.sandbox, &SnapshotId::random(), &still).unwrap();
                taken.push((live.into_inner(), captured.snapshot));
            }
            // All at the end: later captures must not disturb earlier ones.
            taken.into_iter().map(|(live, snapshot)| (live, machine.shown(&snapshot))).collect::<Vec<_>>()
        });
        for (live, kept) in differences {
            prop_assert_eq!(live, kept);
        }
    }
}

#[test]
fn what_changes_between_the_passes_is_captured_as_it_is_in_the_end() {
    let text = |path: &str| path.to_owned();
    let before = [
        Edit::Write(text("kept"), 1),
        Edit::Write(text("changed"), 1),
        Edit::Write(text("gone"), 1),
        Edit::Write(text("turned"), 1),
        Edit::Folder(text("moved")),
        Edit::Write(text("moved/inside"), 1),
        Edit::Folder(text("filled")),
        Edit::Remove(text("f")),
        Edit::Remove(text("d")),
        Edit::Settle,
    ];
    let meanwhile = [
        Edit::Write(text("changed"), 2),
        Edit::Remove(text("gone")),
        Edit::Remove(text("turned")),
        Edit::Folder(text("turned")),
        Edit::Rename(text("moved"), text("elsewhere")),
        Edit::Write(text("filled/inside"), 2),
        Edit::Write(text("f"), 2),
        Edit::Folder(text("d")),
        Edit::Remove(text("a/b")),
        Edit::Write(text("new"), 2),
    ];
    let (live, kept) = apart(move || {
        let machine = Machine::new();
        machine.mount();
        let merged = machine.path("merged");
        for one in &before {
            edit(&merged, one);
        }
        let live = RefCell::default();
        let freeze = || {
            for one in &meanwhile {
                edit(&merged, one);
            }
            *live.borrow_mut() = describe(&merged);
            Ok(())
        };
        let still = Still { runs: true, freeze: &freeze, thaw: &|| Ok(()) };
        let captured = machine.disk.capture(&machine.sandbox, &SnapshotId::random(), &still).unwrap();
        (live.into_inner(), machine.shown(&captured.snapshot))
    });
    assert_eq!(live, kept);
}

#[test]
fn an_unchanged_sandbox_adds_no_layer() {
    let machine = Machine::new();
    fs::write(machine.path("upper/new"), "1").unwrap();
    edit(&machine.path("upper"), &Edit::Settle);
    let first = machine.capture().unwrap();
    assert_eq!(first.snapshot.layers.len(), 2);
    let second = machine.capture().unwrap();
    assert_eq!((second.names, second.snapshot.layers), (0, first.snapshot.layers));
}

#[test]
fn a_change_in_the_same_tick_as_the_capture_is_not_missed() {
    let machine = Machine::new();
    fs::write(machine.path("upper/file"), "1").unwrap();
    let before = fs::metadata(machine.path("upper/file")).unwrap().modified().unwrap();
    machine.capture().unwrap();
    // The same inode and length; only the content tells, and perhaps not even the time.
    fs::write(machine.path("upper/file"), "2").unwrap();
    fs::File::options().write(true).open(machine.path("upper/file")).unwrap().set_modified(before).unwrap();
    let second = machine.capture().unwrap().snapshot;
    let layer = machine.disk.layer_path(second.layers.last().unwrap()).unwrap();
    assert_eq!(fs::read(layer.join("file")).unwrap(), b"2");
}

#[test]
fn a_sparse_file_stays_sparse_and_shared_names_stay_shared() {
    let machine = Machine::new();
    let file = fs::File::create(machine.path("upper/sparse")).unwrap();
    file.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"end", (64 << 20) - 3).unwrap();
    fs::hard_link(machine.path("upper/sparse"), machine.path("upper/twin")).unwrap();
    let snapshot = machine.capture().unwrap().snapshot;
    let layer = machine.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
    let copy = fs::metadata(layer.join("sparse")).unwrap();
    assert_eq!((copy.len(), copy.nlink()), (64 << 20, 2));
    assert!(copy.blocks() * 512 < 1 << 20, "{} blocks", copy.blocks());
    assert_ne!(copy.ino(), file.metadata().unwrap().ino());
}

#[test]
fn a_link_in_the_sandbox_leads_nowhere() {
    let machine = Machine::new();
    let outside = machine.disk.home().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "host").unwrap();
    symlink(&outside, machine.path("upper/folder")).unwrap();
    symlink(outside.join("secret"), machine.path("upper/file")).unwrap();
    let snapshot = machine.capture().unwrap().snapshot;
    let layer = machine.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
    assert!(layer.join("folder").is_symlink() && layer.join("file").is_symlink());
    // The writable layer itself replaced by a link is refused.
    fs::rename(machine.path("upper"), machine.path("elsewhere")).unwrap();
    symlink(&outside, machine.path("upper")).unwrap();
    assert!(machine.capture().is_err());
}

#[test]
fn a_failed_capture_thaws_and_leaves_nothing() {
    let machine = Machine::new();
    fs::write(machine.path("upper/file"), "1").unwrap();
    let said = RefCell::new(Vec::new());
    let frozen = Cell::new(false);
    let still = Still {
        runs: true,
        freeze: &|| {
            said.borrow_mut().push("freeze");
            frozen.set(true);
            // A folder that stands for another one cannot be kept.
            let folder = machine.path("upper/moved");
            fs::create_dir(&folder).unwrap();
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&folder, c"trusted.overlay.redirect", b"/a", flags).unwrap();
            Ok(())
        },
        thaw: &|| {
            said.borrow_mut().push("thaw");
            frozen.set(false);
            Ok(())
        },
    };
    let id = SnapshotId::random();
    assert!(machine.disk.capture(&machine.sandbox, &id, &still).is_err());
    assert!(!frozen.get());
    assert_eq!(*said.borrow(), ["freeze", "thaw"]);
    assert_eq!(machine.disk.snapshot(&id).unwrap(), None);
    assert!(disk::names_in(&machine.disk.partial()).unwrap().is_empty());
    assert_eq!(disk::names_in(&machine.disk.layers()).unwrap(), [BASE]);
}

#[test]
fn a_capture_asked_for_twice_is_taken_once() {
    let machine = Machine::new();
    let id = SnapshotId::random();
    fs::write(machine.path("upper/file"), "1").unwrap();
    let first = machine.capture_as(&id).unwrap().snapshot;
    fs::write(machine.path("upper/file"), "2").unwrap();
    assert_eq!(machine.capture_as(&id).unwrap().snapshot, first);
}

#[test]
fn a_capture_retried_after_a_crash_at_any_step_is_whole() {
    for crash in ["partial", "layer", "captures"] {
        let machine = Machine::new();
        let id = SnapshotId::random();
        let layer = layer_of(&id);
        fs::write(machine.path("upper/file"), "1").unwrap();
        match crash {
            "partial" => {
                fs::create_dir(machine.disk.partial().join(layer.as_str())).unwrap();
                fs::write(machine.disk.partial().join(layer.as_str()).join("torn"), "").unwrap();
            }
            "layer" => fs::create_dir(machine.disk.layers().join(layer.as_str())).unwrap(),
            _ => {
                machine.capture_as(&id).unwrap();
                machine.disk.snapshot_remove(&id).unwrap();
                fs::write(machine.path("upper/file"), "2").unwrap();
            }
        }
        let id = if crash == "captures" { SnapshotId::random() } else { id };
        let snapshot = machine.capture_as(&id).unwrap().snapshot;
        let expected = if crash == "captures" { b"2" } else { b"1" };
        let top = machine.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
        assert_eq!(fs::read(top.join("file")).unwrap(), expected, "{crash}");
        assert!(!top.join("torn").exists());
    }
}

#[test]
fn a_capture_that_only_lacked_its_record_loses_nothing_when_it_is_retried() {
    for retry in ["capture", "end"] {
        let machine = Machine::new();
        let id = SnapshotId::random();
        fs::write(machine.path("upper/before"), "1").unwrap();
        machine.capture_as(&id).unwrap();
        machine.disk.snapshot_remove(&id).unwrap();
        fs::write(machine.path("upper/between"), "2").unwrap();
        let between = machine.capture().unwrap().snapshot;
        fs::write(machine.path("upper/since"), "3").unwrap();
        let retried = match retry {
            "capture" => machine.capture_as(&id).unwrap().snapshot,
            _ => machine.end_as(&id).unwrap(),
        };
        // A layer above hides nothing of these, so where one is does not matter.
        let has = |snapshot: &Snapshot, file: &str| {
            let mut layers = snapshot.layers.iter().map(|layer| machine.disk.layer_path(layer).unwrap());
            layers.any(|layer| layer.join(file).exists())
        };
        assert!(["before", "between", "since"].iter().all(|file| has(&retried, file)), "{retry}");
        assert!(["before", "between"].iter().all(|file| has(&between, file)), "{retry}");
        let mut layers = retried.layers.clone();
        layers.sort();
        layers.dedup();
        assert_eq!(layers.len(), retried.layers.len(), "each layer once: {:?}", retried.layers);
    }
}

#[test]
fn a_long_chain_of_captures_is_started_anew() {
    let machine = Machine::new();
    let mut last = None;
    for turn in 0..=LONGEST_CHAIN {
        fs::write(machine.path("upper/file"), turn.to_string()).unwrap();
        fs::write(machine.path(&format!("upper/file-{turn}")), "").unwrap();
        last = Some(machine.capture().unwrap().snapshot);
    }
    let last = last.unwrap();
    assert_eq!(last.layers.len(), 2);
    let layer = machine.disk.layer_path(&last.layers[1]).unwrap();
    assert_eq!(fs::read(layer.join("file")).unwrap(), LONGEST_CHAIN.to_string().as_bytes());
    assert!(layer.join("file-0").exists());
}

#[test]
fn an_end_retried_after_a_crash_at_any_step_keeps_the_work() {
    for crash in ["nothing", "ending", "renamed", "recorded", "removed"] {
        let machine = Machine::new();
        let id = SnapshotId::random();
        let layer = layer_of(&id);
        fs::write(machine.path("upper/work"), "done").unwrap();
        let ending = Ending { layer: layer.clone() };
        if crash != "nothing" {
            disk::write_record(&machine.path("ending.json"), &ending).unwrap();
        }
        if ["renamed", "recorded", "removed"].contains(&crash) {
            fs::rename(machine.path("upper"), machine.disk.layers().join(layer.as_str())).unwrap();
        }
        if ["recorded", "removed"].contains(&crash) {
            let layers = vec![BASE.parse().unwrap(), layer.clone()];
            machine.disk.snapshot_write(Snapshot::of(id.clone(), layers, ImageConfig::default())).unwrap();
        }
        if crash == "removed" {
            trash::throw_away(&machine.path(""), &machine.disk.trash()).unwrap();
        }
        let snapshot = machine.end_as(&id).unwrap();
        let top = machine.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
        assert_eq!(fs::read(top.join("work")).unwrap(), b"done", "{crash}");
        assert_eq!(snapshot.layers.len(), 2);
        assert!(!machine.path("").exists(), "{crash}");
        assert_eq!(machine.end_as(&id).unwrap(), snapshot, "asked again after {crash}");
    }
}

#[test]
fn an_end_taken_up_under_another_id_finds_the_disk() {
    let machine = Machine::new();
    let first = SnapshotId::random();
    fs::write(machine.path("upper/work"), "done").unwrap();
    disk::write_record(&machine.path("ending.json"), &Ending { layer: layer_of(&first) }).unwrap();
    fs::rename(machine.path("upper"), machine.disk.layers().join(layer_of(&first).as_str())).unwrap();
    let snapshot = machine.end_as(&SnapshotId::random()).unwrap();
    assert_eq!(*snapshot.layers.last().unwrap(), layer_of(&first));
}

#[test]
fn ending_under_the_id_of_an_earlier_capture_is_refused() {
    let machine = Machine::new();
    let id = SnapshotId::random();
    machine.capture_as(&id).unwrap();
    fs::write(machine.path("upper/work"), "since").unwrap();
    assert!(matches!(machine.end_as(&id), Err(EngineError::SnapshotTaken { .. })));
    assert!(machine.path("upper/work").exists());
}

#[test]
fn a_sandbox_nobody_knows_cannot_be_ended() {
    let machine = Machine::new();
    trash::throw_away(&machine.path(""), &machine.disk.trash()).unwrap();
    assert!(matches!(machine.end_as(&SnapshotId::random()), Err(EngineError::NotRunning { .. })));
}

#[test]
fn a_snapshot_is_durable_after_a_sync_in_the_same_run_of_the_kernel() {
    let machine = Machine::new();
    let (ours, torn) = (machine.capture().unwrap().snapshot, machine.capture().unwrap().snapshot);
    assert!(!ours.durable);
    let record = Record { snapshot: torn.clone(), boot: "an earlier one".to_owned() };
    disk::write_record(&machine.disk.snapshot_path(&torn.id), &record).unwrap();
    machine.disk.snapshots_sync().unwrap();
    assert!(machine.disk.snapshot(&ours.id).unwrap().unwrap().durable);
    assert!(!machine.disk.snapshot(&torn.id).unwrap().unwrap().durable);
}

/// Digs folders with names of 200 bytes below `upper`; no path can name the last of them.
fn dig(upper: &Path, depth: usize) -> tree::Trail {
    use std::os::fd::AsFd;
    let name = CString::new("n".repeat(200)).unwrap();
    let mut trail = tree::Trail::new(tree::open_root(upper).unwrap().as_fd()).unwrap();
    for _ in 0..depth {
        match rustix::fs::mkdirat(trail.here(), &name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => trail.down(&name).unwrap(),
            Err(error) => panic!("{error}"),
        }
    }
    trail
}

#[test]
fn a_tree_deeper_than_any_path_is_captured_measured_and_deleted() {
    const DEPTH: usize = 300;
    let machine = Machine::new();
    let (upper, file) = (machine.path("upper"), CString::new("bottom").unwrap());
    let bottom = dig(&upper, DEPTH);
    drop(rustix::fs::openat(bottom.here(), &file, rustix::fs::OFlags::CREATE, Mode::RUSR).unwrap());
    edit(&upper, &Edit::Settle);
    let first = machine.capture().unwrap();
    assert_eq!(first.names, DEPTH as u64 + 1);
    assert_eq!(machine.capture().unwrap().names, 0, "nothing has changed");
    rustix::fs::unlinkat(bottom.here(), &file, rustix::fs::AtFlags::empty()).unwrap();
    let second = machine.capture().unwrap();
    assert_eq!(second.names, DEPTH as u64 + 1, "the folders on the way and the removal");
    let layers = second.snapshot.layers.iter().skip(1).map(|layer| machine.disk.layer_path(layer).unwrap());
    for layer in layers {
        assert!(rustix::fs::statat(dig(&layer, DEPTH).here(), &file, rustix::fs::AtFlags::empty()).is_ok());
        assert!(crate::layer::disk_usage(&layer).unwrap() > 0);
        trash::throw_away(&layer, &machine.disk.trash()).unwrap();
    }
    trash::throw_away(&upper, &machine.disk.trash()).unwrap();
    trash::delete(&machine.disk.trash(), &disk::names_in(&machine.disk.trash()).unwrap()).unwrap();
}

#[test]
fn a_freeze_is_renewed_while_nothing_needs_copying() {
    let machine = Machine::new();
    let upper = machine.path("upper");
    for number in 0..20 {
        fs::write(upper.join(number.to_string()), "").unwrap();
    }
    edit(&upper, &Edit::Settle);
    let target = tempfile::tempdir().unwrap();
    let (index, _) =
        delta::copy_delta(&upper, target.path(), &Index::default(), now_nanos(), &mut || Ok(())).unwrap();
    let (pulses, again) = (Cell::new(0), tempfile::tempdir().unwrap());
    let mut pulse = || {
        pulses.set(pulses.get() + 1);
        Ok(())
    };
    let (_, copied) = delta::copy_delta(&upper, again.path(), &index, now_nanos(), &mut pulse).unwrap();
    assert_eq!(copied.names, 0);
    assert!(pulses.get() >= 20);
}

/// What differs between two descriptions, times apart.
fn differences(
    before: &BTreeMap<PathBuf, String>,
    after: &BTreeMap<PathBuf, String>,
) -> BTreeMap<PathBuf, How> {
    let told = |line: &String| {
        let written = |(at, _): &(usize, &str)| *at == 2 && !line.contains("->");
        line.split(' ').enumerate().filter(|part| !written(part)).map(|(_, part)| part.to_owned()).collect()
    };
    let mut differ = BTreeMap::new();
    for path in before.keys().chain(after.keys()).filter(|path| !path.as_os_str().is_empty()) {
        let how = match (before.get(path).map(told), after.get(path).map(told)) {
            (None, _) => How::Added,
            (_, None) => How::Removed,
            (Some::<Vec<_>>(one), Some(other)) if one != other => How::Changed,
            _ => continue,
        };
        differ.insert(path.clone(), how);
    }
    differ
}

/// What differs and what is said to differ, between any two of the captures after these turns.
fn compared(turns: Vec<Vec<Edit>>) -> Vec<(BTreeMap<PathBuf, How>, BTreeMap<PathBuf, How>)> {
    apart(move || {
        let machine = Machine::new();
        machine.mount();
        let base = Snapshot::of(SnapshotId::random(), machine.sandbox.layers.clone(), ImageConfig::default());
        let mut taken = vec![(machine.shown(&base), base)];
        for edits in turns {
            edits.iter().for_each(|one| edit(&machine.path("merged"), one));
            let snapshot = machine.capture().unwrap().snapshot;
            taken.push((machine.shown(&snapshot), snapshot));
        }
        let mut compared = Vec::new();
        for (before, first) in &taken {
            for (after, second) in &taken {
                let changes = machine.disk.changes(&first.layers, &second.layers, usize::MAX).unwrap();
                assert!(!changes.cut);
                let told = changes.entries.into_iter().map(|change| (change.path, change.how)).collect();
                compared.push((differences(before, after), told));
            }
        }
        compared
    })
}

#[test]
fn a_folder_made_anew_hides_what_lay_below_when_two_captures_are_compared() {
    let text = |path: &str| path.to_owned();
    let (gone, made) = (|path: &str| Edit::Remove(text(path)), |path: &str| Edit::Folder(text(path)));
    let turns = vec![
        vec![gone("d"), made("d"), Edit::Write(text("d/new"), 1), gone("a/b"), Edit::Settle],
        vec![made("d/e"), made("a/b"), Edit::Write(text("a/b/f"), 2), gone("c"), made("c"), Edit::Settle],
        vec![
            gone("d"),
            Edit::Write(text("d"), 3),
            gone("c"),
            Edit::Symlink(text("c")),
            gone("a"),
            Edit::Settle,
        ],
    ];
    for (differ, told) in compared(turns) {
        assert_eq!(differ, told);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]

    #[test]
    fn what_is_said_to_differ_between_two_captures_is_what_differs(
        turns in proptest::collection::vec(proptest::collection::vec(any_edit(), 0..10), 1..6),
    ) {
        for (differ, told) in compared(turns) {
            prop_assert_eq!(differ, told);
        }
    }
}

#[test]
fn a_comparison_is_cut_where_it_gets_too_long_or_too_deep_and_counts_on() {
    let machine = Machine::new();
    let before = machine.sandbox.layers.clone();
    for number in 0..5 {
        fs::write(machine.path("upper").join(number.to_string()), "").unwrap();
    }
    // Deeper than any path can say.
    let mut folder = tree::open_root(&machine.path("upper")).unwrap();
    let name = CString::new("x".repeat(200)).unwrap();
    for _ in 0..40 {
        rustix::fs::mkdirat(&folder, &name, Mode::RWXU).unwrap();
        folder = rustix::fs::openat(&folder, &name, rustix::fs::OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    let after = machine.capture().unwrap().snapshot.layers;
    let changes = machine.disk.changes(&before, &after, 3).unwrap();
    assert_eq!(changes.entries.len(), 3);
    assert!(changes.cut && changes.added >= 5 + 20, "{changes:?}");
}
