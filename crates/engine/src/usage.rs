//! What takes how much room, for `harvest df`. Reads only, follows no link, and keeps what it measured
//! of layers, which never change: the next time costs nothing.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::Path,
};

use harvest_proto::{SandboxId, SnapshotId};
use serde::{Deserialize, Serialize};

use crate::{
    Engine, EngineError, SandboxState, Snapshot, StoreKind, btrfs,
    btrfs::Taken,
    disk::{self, Disk},
    home::make_private,
    layer::disk_usage,
    room::free_of_total,
    spec::LayerId,
    volume::VolumeName,
};

/// What takes how much room.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// How the home keeps disks.
    pub driver: StoreKind,
    /// Each image with all its layers; what two share is in both.
    pub images: Vec<Used<String>>,
    /// The layers of all images, each once.
    pub images_bytes: u64,
    /// Each snapshot with what it added to what it stands on, where that is known.
    pub snapshots: Vec<Used<SnapshotId>>,
    /// The layers of all snapshots in this home, each once.
    pub snapshots_bytes: u64,
    /// Each sandbox with its writable layer.
    pub sandboxes: Vec<SandboxUsed>,
    /// Each volume with what is reserved for it.
    pub volumes: Vec<Used<VolumeName>>,
    /// What was thrown away and is not deleted yet, in home and cache.
    pub trash_bytes: u64,
    /// What a collection would free now, the trash included.
    pub reclaimable_bytes: u64,
    /// The file of the store, where there is one.
    pub store_file: Option<StoreFile>,
    /// The disk the home is on.
    pub home_disk: DiskRoom,
    /// The disk the cache is on; often the same.
    pub cache_disk: DiskRoom,
}

/// Something and what it takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Used<Name> {
    /// What.
    pub name: Name,
    /// How much.
    pub bytes: u64,
}

/// A snapshot and what the layers it consists of take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Weighed {
    /// Which.
    pub snapshot: Snapshot,
    /// Those of this home, bottom first.
    pub layers: Vec<(LayerId, u64)>,
}

/// A sandbox and what its writable layer takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxUsed {
    /// Which.
    pub id: SandboxId,
    /// Whether it runs; else only its disk is there.
    pub running: bool,
    /// How much.
    pub bytes: u64,
}

/// A store in a file: what the host sees and what is in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFile {
    /// Reserved on the host's disk.
    pub bytes: u64,
    /// Of that, not in use.
    pub free_bytes: u64,
}

/// A disk of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskRoom {
    /// In all.
    pub total_bytes: u64,
    /// Free for us.
    pub free_bytes: u64,
}

impl Engine {
    /// What takes how much room. The first time it measures layers, which may take a second each.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn usage(&self) -> Result<Usage, EngineError> {
        self.store.wake()?;
        // What is measured stays until it is.
        let _hold = self.disk.hold()?;
        let mut layers = Layers { disk: &self.disk, seen: BTreeMap::new() };
        let (images, images_bytes) = self.image_usage(&mut layers)?;
        let (snapshots, snapshots_bytes) = self.snapshot_usage(&mut layers)?;
        let sandboxes = self.sandbox_usage()?;
        let volumes = self.volumes()?.into_iter();
        let volumes =
            volumes.map(|volume| Used { name: volume.name, bytes: volume.size_bytes }).collect();
        let mut trash_bytes =
            trash_usage(&self.disk.trash())? + trash_usage(&self.disk.cache_trash())?;
        if self.disk.host_trash() != self.disk.trash() {
            trash_bytes += trash_usage(&self.disk.host_trash())?;
        }
        let unused = self.disk.find_unused()?;
        let reclaimable = unused.iter().map(|layer| layers.bytes(layer)).sum::<u64>();
        Ok(Usage {
            driver: self.disk.store(),
            images,
            images_bytes,
            snapshots,
            snapshots_bytes,
            sandboxes,
            volumes,
            trash_bytes,
            reclaimable_bytes: reclaimable + trash_bytes,
            store_file: self
                .store
                .file_size()?
                .map(|(bytes, free_bytes)| StoreFile { bytes, free_bytes }),
            home_disk: disk_room(self.disk.home())?,
            cache_disk: disk_room(self.disk.cache())?,
        })
    }

    fn image_usage(
        &self,
        layers: &mut Layers<'_>,
    ) -> Result<(Vec<Used<String>>, u64), EngineError> {
        let (mut images, mut all) = (Vec::new(), BTreeSet::new());
        for image in self.disk.image_list()? {
            let bytes = image.layers.iter().map(|layer| layers.bytes(layer)).sum();
            all.extend(image.layers);
            images.push(Used { name: image.name, bytes });
        }
        Ok((images, all.iter().map(|layer| layers.bytes(layer)).sum()))
    }

    fn snapshot_usage(
        &self,
        layers: &mut Layers<'_>,
    ) -> Result<(Vec<Used<SnapshotId>>, u64), EngineError> {
        let (mut snapshots, mut all) = (Vec::new(), BTreeSet::new());
        for snapshot in self.disk.snapshot_list()? {
            let own = snapshot
                .layers
                .last()
                .filter(|layer| self.disk.layers().join(layer.as_str()).exists());
            let bytes =
                snapshot.bytes.or_else(|| own.map(|layer| layers.bytes(layer))).unwrap_or(0);
            all.extend(own.cloned().map(|layer| (layer, bytes)));
            snapshots.push(Used { name: snapshot.id, bytes });
        }
        Ok((snapshots, all.iter().map(|(_, bytes)| bytes).sum()))
    }

    /// Every snapshot of this home with the layers of this home it consists of and what each takes. What an
    /// image brought along is not counted.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn snapshots_weighed(&self) -> Result<Vec<Weighed>, EngineError> {
        self.store.wake()?;
        let _hold = self.disk.hold()?;
        let mut layers = Layers { disk: &self.disk, seen: BTreeMap::new() };
        let snapshots = self.disk.snapshot_list()?;
        for snapshot in &snapshots {
            // What was counted when it was taken needs no measuring.
            if let (Some(own), Some(bytes)) = (snapshot.layers.last(), snapshot.bytes) {
                layers.seen.entry(own.clone()).or_insert(bytes);
            }
        }
        let ours = |layer: &&LayerId| self.disk.layers().join(layer.as_str()).exists();
        let mut weighed = Vec::new();
        for snapshot in snapshots {
            let stack = snapshot.layers.iter().filter(ours);
            let stack = stack.map(|layer| (layer.clone(), layers.bytes(layer))).collect();
            weighed.push(Weighed { snapshot, layers: stack });
        }
        Ok(weighed)
    }

    fn sandbox_usage(&self) -> Result<Vec<SandboxUsed>, EngineError> {
        let mut used = Vec::new();
        for id in self.list()? {
            let running = matches!(self.find(&id)?, SandboxState::Running(_));
            let bytes = if self.disk.store().is_btrfs() {
                self.disk.taken(&self.home.writable(&id)).map_or(0, |taken| taken.referenced)
            } else {
                // A tree that changes or ends while it is looked at is counted as far as that went.
                disk_usage(&self.home.writable(&id).join("upper")).unwrap_or(0)
            };
            used.push(SandboxUsed { id, running, bytes });
        }
        Ok(used)
    }
}

impl Disk {
    /// Has what was deleted come free soon: left alone, btrfs gets to it within half a minute.
    pub(crate) fn settle(&self) -> Result<(), EngineError> {
        if !self.store().is_btrfs() {
            return Ok(());
        }
        let root = self.root();
        File::open(&root)
            .and_then(|root| btrfs::sync(&root))
            .map_err(|e| disk::disk_error("sync", root, e))
    }

    /// What a subvolume takes, where the store counts.
    pub(crate) fn taken(&self, subvolume: &Path) -> Option<Taken> {
        let open = File::open(subvolume).ok()?;
        let number = btrfs::number(&open).ok()?;
        btrfs::taken(&open).ok()?.get(&number).copied()
    }
}

/// Sizes of layers, each measured once ever.
struct Layers<'a> {
    disk: &'a Disk,
    seen: BTreeMap<LayerId, u64>,
}

impl Layers<'_> {
    // A layer that cannot be measured counts nothing: it is no reason to tell nothing of the others.
    fn bytes(&mut self, layer: &LayerId) -> u64 {
        if let Some(bytes) = self.seen.get(layer) {
            return *bytes;
        }
        let bytes = self.known(layer).or_else(|| self.measure(layer)).unwrap_or(0);
        self.seen.insert(layer.clone(), bytes);
        bytes
    }

    fn known(&self, layer: &LayerId) -> Option<u64> {
        let name = format!("{layer}.json");
        disk::read_record(&self.disk.sizes().join(name)).ok()?
    }

    fn measure(&self, layer: &LayerId) -> Option<u64> {
        let bytes = disk_usage(&self.disk.layer_path(layer).ok()?).ok()?;
        // Kept where it can be; measured again where it cannot.
        let _ = make_private(&self.disk.sizes()).and_then(|()| {
            disk::write_record(&self.disk.sizes().join(format!("{layer}.json")), &bytes)
        });
        Some(bytes)
    }
}

fn trash_usage(trash: &Path) -> Result<u64, EngineError> {
    let names = disk::names_in(trash)?;
    Ok(names.iter().map(|name| disk_usage(&trash.join(name)).unwrap_or(0)).sum())
}

fn disk_room(path: &Path) -> Result<DiskRoom, EngineError> {
    let (free_bytes, total_bytes) = free_of_total(path)?;
    Ok(DiskRoom { total_bytes, free_bytes })
}
