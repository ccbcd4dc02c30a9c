//! Comparing two snapshots.

use std::{collections::BTreeMap, ffi::CString, fs, path::PathBuf};

use proptest::prelude::*;
use rustix::fs::Mode;

use super::{
    super::*,
    edits::{Edit, any_edit, edit},
    test_disk::{TestDisk, in_mount_namespace},
};
use crate::{changes::ChangeKind, tree};

/// The differences between two descriptions, ignoring times.
fn differences(
    before: &BTreeMap<PathBuf, String>,
    after: &BTreeMap<PathBuf, String>,
) -> BTreeMap<PathBuf, ChangeKind> {
    let without_time = |line: &String| {
        let is_time = |(at, _): &(usize, &str)| *at == 2 && !line.contains("->");
        line.split(' ')
            .enumerate()
            .filter(|part| !is_time(part))
            .map(|(_, part)| part.to_owned())
            .collect()
    };
    let mut differ = BTreeMap::new();
    for path in before.keys().chain(after.keys()).filter(|path| !path.as_os_str().is_empty()) {
        let kind = match (before.get(path).map(without_time), after.get(path).map(without_time)) {
            (None, _) => ChangeKind::Added,
            (_, None) => ChangeKind::Removed,
            (Some::<Vec<_>>(one), Some(other)) if one != other => ChangeKind::Changed,
            _ => continue,
        };
        differ.insert(path.clone(), kind);
    }
    differ
}

/// The expected and the reported differences between any two captures after these turns.
fn compare_all(
    turns: Vec<Vec<Edit>>,
) -> Vec<(BTreeMap<PathBuf, ChangeKind>, BTreeMap<PathBuf, ChangeKind>)> {
    in_mount_namespace(move || {
        let test = TestDisk::new();
        test.mount();
        let base =
            Snapshot::of(SnapshotId::random(), test.sandbox.layers.clone(), ImageConfig::default());
        let mut captures = vec![(test.merged_view(&base), base)];
        for edits in turns {
            edits.iter().for_each(|one| edit(&test.path("merged"), one));
            let snapshot = test.capture().unwrap().snapshot;
            captures.push((test.merged_view(&snapshot), snapshot));
        }
        let mut compared = Vec::new();
        for (before, first) in &captures {
            for (after, second) in &captures {
                let changes = test.disk.changes(&first.layers, &second.layers, usize::MAX).unwrap();
                assert!(!changes.truncated);
                let reported =
                    changes.entries.into_iter().map(|change| (change.path, change.kind)).collect();
                compared.push((differences(before, after), reported));
            }
        }
        compared
    })
}

#[test]
fn comparing_captures_respects_opaque_folders() {
    let text = |path: &str| path.to_owned();
    let (remove, create) =
        (|path: &str| Edit::Remove(text(path)), |path: &str| Edit::Folder(text(path)));
    let turns = vec![
        vec![
            remove("d"),
            create("d"),
            Edit::Write(text("d/new"), 1),
            remove("a/b"),
            Edit::WaitForClock,
        ],
        vec![
            create("d/e"),
            create("a/b"),
            Edit::Write(text("a/b/f"), 2),
            remove("c"),
            create("c"),
            Edit::WaitForClock,
        ],
        vec![
            remove("d"),
            Edit::Write(text("d"), 3),
            remove("c"),
            Edit::Symlink(text("c")),
            remove("a"),
            Edit::WaitForClock,
        ],
    ];
    for (expected, reported) in compare_all(turns) {
        assert_eq!(expected, reported);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20, ..ProptestConfig::default() })]

    #[test]
    fn reported_differences_are_the_actual_ones(
        turns in proptest::collection::vec(proptest::collection::vec(any_edit(), 0..10), 1..6),
    ) {
        for (expected, reported) in compare_all(turns) {
            prop_assert_eq!(expected, reported);
        }
    }
}

#[test]
fn a_truncated_comparison_still_counts_changes() {
    let test = TestDisk::new();
    let before = test.sandbox.layers.clone();
    for number in 0..5 {
        fs::write(test.path("upper").join(number.to_string()), "").unwrap();
    }
    // Deeper than PATH_MAX.
    let mut folder = tree::open_root(&test.path("upper")).unwrap();
    let name = CString::new("x".repeat(200)).unwrap();
    for _ in 0..40 {
        rustix::fs::mkdirat(&folder, &name, Mode::RWXU).unwrap();
        folder = rustix::fs::openat(&folder, &name, rustix::fs::OFlags::DIRECTORY, Mode::empty())
            .unwrap();
    }
    let after = test.capture().unwrap().snapshot.layers;
    let changes = test.disk.changes(&before, &after, 3).unwrap();
    assert_eq!(changes.entries.len(), 3);
    assert!(changes.truncated && changes.added >= 5 + 20, "{changes:?}");
}
