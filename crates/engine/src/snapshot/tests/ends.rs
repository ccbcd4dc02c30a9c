//! Of a disk whose sandbox ends with it.

use std::fs;

use super::{
    super::*,
    machine::{BASE, Machine},
};

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
            machine
                .disk
                .snapshot_write(Snapshot::of(id.clone(), layers, ImageConfig::default()))
                .unwrap();
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
    fs::rename(machine.path("upper"), machine.disk.layers().join(layer_of(&first).as_str()))
        .unwrap();
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
