//! Of a disk that is in use.

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
    super::{capture::LONGEST_CHAIN, index::Index, *},
    edits::{Edit, any_edit, edit},
    machine::{BASE, Machine, apart, describe},
};
use crate::tree;

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
        let captured =
            machine.disk.capture(&machine.sandbox, &SnapshotId::random(), &still).unwrap();
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
    fs::File::options()
        .write(true)
        .open(machine.path("upper/file"))
        .unwrap()
        .set_modified(before)
        .unwrap();
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
            let mut layers =
                snapshot.layers.iter().map(|layer| machine.disk.layer_path(layer).unwrap());
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
    let layers =
        second.snapshot.layers.iter().skip(1).map(|layer| machine.disk.layer_path(layer).unwrap());
    for layer in layers {
        assert!(
            rustix::fs::statat(dig(&layer, DEPTH).here(), &file, rustix::fs::AtFlags::empty())
                .is_ok()
        );
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
        delta::copy_delta(&upper, target.path(), &Index::default(), now_nanos(), &mut || Ok(()))
            .unwrap();
    let (pulses, again) = (Cell::new(0), tempfile::tempdir().unwrap());
    let mut pulse = || {
        pulses.set(pulses.get() + 1);
        Ok(())
    };
    let (_, copied) =
        delta::copy_delta(&upper, again.path(), &index, now_nanos(), &mut pulse).unwrap();
    assert_eq!(copied.names, 0);
    assert!(pulses.get() >= 20);
}
