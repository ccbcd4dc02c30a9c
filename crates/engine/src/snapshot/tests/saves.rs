//! Saving the disk of a stopped sandbox.

use std::fs;

use super::{
    super::*,
    test_disk::{BASE, TestDisk},
};

#[test]
fn saves_retried_after_any_crash_lose_nothing() {
    for crash in ["nothing", "pending", "renamed", "recorded", "removed"] {
        let test = TestDisk::new();
        let id = SnapshotId::random();
        let layer = layer_of(&id);
        fs::write(test.path("upper/work"), "done").unwrap();
        let pending = PendingSave { layer: layer.clone() };
        if crash != "nothing" {
            records::write_record(&test.path("pending-save.json"), &pending).unwrap();
        }
        if ["renamed", "recorded", "removed"].contains(&crash) {
            fs::rename(test.path("upper"), test.disk.home.layers().join(layer.as_str())).unwrap();
        }
        if ["recorded", "removed"].contains(&crash) {
            let layers = vec![BASE.parse().unwrap(), layer.clone()];
            test.disk
                .snapshot_write(Snapshot::of(id.clone(), layers, ImageConfig::default()))
                .unwrap();
        }
        if crash == "removed" {
            trash::move_to_trash(&test.path(""), &test.disk.home.trash()).unwrap();
        }
        let snapshot = test.save_as(&id).unwrap();
        let top = test.disk.layer_path(snapshot.layers.last().unwrap()).unwrap();
        assert_eq!(fs::read(top.join("work")).unwrap(), b"done", "{crash}");
        assert_eq!(snapshot.layers.len(), 2);
        assert!(!test.path("").exists(), "{crash}");
        assert_eq!(test.save_as(&id).unwrap(), snapshot, "repeated after {crash}");
    }
}

#[test]
fn saves_continued_under_another_id_succeed() {
    let test = TestDisk::new();
    let first = SnapshotId::random();
    fs::write(test.path("upper/work"), "done").unwrap();
    records::write_record(
        &test.path("pending-save.json"),
        &PendingSave { layer: layer_of(&first) },
    )
    .unwrap();
    fs::rename(test.path("upper"), test.disk.home.layers().join(layer_of(&first).as_str()))
        .unwrap();
    let snapshot = test.save_as(&SnapshotId::random()).unwrap();
    assert_eq!(*snapshot.layers.last().unwrap(), layer_of(&first));
}

#[test]
fn saving_under_a_captures_id_is_refused() {
    let test = TestDisk::new();
    let id = SnapshotId::random();
    test.capture_as(&id).unwrap();
    fs::write(test.path("upper/work"), "since").unwrap();
    assert!(matches!(test.save_as(&id), Err(EngineError::SnapshotTaken { .. })));
    assert!(test.path("upper/work").exists());
}

#[test]
fn an_unknown_sandbox_cannot_be_saved() {
    let test = TestDisk::new();
    trash::move_to_trash(&test.path(""), &test.disk.home.trash()).unwrap();
    assert!(matches!(test.save_as(&SnapshotId::random()), Err(EngineError::NotRunning { .. })));
}
