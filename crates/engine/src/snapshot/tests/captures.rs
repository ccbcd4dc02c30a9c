//! Capturing a disk that is in use.

use std::{
    cell::{Cell, RefCell},
    ffi::CString,
    fs,
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
};

use proptest::prelude::*;
use rustix::fs::Mode;

use super::{
    super::{
        capture::MAX_CHAIN,
        delta::{Delta, Pass},
        index::Index,
        *,
    },
    edits::{Edit, any_edit, edit},
    test_disk::{BASE, TestDisk, describe, in_mount_namespace},
};
use crate::tree;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn captured_layers_show_what_the_sandbox_shows(
        turns in proptest::collection::vec(proptest::collection::vec(any_edit(), 0..10), 1..6),
    ) {
        let differences = in_mount_namespace(move || {
            let test = TestDisk::new();
            test.mount();
            let mut captures = Vec::new();
            for edits in turns {
                // Half of the edits happen before the first pass, half between it and the freeze.
                let (before, meanwhile) = edits.split_at(edits.len() / 2);
                for one in before {
                    edit(&test.path("merged"), one);
                }
                let live = RefCell::default();
                let freeze = || {
                    for one in meanwhile {
                        edit(&test.path("merged"), one);
                    }
                    *live.borrow_mut() = describe(&test.path("merged"));
                    Ok(())
                };
                let freezer = FreezeControl { is_running: true, freeze: &freeze, thaw: &|| Ok(()) };
                let id = SnapshotId::random();
                let captured = test.disk.capture(&test.sandbox, &id, &freezer).unwrap();
                captures.push((live.into_inner(), captured.snapshot));
            }
            // Compared at the end: later captures must not affect earlier ones.
            let captured = |(live, snapshot)| (live, test.merged_view(&snapshot));
            captures.into_iter().map(captured).collect::<Vec<_>>()
        });
        for (live, captured) in differences {
            prop_assert_eq!(live, captured);
        }
    }
}

#[test]
fn changes_between_the_passes_are_captured() {
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
        Edit::WaitForClock,
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
    let (live, captured) = in_mount_namespace(move || {
        let test = TestDisk::new();
        test.mount();
        let merged = test.path("merged");
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
        let freezer = FreezeControl { is_running: true, freeze: &freeze, thaw: &|| Ok(()) };
        let captured = test.disk.capture(&test.sandbox, &SnapshotId::random(), &freezer).unwrap();
        (live.into_inner(), test.merged_view(&captured.snapshot))
    });
    assert_eq!(live, captured);
}

#[test]
fn an_unchanged_sandbox_adds_no_layer() {
    let test = TestDisk::new();
    fs::write(test.path("upper/new"), "1").unwrap();
    edit(&test.path("upper"), &Edit::WaitForClock);
    let first = test.capture().unwrap();
    assert_eq!(first.snapshot.layers.len(), 2);
    let second = test.capture().unwrap();
    assert_eq!((second.names, second.snapshot.layers), (0, first.snapshot.layers));
}

#[test]
fn changes_in_the_same_clock_tick_are_captured() {
    let test = TestDisk::new();
    fs::write(test.path("upper/file"), "1").unwrap();
    let before = fs::metadata(test.path("upper/file")).unwrap().modified().unwrap();
    test.capture().unwrap();
    // Same inode, length and mtime, perhaps even the same ctime: only the content differs.
    fs::write(test.path("upper/file"), "2").unwrap();
    fs::File::options()
        .write(true)
        .open(test.path("upper/file"))
        .unwrap()
        .set_modified(before)
        .unwrap();
    let second = test.capture().unwrap().snapshot;
    let layer = test.disk.layer_path(second.layers.last().unwrap()).unwrap();
    assert_eq!(fs::read(layer.join("file")).unwrap(), b"2");
}

#[test]
fn captures_keep_holes_and_hard_links() {
    let test = TestDisk::new();
    let file = fs::File::create(test.path("upper/sparse")).unwrap();
    file.set_len(64 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, b"end", (64 << 20) - 3).unwrap();
    fs::hard_link(test.path("upper/sparse"), test.path("upper/twin")).unwrap();
    let snapshot = test.capture().unwrap().snapshot;
    let layer = test.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
    let copy = fs::metadata(layer.join("sparse")).unwrap();
    assert_eq!((copy.len(), copy.nlink()), (64 << 20, 2));
    assert!(copy.blocks() * 512 < 1 << 20, "{} blocks", copy.blocks());
    assert_ne!(copy.ino(), file.metadata().unwrap().ino());
}

#[test]
fn captures_follow_no_links() {
    let test = TestDisk::new();
    let outside = test.disk.home.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "host").unwrap();
    symlink(&outside, test.path("upper/folder")).unwrap();
    symlink(outside.join("secret"), test.path("upper/file")).unwrap();
    let snapshot = test.capture().unwrap().snapshot;
    let layer = test.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
    assert!(layer.join("folder").is_symlink() && layer.join("file").is_symlink());
    // A link in place of the writable layer itself is refused.
    fs::rename(test.path("upper"), test.path("elsewhere")).unwrap();
    symlink(&outside, test.path("upper")).unwrap();
    assert!(test.capture().is_err());
}

#[test]
fn a_failed_capture_thaws_and_leaves_nothing() {
    let test = TestDisk::new();
    fs::write(test.path("upper/file"), "1").unwrap();
    let calls = RefCell::new(Vec::new());
    let frozen = Cell::new(false);
    let freezer = FreezeControl {
        is_running: true,
        freeze: &|| {
            calls.borrow_mut().push("freeze");
            frozen.set(true);
            // A redirected folder cannot be captured.
            let folder = test.path("upper/moved");
            fs::create_dir(&folder).unwrap();
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&folder, c"trusted.overlay.redirect", b"/a", flags).unwrap();
            Ok(())
        },
        thaw: &|| {
            calls.borrow_mut().push("thaw");
            frozen.set(false);
            Ok(())
        },
    };
    let id = SnapshotId::random();
    assert!(test.disk.capture(&test.sandbox, &id, &freezer).is_err());
    assert!(!frozen.get());
    assert_eq!(*calls.borrow(), ["freeze", "thaw"]);
    assert_eq!(test.disk.snapshot(&id).unwrap(), None);
    assert!(records::names_in(&test.disk.home.partial()).unwrap().is_empty());
    assert_eq!(records::names_in(&test.disk.home.layers()).unwrap(), [BASE]);
}

#[test]
fn a_repeated_capture_returns_the_first_snapshot() {
    let test = TestDisk::new();
    let id = SnapshotId::random();
    fs::write(test.path("upper/file"), "1").unwrap();
    let first = test.capture_as(&id).unwrap().snapshot;
    fs::write(test.path("upper/file"), "2").unwrap();
    assert_eq!(test.capture_as(&id).unwrap().snapshot, first);
}

#[test]
fn a_capture_retried_after_any_crash_is_complete() {
    for crash in ["partial", "layer", "captures"] {
        let test = TestDisk::new();
        let id = SnapshotId::random();
        let layer = layer_of(&id);
        fs::write(test.path("upper/file"), "1").unwrap();
        match crash {
            "partial" => {
                fs::create_dir(test.disk.home.partial().join(layer.as_str())).unwrap();
                fs::write(test.disk.home.partial().join(layer.as_str()).join("torn"), "").unwrap();
            }
            "layer" => fs::create_dir(test.disk.home.layers().join(layer.as_str())).unwrap(),
            _ => {
                test.capture_as(&id).unwrap();
                test.disk.snapshot_remove(&id).unwrap();
                fs::write(test.path("upper/file"), "2").unwrap();
            }
        }
        let id = if crash == "captures" { SnapshotId::random() } else { id };
        let snapshot = test.capture_as(&id).unwrap().snapshot;
        let expected = if crash == "captures" { b"2" } else { b"1" };
        let top = test.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
        assert_eq!(fs::read(top.join("file")).unwrap(), expected, "{crash}");
        assert!(!top.join("torn").exists());
    }
}

#[test]
fn retrying_a_capture_without_record_loses_nothing() {
    for retry in ["capture", "save"] {
        let test = TestDisk::new();
        let id = SnapshotId::random();
        fs::write(test.path("upper/before"), "1").unwrap();
        test.capture_as(&id).unwrap();
        test.disk.snapshot_remove(&id).unwrap();
        fs::write(test.path("upper/between"), "2").unwrap();
        let between = test.capture().unwrap().snapshot;
        fs::write(test.path("upper/since"), "3").unwrap();
        let retried = match retry {
            "capture" => test.capture_as(&id).unwrap().snapshot,
            _ => test.save_as(&id).unwrap(),
        };
        // No layer hides these files, so the order of the layers does not matter.
        let has = |snapshot: &Snapshot, file: &str| {
            let mut layers =
                snapshot.layers.iter().map(|layer| test.disk.layer_path(layer).unwrap());
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
fn long_chains_of_captures_are_replaced_by_one() {
    let test = TestDisk::new();
    let mut last = None;
    for turn in 0..=MAX_CHAIN {
        fs::write(test.path("upper/file"), turn.to_string()).unwrap();
        fs::write(test.path(&format!("upper/file-{turn}")), "").unwrap();
        last = Some(test.capture().unwrap().snapshot);
    }
    let last = last.unwrap();
    assert_eq!(last.layers.len(), 2);
    let layer = test.disk.layer_path(&last.layers[1]).unwrap();
    assert_eq!(fs::read(layer.join("file")).unwrap(), MAX_CHAIN.to_string().as_bytes());
    assert!(layer.join("file-0").exists());
}

#[test]
fn a_sync_makes_snapshots_of_this_boot_durable() {
    let test = TestDisk::new();
    let (ours, torn) = (test.capture().unwrap().snapshot, test.capture().unwrap().snapshot);
    assert!(!ours.durable);
    let record = SnapshotRecord { snapshot: torn.clone(), boot: "an earlier one".to_owned() };
    records::write_record(&test.disk.snapshot_path(&torn.id), &record).unwrap();
    test.disk.snapshots_sync().unwrap();
    assert!(test.disk.snapshot(&ours.id).unwrap().unwrap().durable);
    assert!(!test.disk.snapshot(&torn.id).unwrap().unwrap().durable);
}

#[test]
fn a_sync_reads_no_durable_snapshot() {
    let test = TestDisk::new();
    let old = test.capture().unwrap().snapshot;
    test.disk.snapshots_sync().unwrap();
    // A record that cannot be read would fail whatever reads it.
    fs::write(test.disk.snapshot_path(&old.id), "damaged").unwrap();
    let new = test.capture().unwrap().snapshot;
    test.disk.snapshots_sync().unwrap();
    assert!(test.disk.snapshot(&new.id).unwrap().unwrap().durable);
    let removed = test.capture().unwrap().snapshot;
    test.disk.snapshot_remove(&removed.id).unwrap();
    assert_eq!(fs::read_dir(test.disk.home.unsynced()).unwrap().count(), 0, "no mark is left");
}

#[test]
fn ids_are_listed_without_reading_snapshots() {
    let test = TestDisk::new();
    let one = test.capture().unwrap().snapshot;
    fs::write(test.disk.snapshot_path(&one.id), "damaged").unwrap();
    fs::write(test.disk.home.snapshots().join("unfinished.new"), "").unwrap();
    assert_eq!(test.disk.snapshot_ids().unwrap(), [one.id]);
}

#[test]
fn known_layers_are_read_again_after_changes() {
    let test = TestDisk::new();
    let (one, two) = (test.capture().unwrap().snapshot, test.capture().unwrap().snapshot);
    let mut known = KnownSnapshots::default();
    test.disk.add_snapshots(&mut known).unwrap();
    assert!(one.layers.iter().chain(&two.layers).all(|layer| known.layers.contains(layer)));
    let other: LayerId = "another".parse().unwrap();
    let changed = Snapshot { layers: vec![other.clone()], ..two };
    test.disk.snapshot_write(changed).unwrap();
    test.disk.add_snapshots(&mut known).unwrap();
    assert!(known.layers.contains(&other), "a changed record is read again");
}

#[test]
fn unchanged_folder_of_snapshots_is_not_read_again() {
    let test = TestDisk::new();
    let one = test.capture().unwrap().snapshot;
    let mut known = KnownSnapshots::default();
    test.disk.add_snapshots(&mut known).unwrap();
    assert_eq!(known.folder, None, "it changed a moment ago: the next change may have its time");
    known.folder = RecordState::of(&test.disk.home.snapshots());
    // A content that changed in place, which no writer does, is not noticed: nothing was read.
    fs::write(test.disk.snapshot_path(&one.id), "damaged").unwrap();
    test.disk.add_snapshots(&mut known).unwrap();
    test.disk.snapshot_remove(&one.id).unwrap();
    test.disk.add_snapshots(&mut known).unwrap();
    assert!(one.layers.iter().all(|layer| known.layers.contains(layer)), "until the next time");
}

#[test]
fn disk_of_an_earlier_boot_never_becomes_durable() {
    let mut test = TestDisk::new();
    test.sandbox.boot = "an earlier one".to_owned();
    let id = SnapshotId::random();
    test.save_as(&id).unwrap();
    test.disk.snapshots_sync().unwrap();
    assert_eq!(test.disk.durability(&id).unwrap(), Some(Durability::Torn));
    assert_eq!(test.disk.durability(&SnapshotId::random()).unwrap(), None);
}

/// Creates nested folders with names of 200 bytes below `upper`, deeper than PATH_MAX.
fn create_deep_tree(upper: &Path, depth: usize) -> tree::DirStack {
    use std::os::fd::AsFd;
    let name = CString::new("n".repeat(200)).unwrap();
    let mut dirs = tree::DirStack::new(tree::open_root(upper).unwrap().as_fd()).unwrap();
    for _ in 0..depth {
        match rustix::fs::mkdirat(dirs.current(), &name, Mode::RWXU) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => dirs.descend(&name).unwrap(),
            Err(error) => panic!("{error}"),
        }
    }
    dirs
}

#[test]
fn trees_of_any_depth_are_captured_and_deleted() {
    const DEPTH: usize = 300;
    let test = TestDisk::new();
    let (upper, file) = (test.path("upper"), CString::new("bottom").unwrap());
    let bottom = create_deep_tree(&upper, DEPTH);
    drop(
        rustix::fs::openat(bottom.current(), &file, rustix::fs::OFlags::CREATE, Mode::RUSR)
            .unwrap(),
    );
    edit(&upper, &Edit::WaitForClock);
    let first = test.capture().unwrap();
    assert_eq!(first.names, DEPTH as u64 + 1);
    assert_eq!(test.capture().unwrap().names, 0, "nothing has changed");
    rustix::fs::unlinkat(bottom.current(), &file, rustix::fs::AtFlags::empty()).unwrap();
    let second = test.capture().unwrap();
    assert_eq!(second.names, DEPTH as u64 + 1, "the folders on the way and the removal");
    let layers =
        second.snapshot.layers.iter().skip(1).map(|layer| test.disk.layer_path(layer).unwrap());
    for layer in layers {
        assert!(
            rustix::fs::statat(
                create_deep_tree(&layer, DEPTH).current(),
                &file,
                rustix::fs::AtFlags::empty()
            )
            .is_ok()
        );
        assert!(crate::disk_usage::tree_bytes(&layer).unwrap() > 0);
        trash::move_to_trash(&layer, &test.disk.home.trash()).unwrap();
    }
    trash::move_to_trash(&upper, &test.disk.home.trash()).unwrap();
    trash::delete(&test.disk.home.trash(), &records::names_in(&test.disk.home.trash()).unwrap())
        .unwrap();
}

#[test]
fn a_freeze_is_renewed_when_nothing_is_copied() {
    let test = TestDisk::new();
    let upper = test.path("upper");
    for number in 0..20 {
        fs::write(upper.join(number.to_string()), "").unwrap();
    }
    edit(&upper, &Edit::WaitForClock);
    let target = tempfile::tempdir().unwrap();
    let full = Delta { source: &upper, target: target.path(), previous: &Index::default() };
    let (index, _) = full.copy_all(Pass::ALL, now_nanos(), &mut || Ok(())).unwrap();
    let (heartbeats, again) = (Cell::new(0), tempfile::tempdir().unwrap());
    let mut heartbeat = || {
        heartbeats.set(heartbeats.get() + 1);
        Ok(())
    };
    let unchanged = Delta { source: &upper, target: again.path(), previous: &index };
    let (_, copied) = unchanged.copy_all(Pass::ALL, now_nanos(), &mut heartbeat).unwrap();
    assert_eq!(copied.names, 0);
    assert!(heartbeats.get() >= 20);
}
