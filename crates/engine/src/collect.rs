//! Collecting garbage: finds what nothing refers to any more and throws it away. A layer that any
//! snapshot, image or sandbox of any home refers to stays.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use harvest_proto::SandboxId;

use crate::{
    EngineError,
    disk::{self, Disk},
    home::Home,
    image::Image,
    layer::disk_usage,
    oci::Pulled,
    sandbox::Record,
    spec::LayerId,
    store::{self, Driver, Store, StoreKind},
    trash,
};

/// What a collection came to.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Layers nothing refers to.
    pub layers: Vec<LayerId>,
    /// Dead sandboxes whose owner is gone.
    pub sandboxes: Vec<SandboxId>,
    /// What the layers took on the disk.
    pub bytes: u64,
    /// Trees in the trash, what was just thrown away included.
    pub trees: u64,
    /// Whether the shared cache was passed over because a build is in progress.
    pub cache_busy: bool,
    /// The home for whose sake the shared cache was passed over: its folder is there and empty, or gone with
    /// the folder it was in, as when a disk is not attached.
    pub cache_kept_for: Option<PathBuf>,
    /// Whether nobody asked how much it is.
    pub(crate) unmeasured: bool,
}

impl Disk {
    /// Throws away every layer nothing refers to, in this home and in the cache. With `dry_run` it only
    /// says which. Answers what is in the trash by name, to be deleted without holding anyone up.
    pub(crate) fn collect(
        &self,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<Waste, EngineError> {
        let _alone = self.hold_home_alone()?;
        let mut used = BTreeSet::new();
        let mut waste = self.collect_home(dry_run, &mut used, collected)?;
        if let Some(_alone) = self.try_hold_cache_alone()? {
            self.collect_cache(used, dry_run, collected)?;
            waste.cache = disk::names_in(&self.cache_trash())?;
        } else {
            collected.cache_busy = true;
        }
        collected.trees = (waste.home.len() + waste.host.len() + waste.cache.len()) as u64;
        Ok(waste)
    }

    /// The same for this home alone, without measuring what goes.
    pub(crate) fn sweep(&self) -> Result<(Waste, usize), EngineError> {
        let _alone = self.hold_home_alone()?;
        let mut collected = Collected { unmeasured: true, ..Collected::default() };
        let waste = self.collect_home(false, &mut BTreeSet::new(), &mut collected)?;
        Ok((waste, collected.layers.len()))
    }

    fn collect_home(
        &self,
        dry_run: bool,
        used: &mut BTreeSet<LayerId>,
        collected: &mut Collected,
    ) -> Result<Waste, EngineError> {
        self.used_by_home(self.home(), self.store(), used)?;
        self.throw_unused(&self.layers(), used, &self.trash(), dry_run, collected)?;
        if !dry_run {
            // Nobody holds the home, so nobody is writing these.
            for name in disk::names_in(&self.partial())? {
                trash::throw_away(&self.partial().join(name), &self.trash())?;
            }
            self.snapshots_tidy()?;
        }
        let mut waste = Waste { home: disk::names_in(&self.trash())?, ..Waste::default() };
        if self.host_trash() != self.trash() {
            waste.host = disk::names_in(&self.host_trash())?;
        }
        Ok(waste)
    }

    fn collect_cache(
        &self,
        mut used: BTreeSet<LayerId>,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<(), EngineError> {
        for name in disk::record_names(&self.homes())? {
            let record = self.homes().join(format!("{name}.json"));
            let Some(home) = disk::read_record::<PathBuf>(&record)? else { continue };
            if store::is_made(&home)? {
                // Its records may be in a store that is not mounted now.
                let store = Store::open(&home, Driver::Dir)?;
                self.used_by_home(&home, store.kind(), &mut used)?;
                store.rest()?;
            } else if !home.is_dir() && home.parent().is_some_and(Path::is_dir) {
                // Removed by its owner. An empty one, or one whose parent is missing too, may be on a
                // disk that is not attached right now.
                disk::remove_file(&record)?;
            } else {
                collected.cache_kept_for = Some(home);
                return Ok(());
            }
        }
        for Image { layers, .. } in self.image_list()? {
            used.extend(layers);
        }
        self.throw_unused(&self.cache_layers(), &used, &self.cache_trash(), dry_run, collected)?;
        if !dry_run {
            for name in disk::names_in(&self.building())? {
                let path = self.building().join(&name);
                if path.is_dir() {
                    trash::throw_away(&path, &self.cache_trash())?;
                }
            }
            self.forget_steps()?;
        }
        Ok(())
    }

    // A step that stands for a layer which is gone stands for nothing.
    fn forget_steps(&self) -> Result<(), EngineError> {
        for name in disk::record_names(&self.steps())? {
            let path = self.steps().join(format!("{name}.json"));
            let layer: Option<LayerId> = disk::read_record(&path)?;
            if layer.is_some_and(|layer| !self.cache_layers().join(layer.as_str()).exists()) {
                disk::remove_file(&path)?;
            }
        }
        for name in disk::record_names(&self.pulled())? {
            let path = self.pulled().join(format!("{name}.json"));
            let pulled: Option<Pulled> = disk::read_record(&path)?;
            if pulled.is_some_and(|pulled| {
                pulled.layers.iter().any(|layer| self.layer_path(layer).is_err())
            }) {
                disk::remove_file(&path)?;
            }
        }
        Ok(())
    }

    fn used_by_home(
        &self,
        home: &Path,
        store: StoreKind,
        used: &mut BTreeSet<LayerId>,
    ) -> Result<(), EngineError> {
        let other = self.of_home(home, store);
        for snapshot in other.snapshot_list()? {
            used.extend(snapshot.layers);
        }
        for part in disk::names_in(&other.sandboxes())? {
            let Ok(id) = format!("{}_{part}", SandboxId::PREFIX).parse::<SandboxId>() else {
                continue;
            };
            if let Some(record) = Record::read(&Home::new(home.to_owned(), store), &id)? {
                used.extend(record.layers);
            }
            used.extend(other.captures(&id)?.chain);
            used.extend(other.ending(&id)?.map(|ending| ending.layer));
        }
        Ok(())
    }

    fn throw_unused(
        &self,
        folder: &Path,
        used: &BTreeSet<LayerId>,
        trash: &Path,
        dry_run: bool,
        collected: &mut Collected,
    ) -> Result<(), EngineError> {
        for name in disk::names_in(folder)? {
            let Ok(layer) = name.parse::<LayerId>() else { continue };
            if used.contains(&layer) {
                continue;
            }
            let path = folder.join(layer.as_str());
            // A tree too hostile to be measured can be thrown away all the same.
            if !collected.unmeasured {
                collected.bytes += disk_usage(&path).unwrap_or(0);
            }
            if !dry_run {
                trash::throw_away(&path, trash)?;
                disk::remove_file(&self.sizes().join(format!("{layer}.json")))?;
            }
            collected.layers.push(layer);
        }
        Ok(())
    }

    /// The layers that a collection would throw away now. Keeps nobody out, so it is a guess; and says
    /// nothing of the cache while the records of a home that uses it cannot be read as they are.
    pub(crate) fn find_unused(&self) -> Result<Vec<LayerId>, EngineError> {
        let mut used = BTreeSet::new();
        self.used_by_home(self.home(), self.store(), &mut used)?;
        let mut folders = vec![self.layers()];
        if self.used_by_others(&mut used)? {
            folders.push(self.cache_layers());
        }
        let mut unused = Vec::new();
        for folder in folders {
            let names = disk::names_in(&folder)?;
            let layers = names.iter().filter_map(|name| name.parse::<LayerId>().ok());
            unused.extend(layers.filter(|layer| !used.contains(layer)));
        }
        Ok(unused)
    }

    /// False when there are others whose records are not there to be read.
    fn used_by_others(&self, used: &mut BTreeSet<LayerId>) -> Result<bool, EngineError> {
        for image in self.image_list()? {
            used.extend(image.layers);
        }
        for name in disk::record_names(&self.homes())? {
            let record = self.homes().join(format!("{name}.json"));
            let Some(home) = disk::read_record::<std::path::PathBuf>(&record)? else { continue };
            let kind = store::kind_of(&home)?.unwrap_or(StoreKind::Dir);
            if store::root(&home, kind).join("snapshots").is_dir() {
                self.used_by_home(&home, kind, used)?;
            } else if home.is_dir() || !home.parent().is_some_and(Path::is_dir) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Deletes what was in the trash when it was looked at; what came since may be in use.
    pub(crate) fn delete(&self, waste: &Waste) -> Result<(), EngineError> {
        trash::delete(&self.trash(), &waste.home)?;
        trash::delete(&self.host_trash(), &waste.host)?;
        trash::delete(&self.cache_trash(), &waste.cache)
    }
}

/// What is to be deleted, by name, in each trash.
#[derive(Debug, Default)]
pub(crate) struct Waste {
    home: Vec<String>,
    host: Vec<String>,
    cache: Vec<String>,
}

#[cfg(test)]
mod tests {
    use std::fs;

    use harvest_proto::{SnapshotId, Timestamp};

    use super::*;
    use crate::{
        disk::tests::Temporary,
        image::Image,
        snapshot::{Ending, Snapshot},
        spec::ImageConfig,
    };

    fn layer(folder: &Path, name: &str) -> LayerId {
        fs::create_dir_all(folder.join(name).join("etc")).unwrap();
        name.parse().unwrap()
    }

    fn collect(disk: &Temporary, dry_run: bool) -> Vec<String> {
        let mut collected = Collected::default();
        let waste = disk.collect(dry_run, &mut collected).unwrap();
        if !dry_run {
            disk.delete(&waste).unwrap();
        }
        collected.layers.iter().map(ToString::to_string).collect()
    }

    fn sandbox(disk: &Disk, layers: Vec<LayerId>) -> SandboxId {
        let id = SandboxId::random();
        let record = Record { id: id.clone(), layers, ..Record::of_a_seed() };
        fs::create_dir_all(disk.sandbox(&id)).unwrap();
        disk::write_record(&disk.sandbox(&id).join("record.json"), &record).unwrap();
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
    fn a_layer_in_use_is_never_collected() {
        let disk = Disk::temporary();
        let (home, cache) = (disk.layers(), disk.cache_layers());
        let kept = ["ofimage0", "ofsandbox", "ofcapture", "ofending", "ofsnapshot"];
        disk.image_write(&image("base", vec![layer(&cache, kept[0])])).unwrap();
        let id = sandbox(&disk, vec![layer(&cache, kept[1])]);
        let mut captures = crate::snapshot::Captures::default();
        captures.chain.push(layer(&home, kept[2]));
        disk::write_record(&disk.sandbox(&id).join("captures.json"), &captures).unwrap();
        let ending = Ending { layer: layer(&home, kept[3]) };
        disk::write_record(&disk.sandbox(&id).join("ending.json"), &ending).unwrap();
        let snapshot = SnapshotId::random();
        let layers = vec![layer(&home, kept[4])];
        disk.snapshot_write(Snapshot::of(snapshot.clone(), layers, ImageConfig::default()))
            .unwrap();
        layer(&home, "orphan-a");
        layer(&cache, "orphan-b");
        assert_eq!(collect(&disk, true), ["orphan-a", "orphan-b"]);
        assert_eq!(collect(&disk, false), ["orphan-a", "orphan-b"]);
        for name in kept {
            assert!(home.join(name).exists() || cache.join(name).exists(), "{name}");
        }
        assert!(disk::names_in(&disk.trash()).unwrap().is_empty());
        disk.snapshot_remove(&snapshot).unwrap();
        assert_eq!(collect(&disk, false), ["ofsnapshot"]);
    }

    #[test]
    fn a_sweep_removes_records_whose_writer_was_killed() {
        let disk = Disk::temporary();
        let kept = SnapshotId::random();
        disk.snapshot_write(Snapshot::of(kept.clone(), Vec::new(), ImageConfig::default()))
            .unwrap();
        let unfinished = disk.snapshots().join(format!("{}.somebody.new", kept.part()));
        fs::write(&unfinished, "{").unwrap();
        disk.sweep().unwrap();
        assert_eq!(disk::names_in(&disk.snapshots()).unwrap(), [format!("{}.json", kept.part())]);
    }

    #[test]
    fn a_sweep_frees_what_this_home_no_longer_uses_and_leaves_the_cache_alone() {
        let disk = Disk::temporary();
        let kept = layer(&disk.layers(), "kept0000");
        disk.snapshot_write(Snapshot::of(SnapshotId::random(), vec![kept], ImageConfig::default()))
            .unwrap();
        layer(&disk.layers(), "orphan-a");
        layer(&disk.cache_layers(), "orphan-b");
        let (waste, layers) = disk.sweep().unwrap();
        disk.delete(&waste).unwrap();
        assert_eq!(layers, 1);
        assert_eq!(disk::names_in(&disk.layers()).unwrap(), ["kept0000"]);
        assert_eq!(disk::names_in(&disk.cache_layers()).unwrap(), ["orphan-b"]);
        assert!(disk::names_in(&disk.trash()).unwrap().is_empty());
    }

    #[test]
    fn a_cache_layer_another_home_stands_on_is_not_collected() {
        let disk = Disk::temporary();
        let other_home = disk.home().with_file_name("other");
        let other =
            Disk::open(&other_home, &disk.home().with_file_name("cache"), StoreKind::Dir).unwrap();
        let shared = layer(&disk.cache_layers(), "shared00");
        let snapshot = Snapshot::of(SnapshotId::random(), vec![shared], ImageConfig::default());
        other.snapshot_write(snapshot).unwrap();
        assert!(collect(&disk, false).is_empty());
        fs::remove_dir_all(&other_home).unwrap();
        assert_eq!(collect(&disk, false), ["shared00"]);
    }

    #[test]
    fn a_home_whose_disk_is_not_attached_keeps_the_cache_as_it_is() {
        let disk = Disk::temporary();
        let other = disk.home().with_file_name("other");
        Disk::open(&other, &disk.home().with_file_name("cache"), StoreKind::Dir).unwrap();
        layer(&disk.cache_layers(), "shared00");
        // What is left of a mount: the folder it was on.
        fs::remove_dir_all(&other).unwrap();
        fs::create_dir(&other).unwrap();
        assert!(collect(&disk, false).is_empty());
        assert!(disk::names_in(&other).unwrap().is_empty(), "and nothing is put there");
        let mut collected = Collected::default();
        disk.collect(true, &mut collected).unwrap();
        assert_eq!(collected.cache_kept_for.as_ref(), Some(&other), "and it is told");
        fs::remove_dir(&other).unwrap();
        assert_eq!(collect(&disk, false), ["shared00"]);
    }

    #[test]
    fn the_cache_is_passed_over_while_a_build_holds_it() {
        let disk = Disk::temporary();
        layer(&disk.cache_layers(), "building0");
        let build = disk.hold_cache().unwrap();
        assert!(collect(&disk, false).is_empty());
        drop(build);
        assert_eq!(collect(&disk, false), ["building0"]);
    }

    #[test]
    fn what_a_crash_left_half_written_is_collected() {
        let disk = Disk::temporary();
        fs::create_dir(disk.partial().join("half")).unwrap();
        fs::create_dir(disk.building().join("half")).unwrap();
        collect(&disk, false);
        assert!(disk::names_in(&disk.partial()).unwrap().is_empty());
        assert!(disk::names_in(&disk.building()).unwrap().is_empty());
    }
}
