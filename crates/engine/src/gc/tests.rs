//! What garbage collection keeps and removes.

use std::fs;

use harvest_proto::{SnapshotId, Timestamp};

use super::*;
use crate::{
    disk::tests::Temporary,
    image::Image,
    snapshot::{PendingSave, Snapshot},
    spec::ImageConfig,
};

fn layer(folder: &Path, name: &str) -> LayerId {
    fs::create_dir_all(folder.join(name).join("etc")).unwrap();
    name.parse().unwrap()
}

fn collect(disk: &Temporary, dry_run: bool) -> Vec<String> {
    let mut collected = Collected::default();
    let trash = disk.collect(dry_run, &mut collected).unwrap();
    if !dry_run {
        disk.delete(&trash).unwrap();
    }
    collected.layers.iter().map(ToString::to_string).collect()
}

fn sandbox(disk: &Disk, layers: Vec<LayerId>) -> SandboxId {
    let id = SandboxId::random();
    let record = Record { id: id.clone(), layers, ..Record::of_a_standby() };
    fs::create_dir_all(disk.home.sandbox(&id)).unwrap();
    records::write_record(&disk.home.sandbox(&id).join("record.json"), &record).unwrap();
    id
}

fn image(name: &str, layers: Vec<LayerId>) -> Image {
    Image {
        id: harvest_proto::ImageId::random(),
        name: name.to_owned(),
        layers,
        config: ImageConfig::default(),
        recipe_key: String::new(),
        bytes: 0,
        created_at: Timestamp::from_millis(0),
        source: String::new(),
    }
}

#[test]
fn layers_in_use_are_never_collected() {
    let disk = Disk::temporary();
    let (home, cache) = (disk.home.layers(), disk.cache_layers());
    let used = ["ofimage0", "ofsandbox", "ofcapture", "ofending", "ofsnapshot"];
    disk.image_write(&image("base", vec![layer(&cache, used[0])])).unwrap();
    let id = sandbox(&disk, vec![layer(&cache, used[1])]);
    let mut captures = crate::snapshot::Captures::default();
    captures.chain.push(layer(&home, used[2]));
    records::write_record(&disk.home.sandbox(&id).join("captures.json"), &captures).unwrap();
    let pending = PendingSave { layer: layer(&home, used[3]) };
    records::write_record(&disk.home.sandbox(&id).join("pending-save.json"), &pending).unwrap();
    let snapshot = SnapshotId::random();
    let layers = vec![layer(&home, used[4])];
    disk.snapshot_write(Snapshot::of(snapshot.clone(), layers, ImageConfig::default())).unwrap();
    layer(&home, "orphan-a");
    layer(&cache, "orphan-b");
    assert_eq!(collect(&disk, true), ["orphan-a", "orphan-b"]);
    assert_eq!(collect(&disk, false), ["orphan-a", "orphan-b"]);
    for name in used {
        assert!(home.join(name).exists() || cache.join(name).exists(), "{name}");
    }
    assert!(records::names_in(&disk.home.trash()).unwrap().is_empty());
    disk.snapshot_remove(&snapshot).unwrap();
    assert_eq!(collect(&disk, false), ["ofsnapshot"]);
}

#[test]
fn gc_removes_records_of_killed_writers() {
    let disk = Disk::temporary();
    let id = SnapshotId::random();
    disk.snapshot_write(Snapshot::of(id.clone(), Vec::new(), ImageConfig::default())).unwrap();
    let unfinished = disk.home.snapshots().join(format!("{}.random.new", id.part()));
    fs::write(&unfinished, "{").unwrap();
    disk.collect_home_only().unwrap();
    assert_eq!(records::names_in(&disk.home.snapshots()).unwrap(), [format!("{}.json", id.part())]);
}

#[test]
fn collecting_the_home_leaves_the_cache_alone() {
    let disk = Disk::temporary();
    let used = layer(&disk.home.layers(), "used0000");
    disk.snapshot_write(Snapshot::of(SnapshotId::random(), vec![used], ImageConfig::default()))
        .unwrap();
    layer(&disk.home.layers(), "orphan-a");
    layer(&disk.cache_layers(), "orphan-b");
    let (trash, layers) = disk.collect_home_only().unwrap();
    disk.delete(&trash).unwrap();
    assert_eq!(layers, 1);
    assert_eq!(records::names_in(&disk.home.layers()).unwrap(), ["used0000"]);
    assert_eq!(records::names_in(&disk.cache_layers()).unwrap(), ["orphan-b"]);
    assert!(records::names_in(&disk.home.trash()).unwrap().is_empty());
}

#[test]
fn cache_layers_used_by_another_home_are_kept() {
    let disk = Disk::temporary();
    let other_home = disk.home.path().with_file_name("other");
    let other = Disk::open(
        Home::new(other_home.clone(), StoreKind::Dir),
        &disk.home.path().with_file_name("cache"),
    )
    .unwrap();
    Store::open(&other_home, Driver::Dir).unwrap();
    let shared = layer(&disk.cache_layers(), "shared00");
    let snapshot = Snapshot::of(SnapshotId::random(), vec![shared], ImageConfig::default());
    other.snapshot_write(snapshot).unwrap();
    assert!(collect(&disk, false).is_empty());
    fs::remove_dir_all(&other_home).unwrap();
    assert_eq!(collect(&disk, false), ["shared00"]);
}

#[test]
fn an_unattached_home_keeps_the_cache_untouched() {
    let disk = Disk::temporary();
    let other = disk.home.path().with_file_name("other");
    Disk::open(Home::new(other.clone(), StoreKind::Dir), &disk.home.path().with_file_name("cache"))
        .unwrap();
    layer(&disk.cache_layers(), "shared00");
    // An unmounted disk leaves an empty mount point.
    fs::remove_dir_all(&other).unwrap();
    fs::create_dir(&other).unwrap();
    assert!(collect(&disk, false).is_empty());
    assert!(records::names_in(&other).unwrap().is_empty(), "nothing is created there");
    let mut collected = Collected::default();
    disk.collect(true, &mut collected).unwrap();
    assert_eq!(collected.cache_kept_for.as_ref(), Some(&other), "the home is reported");
    fs::remove_dir(&other).unwrap();
    assert_eq!(collect(&disk, false), ["shared00"]);
}

#[test]
fn gc_skips_the_cache_during_a_build() {
    let disk = Disk::temporary();
    layer(&disk.cache_layers(), "building0");
    let build = disk.lock_cache_against_gc().unwrap();
    assert!(collect(&disk, false).is_empty());
    drop(build);
    assert_eq!(collect(&disk, false), ["building0"]);
}

#[test]
fn layer_recorded_after_the_search_is_kept() {
    let disk = Disk::temporary();
    let kept = layer(&disk.home.layers(), "kept0000");
    let candidates = disk.find_candidates().unwrap();
    assert_eq!(candidates.layers, std::slice::from_ref(&kept));
    let snapshot = Snapshot::of(SnapshotId::random(), vec![kept], ImageConfig::default());
    disk.snapshot_write(snapshot).unwrap();
    let mut collected = Collected::default();
    disk.collect_home(candidates, false, &mut collected).unwrap();
    assert_eq!(collected.layers, []);
}

#[test]
fn partial_layers_of_a_crash_are_collected() {
    let disk = Disk::temporary();
    fs::create_dir(disk.home.partial().join("layer")).unwrap();
    fs::create_dir(disk.building().join("layer")).unwrap();
    collect(&disk, false);
    assert!(records::names_in(&disk.home.partial()).unwrap().is_empty());
    assert!(records::names_in(&disk.building()).unwrap().is_empty());
}
