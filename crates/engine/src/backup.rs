//! The disks of a home as a backup needs them: the records of its snapshots and the layers that the
//! records refer to, kept from garbage collection until they are copied. Copies nothing itself.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use crate::{
    Engine, EngineError, Owner, SandboxState,
    disk::{Disk, GcGuard},
    layer_cache::{LayerCache, copy_tree},
    process::boot_id,
    records,
    sandbox_record::Record,
    snapshot::SnapshotRecord,
    spec::LayerId,
};

/// The disks of one engine, locked against collection until this is dropped: sandboxes start and
/// snapshots are taken meanwhile, but no layer is removed.
#[derive(Debug)]
pub struct DiskBackup<'a> {
    disk: &'a Disk,
    records: BTreeMap<String, SnapshotRecord>,
    _no_gc: GcGuard,
}

/// A layer that a snapshot refers to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupLayer {
    /// The layer's id.
    pub id: LayerId,
    /// Its tree.
    pub path: PathBuf,
    /// Whether the layer belongs to an image, in the cache, rather than to this home.
    pub of_image: bool,
}

impl Engine {
    /// Begins a backup of this home's disks.
    ///
    /// # Errors
    /// When the store cannot be mounted or locked.
    pub fn disk_backup(&self) -> Result<DiskBackup<'_>, EngineError> {
        self.store.ensure_mounted()?;
        DiskBackup::begin(&self.disk)
    }

    /// How many sandboxes of sessions run: what they wrote since their last snapshot is in no
    /// record.
    ///
    /// # Errors
    /// When the sandboxes cannot be listed.
    pub fn running_session_sandboxes(&self) -> Result<usize, EngineError> {
        let mut running = 0;
        for id in self.list()? {
            let record = Record::read(&self.disk.home, &id)?;
            let of_sessions = record.is_some_and(|record| record.owner == Owner::Sessions);
            let is_running = of_sessions && matches!(self.find(&id)?, SandboxState::Running(_));
            running += usize::from(is_running);
        }
        Ok(running)
    }
}

impl<'a> DiskBackup<'a> {
    fn begin(disk: &'a Disk) -> Result<Self, EngineError> {
        Ok(Self { disk, records: BTreeMap::new(), _no_gc: disk.lock_against_gc()? })
    }

    /// Reads the records of all snapshots there are now; those read before stay. A database copied
    /// between two calls refers to no other snapshots.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn read_snapshots(&mut self) -> Result<(), EngineError> {
        let folder = self.disk.home.snapshots();
        for (path, mut record) in records::read_records::<SnapshotRecord>(&folder)? {
            // Captures of this boot are complete on the disk or in memory; `load` syncs the copy.
            record.snapshot.durable |= record.boot == boot_id();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            self.records.insert(name, record);
        }
        Ok(())
    }

    /// The file name and content of each record, for the folder `snapshots` of a home.
    ///
    /// # Errors
    /// When a record cannot be written as JSON.
    pub fn snapshot_files(&self) -> Result<Vec<(String, Vec<u8>)>, EngineError> {
        let file = |(name, record): (&String, &SnapshotRecord)| {
            let text = serde_json::to_vec(record)
                .map_err(|source| EngineError::Record { path: name.into(), source })?;
            Ok((name.clone(), text))
        };
        self.records.iter().map(file).collect()
    }

    /// The layers that the records refer to, and those of them that are gone.
    #[must_use]
    pub fn layers(&self) -> (Vec<BackupLayer>, Vec<LayerId>) {
        let disk = self.disk;
        let used = self.records.values().flat_map(|record| &record.snapshot.layers);
        let (mut found, mut missing) = (Vec::new(), Vec::new());
        for id in used.collect::<BTreeSet<_>>() {
            match disk.layer_path(id) {
                Ok(path) => {
                    let of_image = path.starts_with(disk.cache_layers());
                    found.push(BackupLayer { id: id.clone(), path, of_image });
                }
                Err(_) => missing.push(id.clone()),
            }
        }
        (found, missing)
    }
}

impl LayerCache<'_> {
    /// Moves a folder into the cache as this layer, unless the cache has the layer.
    ///
    /// # Errors
    /// When the folder cannot be moved or copied.
    pub fn adopt(&self, folder: &Path, layer: &LayerId) -> Result<(), EngineError> {
        if self.has_layer(layer) {
            return Ok(());
        }
        // The home may be on another file system than the cache.
        let draft = self.create_folder()?;
        let moved = match std::fs::rename(folder, &draft) {
            Ok(()) => Ok(()),
            Err(_) => copy_tree(folder, &draft),
        };
        let adopted = moved.and_then(|()| self.commit(&draft, layer));
        if adopted.is_err() {
            self.discard(&draft);
        }
        adopted
    }
}

#[cfg(test)]
mod tests {
    use harvest_proto::SnapshotId;

    use super::*;
    use crate::{snapshot::Snapshot, spec::ImageConfig};

    #[test]
    fn records_refer_to_layers_of_home_and_images() {
        let disk = Disk::temporary();
        let (own, image, gone): (LayerId, LayerId, LayerId) =
            ("abcdefgh".parse().unwrap(), "0123abcd".parse().unwrap(), "ffffffff".parse().unwrap());
        std::fs::create_dir(disk.home.layers().join(own.as_str())).unwrap();
        std::fs::create_dir(disk.cache_layers().join(image.as_str())).unwrap();
        let layers = vec![image.clone(), own.clone(), gone.clone()];
        let id = SnapshotId::random();
        disk.snapshot_write(Snapshot::of(id.clone(), layers, ImageConfig::default())).unwrap();
        let mut backup = DiskBackup::begin(&disk).unwrap();
        backup.read_snapshots().unwrap();
        disk.snapshot_remove(&id).unwrap();
        backup.read_snapshots().unwrap();
        let (found, missing) = backup.layers();
        let found: Vec<_> = found.iter().map(|layer| (&layer.id, layer.of_image)).collect();
        assert_eq!(found, [(&image, true), (&own, false)]);
        assert_eq!(missing, [gone]);
        let files = backup.snapshot_files().unwrap();
        assert_eq!(files.len(), 1, "a snapshot removed meanwhile stays in the backup");
        let record: serde_json::Value = serde_json::from_slice(&files[0].1).unwrap();
        assert_eq!(record["durable"], true);
    }
}
