//! Disk usage of images, snapshots, sandboxes and volumes, for `harvest df` and retention.
//! Read-only; follows no link. Measured sizes of layers, which never change, are cached on disk.

pub(crate) mod scan;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs::File,
    path::Path,
};

pub use harvest_proto::api::{DiskSpace, StoreFile};
use harvest_proto::{SandboxId, SnapshotId};
use rustix::fs::FileType;

use crate::{
    Engine, EngineError, SandboxState, Snapshot, StoreKind,
    btrfs::{self, QgroupUsage},
    disk::Disk,
    disk_thresholds::free_and_total_bytes,
    error::AtPath,
    records,
    records::create_private_dir,
    spec::LayerId,
    tree,
};

/// The disk usage of a home and its cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskUsage {
    /// How the home stores disks.
    pub driver: StoreKind,
    /// Each image with all its layers; a shared layer counts for each image.
    pub images: Vec<ItemUsage<String>>,
    /// The layers of all images, each counted once.
    pub images_bytes: u64,
    /// Each snapshot with what it added to its parent, where that is known.
    pub snapshots: Vec<ItemUsage<SnapshotId>>,
    /// The layers of all snapshots in this home, each counted once.
    pub snapshots_bytes: u64,
    /// Each sandbox with its writable layer.
    pub sandboxes: Vec<SandboxUsage>,
    /// The local forge: copies of folders and pushed branches.
    pub forge_bytes: u64,
    /// Trash of home and cache that is not deleted yet.
    pub trash_bytes: u64,
    /// What a garbage collection would free now, including the trash.
    pub reclaimable_bytes: u64,
    /// The store's file, for a home with [`StoreKind::BtrfsFile`].
    pub store_file: Option<StoreFile>,
    /// The disk the home is on.
    pub home_disk: DiskSpace,
    /// The disk the cache is on; often the same.
    pub cache_disk: DiskSpace,
}

/// The disk usage of a named item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemUsage<Name> {
    /// The item's name or id.
    pub name: Name,
    /// Bytes on the disk.
    pub bytes: u64,
}

/// A snapshot with the sizes of its layers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotUsage {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// The layers stored in this home with their sizes in bytes, bottom first.
    pub layers: Vec<(LayerId, u64)>,
}

/// The disk usage of a sandbox's writable layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SandboxUsage {
    /// The sandbox.
    pub id: SandboxId,
    /// Whether the sandbox runs; otherwise only its disk exists.
    pub running: bool,
    /// Bytes on the disk.
    pub bytes: u64,
}

impl Engine {
    /// Measures the disk usage. Layers that were never measured before may take a second each.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn disk_usage(&self) -> Result<DiskUsage, EngineError> {
        self.store.ensure_mounted()?;
        // Layers must not be removed while they are measured.
        let _gc_lock = self.disk.lock_against_gc()?;
        let mut layers = LayerSizes { disk: &self.disk, known: BTreeMap::new() };
        let (images, images_bytes) = self.image_sizes(&mut layers)?;
        let stored = self.disk.snapshot_list()?;
        let used = stored.iter().flat_map(|snapshot| snapshot.layers.iter().cloned()).collect();
        let (snapshots, snapshots_bytes) = self.snapshot_sizes(stored, &mut layers)?;
        let sandboxes = self.sandbox_sizes()?;
        let mut trash_bytes =
            trash_usage(&self.disk.home.trash())? + trash_usage(&self.disk.cache_trash())?;
        if self.disk.home.host_trash() != self.disk.home.trash() {
            trash_bytes += trash_usage(&self.disk.home.host_trash())?;
        }
        let unused = self.disk.find_unused(used)?;
        let reclaimable = unused.iter().map(|layer| layers.bytes(layer)).sum::<u64>();
        Ok(DiskUsage {
            driver: self.disk.home.store(),
            images,
            images_bytes,
            snapshots,
            snapshots_bytes,
            sandboxes,
            forge_bytes: tree_bytes(&self.disk.home.path().join("forge")).unwrap_or(0),
            trash_bytes,
            reclaimable_bytes: reclaimable + trash_bytes,
            store_file: self.store.file_size()?,
            home_disk: disk_space(self.disk.home.path())?,
            cache_disk: disk_space(self.disk.cache())?,
        })
    }

    fn image_sizes(
        &self,
        layers: &mut LayerSizes<'_>,
    ) -> Result<(Vec<ItemUsage<String>>, u64), EngineError> {
        let (mut images, mut all) = (Vec::new(), BTreeSet::new());
        for image in self.disk.image_list()? {
            let bytes = image.layers.iter().map(|layer| layers.bytes(layer)).sum();
            all.extend(image.layers);
            images.push(ItemUsage { name: image.name, bytes });
        }
        Ok((images, all.iter().map(|layer| layers.bytes(layer)).sum()))
    }

    fn snapshot_sizes(
        &self,
        stored: Vec<Snapshot>,
        layers: &mut LayerSizes<'_>,
    ) -> Result<(Vec<ItemUsage<SnapshotId>>, u64), EngineError> {
        let (mut snapshots, mut all) = (Vec::new(), BTreeSet::new());
        let in_home = self.layers_in_home()?;
        for snapshot in stored {
            let own = snapshot.layers.last().filter(|layer| in_home.contains(layer.as_str()));
            let bytes =
                snapshot.bytes.or_else(|| own.map(|layer| layers.bytes(layer))).unwrap_or(0);
            all.extend(own.cloned().map(|layer| (layer, bytes)));
            snapshots.push(ItemUsage { name: snapshot.id, bytes });
        }
        Ok((snapshots, all.iter().map(|(_, bytes)| bytes).sum()))
    }

    /// Every snapshot of this home with the sizes of its layers, without the layers of its image.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn snapshot_usage(&self) -> Result<Vec<SnapshotUsage>, EngineError> {
        self.store.ensure_mounted()?;
        let _gc_lock = self.disk.lock_against_gc()?;
        let mut layers = LayerSizes { disk: &self.disk, known: BTreeMap::new() };
        let snapshots = self.disk.snapshot_list()?;
        for snapshot in &snapshots {
            // The record has the size that was counted when the snapshot was taken.
            if let (Some(own), Some(bytes)) = (snapshot.layers.last(), snapshot.bytes) {
                layers.known.entry(own.clone()).or_insert(bytes);
            }
        }
        let in_home = self.layers_in_home()?;
        let mut usages = Vec::new();
        for snapshot in snapshots {
            let stack = snapshot.layers.iter().filter(|layer| in_home.contains(layer.as_str()));
            let stack = stack.map(|layer| (layer.clone(), layers.bytes(layer))).collect();
            usages.push(SnapshotUsage { snapshot, layers: stack });
        }
        Ok(usages)
    }

    /// Listed once: with a `stat` of each layer, the time would grow with the number of layers of
    /// all snapshots.
    fn layers_in_home(&self) -> Result<HashSet<String>, EngineError> {
        Ok(records::names_in(&self.disk.home.layers())?.into_iter().collect())
    }

    fn sandbox_sizes(&self) -> Result<Vec<SandboxUsage>, EngineError> {
        let mut usages = Vec::new();
        for id in self.list()? {
            let running = matches!(self.find(&id)?, SandboxState::Running(_));
            let bytes = if self.disk.home.store().is_btrfs() {
                self.disk
                    .subvolume_usage(&self.disk.home.writable(&id))
                    .map_or(0, |usage| usage.referenced)
            } else {
                // A tree that changes or disappears during the walk counts as 0.
                tree_bytes(&self.disk.home.writable(&id).join("upper")).unwrap_or(0)
            };
            usages.push(SandboxUsage { id, running, bytes });
        }
        Ok(usages)
    }
}

impl Disk {
    /// Commits deletions, so that their space becomes free soon: left alone, btrfs takes up to 30
    /// s.
    pub(crate) fn commit_deletions(&self) -> Result<(), EngineError> {
        if !self.home.store().is_btrfs() {
            return Ok(());
        }
        let root = self.home.root();
        File::open(&root).and_then(|root| btrfs::sync(&root)).at("sync", root)
    }

    /// The usage of a subvolume, where the store has quotas enabled.
    pub(crate) fn subvolume_usage(&self, subvolume: &Path) -> Option<QgroupUsage> {
        let open = File::open(subvolume).ok()?;
        let id = btrfs::subvolume_id(&open).ok()?;
        btrfs::qgroup_usages(&open).ok()?.get(&id).copied()
    }
}

/// Sizes of layers, in memory and on disk: each layer is measured only once.
struct LayerSizes<'a> {
    disk: &'a Disk,
    known: BTreeMap<LayerId, u64>,
}

impl LayerSizes<'_> {
    // A layer that cannot be measured counts as 0, so that the others are still reported.
    fn bytes(&mut self, layer: &LayerId) -> u64 {
        if let Some(bytes) = self.known.get(layer) {
            return *bytes;
        }
        let bytes = self.recorded(layer).or_else(|| self.measure(layer)).unwrap_or(0);
        self.known.insert(layer.clone(), bytes);
        bytes
    }

    fn recorded(&self, layer: &LayerId) -> Option<u64> {
        let name = format!("{layer}.json");
        records::read_record(&self.disk.sizes().join(name)).ok()?
    }

    fn measure(&self, layer: &LayerId) -> Option<u64> {
        let bytes = tree_bytes(&self.disk.layer_path(layer).ok()?).ok()?;
        // A size that cannot be recorded is measured again next time.
        let _ = create_private_dir(&self.disk.sizes()).and_then(|()| {
            records::write_record_unsynced(&self.disk.sizes().join(format!("{layer}.json")), &bytes)
        });
        Some(bytes)
    }
}

fn trash_usage(trash: &Path) -> Result<u64, EngineError> {
    let names = records::names_in(trash)?;
    Ok(names.iter().map(|name| tree_bytes(&trash.join(name)).unwrap_or(0)).sum())
}

fn disk_space(path: &Path) -> Result<DiskSpace, EngineError> {
    let (free_bytes, total_bytes) = free_and_total_bytes(path)?;
    Ok(DiskSpace { total_bytes, free_bytes })
}

/// The bytes a tree uses on the disk. A file with several names counts once.
pub(crate) fn tree_bytes(root: &Path) -> Result<u64, EngineError> {
    let mut seen = HashSet::new();
    let mut bytes = 0;
    tree::visit::<EngineError>(root, &mut |_, _, stat| {
        if stat.st_nlink < 2
            || FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            || seen.insert(stat.st_ino)
        {
            // `st_blocks` counts units of 512 bytes whatever the file system's block size is.
            bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        }
        Ok(())
    })?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_two_names_is_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("one"), vec![7; 65536]).unwrap();
        let before = tree_bytes(folder.path()).unwrap();
        std::fs::hard_link(folder.path().join("one"), folder.path().join("two")).unwrap();
        assert_eq!(tree_bytes(folder.path()).unwrap(), before);
    }
}
