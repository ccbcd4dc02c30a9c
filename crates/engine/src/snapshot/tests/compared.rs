//! What differs between two of them.

use std::{collections::BTreeMap, ffi::CString, fs, path::PathBuf};

use proptest::prelude::*;
use rustix::fs::Mode;

use super::{
    super::*,
    edits::{Edit, any_edit, edit},
    machine::{Machine, apart},
};
use crate::{changes::How, tree};

/// What differs between two descriptions, times apart.
fn differences(
    before: &BTreeMap<PathBuf, String>,
    after: &BTreeMap<PathBuf, String>,
) -> BTreeMap<PathBuf, How> {
    let told = |line: &String| {
        let written = |(at, _): &(usize, &str)| *at == 2 && !line.contains("->");
        line.split(' ')
            .enumerate()
            .filter(|part| !written(part))
            .map(|(_, part)| part.to_owned())
            .collect()
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
        let base = Snapshot::of(
            SnapshotId::random(),
            machine.sandbox.layers.clone(),
            ImageConfig::default(),
        );
        let mut taken = vec![(machine.shown(&base), base)];
        for edits in turns {
            edits.iter().for_each(|one| edit(&machine.path("merged"), one));
            let snapshot = machine.capture().unwrap().snapshot;
            taken.push((machine.shown(&snapshot), snapshot));
        }
        let mut compared = Vec::new();
        for (before, first) in &taken {
            for (after, second) in &taken {
                let changes =
                    machine.disk.changes(&first.layers, &second.layers, usize::MAX).unwrap();
                assert!(!changes.cut);
                let told =
                    changes.entries.into_iter().map(|change| (change.path, change.how)).collect();
                compared.push((differences(before, after), told));
            }
        }
        compared
    })
}

#[test]
fn a_folder_made_anew_hides_what_lay_below_when_two_captures_are_compared() {
    let text = |path: &str| path.to_owned();
    let (gone, made) =
        (|path: &str| Edit::Remove(text(path)), |path: &str| Edit::Folder(text(path)));
    let turns = vec![
        vec![gone("d"), made("d"), Edit::Write(text("d/new"), 1), gone("a/b"), Edit::Settle],
        vec![
            made("d/e"),
            made("a/b"),
            Edit::Write(text("a/b/f"), 2),
            gone("c"),
            made("c"),
            Edit::Settle,
        ],
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
        folder = rustix::fs::openat(&folder, &name, rustix::fs::OFlags::DIRECTORY, Mode::empty())
            .unwrap();
    }
    let after = machine.capture().unwrap().snapshot.layers;
    let changes = machine.disk.changes(&before, &after, 3).unwrap();
    assert_eq!(changes.entries.len(), 3);
    assert!(changes.cut && changes.added >= 5 + 20, "{changes:?}");
}
