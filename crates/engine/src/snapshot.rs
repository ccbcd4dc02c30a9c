//! Snapshots: a sandbox's disk saved as a stack of layers. Saving a stopped sandbox renames its
//! writable layer; capturing a running one freezes it, copies what changed and thaws it. This
//! module starts no sandboxes.
//!
//! The process may be killed after any step, so each step writes what a retry needs:
//!
//! ```text
//! stop_and_save: pending-save.json → rename upper into layers/ → snapshot record → sandbox removed
//! capture:       partial/ filled → rename into layers/ → index, captures.json → snapshot record
//! on btrfs:      subvolume snapshot into layers/ → captures.json → snapshot record
//! ```

mod capture;
pub(crate) mod delta;
pub(crate) mod index;
mod operations;

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::SystemTime,
};

use harvest_proto::{SandboxId, SnapshotId, Timestamp};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::{
    EngineError,
    disk::Disk,
    error::AtPath,
    file_lock,
    layer::layer_of,
    process::boot_id,
    records,
    records::UNFINISHED_SUFFIX,
    spec::{ImageConfig, LayerId},
    trash, writable,
};

/// A saved disk of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The snapshot's id.
    pub id: SnapshotId,
    /// The layers, bottom first.
    pub layers: Vec<LayerId>,
    /// Environment, user and working directory of commands.
    pub config: ImageConfig,
    /// When the disk was captured.
    pub created_at: Timestamp,
    /// Whether the snapshot survives a power cut. It survives process crashes from the start.
    pub durable: bool,
    /// The sandbox whose disk this is.
    pub sandbox: SandboxId,
    /// The snapshot that sandbox was started from, if any.
    pub parent: Option<SnapshotId>,
    /// How many of the layers, from the bottom, the sandbox was started with.
    pub base_layers: usize,
    /// Bytes that this snapshot added on the disk, where that is known without measuring.
    pub bytes: Option<u64>,
    /// Whether a session of the server owns this snapshot and refers to it.
    pub of_sessions: bool,
}

#[cfg(test)]
impl Snapshot {
    /// A new snapshot of some sandbox.
    pub(crate) fn of(id: SnapshotId, layers: Vec<LayerId>, config: ImageConfig) -> Self {
        let sandbox = SandboxDisk {
            id: SandboxId::random(),
            layers,
            config,
            parent: None,
            limit: None,
            of_sessions: true,
            boot: boot_id().to_owned(),
        };
        sandbox.snapshot(&id, [])
    }
}

/// The result of capturing a sandbox that may be running.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// How long the sandbox was frozen.
    pub frozen_millis: u64,
    /// Files, folders and whiteouts copied.
    pub names: u64,
    /// Bytes of content copied.
    pub bytes: u64,
}

/// A snapshot's record on the disk.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SnapshotRecord {
    #[serde(flatten)]
    pub(crate) snapshot: Snapshot,
    /// The kernel boot of the capture. Data not synced before that boot ended may be lost, so a
    /// sync during a later boot does not make the snapshot durable.
    pub(crate) boot: String,
}

/// The records of snapshots as they were read, and the layers that they refer to.
#[derive(Debug, Default)]
pub(crate) struct KnownSnapshots {
    /// By file name.
    records: HashMap<String, RecordState>,
    /// The folder before its records were read; `None` if it had just changed.
    folder: Option<RecordState>,
    /// Also those of a snapshot that was removed since.
    pub(crate) layers: BTreeSet<LayerId>,
}

/// What a record says about layers; the rest takes longer to parse.
#[derive(Deserialize)]
struct LayersOfRecord {
    layers: Vec<LayerId>,
}

/// Tells versions of a record, or of a folder, apart: each version of a record is a new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RecordState {
    inode: u64,
    changed: (i64, i64),
}

impl RecordState {
    /// `None` when there is no such file.
    fn of(path: &Path) -> Option<Self> {
        let stat = path.symlink_metadata().ok()?;
        Some(Self { inode: stat.ino(), changed: (stat.ctime(), stat.ctime_nsec()) })
    }

    /// Whether a change from now on gets another time. The kernel's clock for files has ticks of up
    /// to 10 ms.
    fn is_settled(self) -> bool {
        let now = Timestamp::from(SystemTime::now()).as_millis() / 1000;
        self.changed.0 < now - 1
    }
}

/// A sandbox's disk, from the sandbox's record.
#[derive(Debug, Clone)]
pub(crate) struct SandboxDisk {
    pub(crate) id: SandboxId,
    /// The layers the sandbox was started from.
    pub(crate) layers: Vec<LayerId>,
    pub(crate) config: ImageConfig,
    /// The snapshot the sandbox was started from.
    pub(crate) parent: Option<SnapshotId>,
    /// The limit of the writable layer in bytes, where the store's quotas enforce one.
    pub(crate) limit: Option<u64>,
    /// Whether a session of the server owns the sandbox.
    pub(crate) of_sessions: bool,
    /// The kernel boot of the sandbox's last start.
    pub(crate) boot: String,
}

/// Whether a snapshot survives a power cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// It does.
    Durable,
    /// As soon as it is synced.
    Pending,
    /// The machine restarted before it was synced: the last writes in it may be missing.
    Torn,
}

impl SandboxDisk {
    /// A snapshot with these layers on top of those the sandbox was started from.
    fn snapshot(&self, id: &SnapshotId, top: impl IntoIterator<Item = LayerId>) -> Snapshot {
        Snapshot {
            id: id.clone(),
            layers: self.layers.iter().cloned().chain(top).collect(),
            config: self.config.clone(),
            created_at: Timestamp::from(SystemTime::now()),
            durable: false,
            sandbox: self.id.clone(),
            parent: self.parent.clone(),
            base_layers: self.layers.len(),
            bytes: None,
            of_sessions: self.of_sessions,
        }
    }
}

/// The state that a sandbox's next capture builds on.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Captures {
    /// The layers of earlier captures, oldest first. On top of the sandbox's base layers they show
    /// the last capture. Empty on btrfs, where every capture is independent.
    pub(crate) chain: Vec<LayerId>,
    /// The file name of the last capture's index, in the sandbox's folder.
    index: String,
    /// The disk's usage at the last capture, on btrfs.
    referenced_bytes: u64,
}

/// The record of a save in progress: the layer that the sandbox's writable layer becomes.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct PendingSave {
    pub(crate) layer: LayerId,
}

/// Freezes and thaws a sandbox during a capture. `freeze` also renews a freeze.
pub(crate) struct FreezeControl<'a> {
    /// Whether the sandbox has processes that could write during the capture.
    pub(crate) is_running: bool,
    pub(crate) freeze: &'a dyn Fn() -> Result<(), EngineError>,
    pub(crate) thaw: &'a dyn Fn() -> Result<(), EngineError>,
}

impl Disk {
    fn snapshot_path(&self, id: &SnapshotId) -> PathBuf {
        self.home.snapshots().join(format!("{}.json", id.part()))
    }

    /// The snapshot with this id, if it exists.
    pub(crate) fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>, EngineError> {
        let record: Option<SnapshotRecord> = records::read_record(&self.snapshot_path(id))?;
        Ok(record.map(|record| record.snapshot))
    }

    /// The ids of all snapshots of this home. Reads no record.
    pub(crate) fn snapshot_ids(&self) -> Result<Vec<SnapshotId>, EngineError> {
        let names = records::names_in(&self.home.snapshots())?;
        let parts = names.iter().filter_map(|name| name.strip_suffix(".json"));
        Ok(parts.filter_map(|part| format!("snp_{part}").parse().ok()).collect())
    }

    /// Every snapshot of this home.
    pub(crate) fn snapshot_list(&self) -> Result<Vec<Snapshot>, EngineError> {
        let records = records::read_records::<SnapshotRecord>(&self.home.snapshots())?;
        Ok(records.into_iter().map(|(_, record)| record.snapshot).collect())
    }

    /// Adds the layers of every snapshot. Reads only the records that `known` does not have as they
    /// are, and none when the folder did not change.
    pub(crate) fn add_snapshots(&self, known: &mut KnownSnapshots) -> Result<(), EngineError> {
        let folder = self.home.snapshots();
        let state = RecordState::of(&folder);
        if state.is_some() && known.folder == state {
            return Ok(());
        }
        known.folder = state.filter(|state| state.is_settled());
        for name in records::names_in(&folder)? {
            let path = folder.join(&name);
            let Some(state) = RecordState::of(&path).filter(|_| name.ends_with(".json")) else {
                continue;
            };
            if known.records.get(&name) == Some(&state) {
                continue;
            }
            if let Some(read) = records::read_record::<LayersOfRecord>(&path)? {
                known.layers.extend(read.layers);
                known.records.insert(name, state);
            }
        }
        Ok(())
    }

    /// Removes a snapshot's record. Garbage collection removes its layers once nothing refers to
    /// them.
    pub(crate) fn snapshot_remove(&self, id: &SnapshotId) -> Result<(), EngineError> {
        let _record_lock = self.lock_records()?;
        records::remove_file(&self.snapshot_path(id))?;
        records::remove_file(&self.unsynced_path(id))
    }

    /// Removes unfinished records of killed writers. The caller holds the garbage collection lock
    /// of the home, so no snapshot is being written; rewriting a record takes the record lock.
    pub(crate) fn remove_unfinished_records(&self) -> Result<(), EngineError> {
        let _record_lock = self.lock_records()?;
        let names = records::names_in(&self.home.snapshots())?;
        for name in names.iter().filter(|name| name.ends_with(UNFINISHED_SUFFIX)) {
            records::remove_file(&self.home.snapshots().join(name))?;
        }
        for id in self.unsynced()? {
            if self.snapshot(&id)?.is_none() {
                records::remove_file(&self.unsynced_path(&id))?;
            }
        }
        Ok(())
    }

    // Serializes removing a record and marking it durable.
    fn lock_records(&self) -> Result<fs::File, EngineError> {
        file_lock::lock(&self.home.path().join("records.lock"), FlockOperation::LockExclusive)
    }

    pub(crate) fn snapshot_write(&self, snapshot: Snapshot) -> Result<Snapshot, EngineError> {
        self.snapshot_write_of(snapshot, boot_id())
    }

    /// Writes the record of a snapshot whose content was written during `boot`.
    fn snapshot_write_of(&self, snapshot: Snapshot, boot: &str) -> Result<Snapshot, EngineError> {
        if !snapshot.durable {
            // Before the record: a sync must find every snapshot without reading all of them.
            records::create_private_dir(&self.home.unsynced())?;
            let path = self.unsynced_path(&snapshot.id);
            fs::File::create(&path).at("write", &path)?;
        }
        let record = SnapshotRecord { snapshot, boot: boot.to_owned() };
        self.record_write(&self.snapshot_path(&record.snapshot.id), &record)?;
        Ok(record.snapshot)
    }

    fn unsynced_path(&self, id: &SnapshotId) -> PathBuf {
        self.home.unsynced().join(id.part())
    }

    fn unsynced(&self) -> Result<Vec<SnapshotId>, EngineError> {
        let names = records::names_in(&self.home.unsynced())?;
        Ok(names.iter().filter_map(|name| format!("snp_{name}").parse().ok()).collect())
    }

    /// Syncs every snapshot captured so far to the disk and marks it durable.
    pub(crate) fn snapshots_sync(&self) -> Result<(), EngineError> {
        let boot = boot_id();
        // A capture in progress has no record yet; the sync after it marks it.
        let mut unsynced = self.unsynced()?;
        unsynced.retain(|id| self.snapshot_path(id).exists());
        if unsynced.is_empty() {
            return Ok(());
        }
        let layers = self.home.layers();
        fs::File::open(&layers)
            .and_then(|folder| rustix::fs::syncfs(&folder).map_err(Into::into))
            .at("sync", &layers)?;
        let _record_lock = self.lock_records()?;
        for id in unsynced {
            let path = self.snapshot_path(&id);
            if let Some(mut record) =
                records::read_record::<SnapshotRecord>(&path)?.filter(|record| record.boot == boot)
            {
                record.snapshot.durable = true;
                self.record_write(&path, &record)?;
            }
            records::remove_file(&self.unsynced_path(&id))?;
        }
        Ok(())
    }

    pub(crate) fn durability(&self, id: &SnapshotId) -> Result<Option<Durability>, EngineError> {
        let record = records::read_record::<SnapshotRecord>(&self.snapshot_path(id))?;
        Ok(record.map(|record| match record.snapshot.durable {
            true => Durability::Durable,
            false if record.boot == boot_id() => Durability::Pending,
            false => Durability::Torn,
        }))
    }

    /// The capture state of a sandbox.
    pub(crate) fn captures(&self, id: &SandboxId) -> Result<Captures, EngineError> {
        Ok(records::read_record(&self.home.sandbox(id).join("captures.json"))?.unwrap_or_default())
    }

    /// The save in progress of a sandbox, if one was begun.
    pub(crate) fn pending_save(&self, id: &SandboxId) -> Result<Option<PendingSave>, EngineError> {
        records::read_record(&self.home.sandbox(id).join("pending-save.json"))
    }

    /// The layer for what a snapshot of this sandbox adds. An earlier attempt with the same id may
    /// have reached `captures.json`; later captures build on its layer, so that layer is not
    /// reused.
    fn layer_for(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<LayerId, EngineError> {
        let layer = layer_of(snapshot);
        let in_use = self.captures(id)?.chain.contains(&layer);
        Ok(if in_use { layer_of(&SnapshotId::random()) } else { layer })
    }

    /// Serializes captures and saves of a sandbox.
    pub(crate) fn lock_sandbox(&self, id: &SandboxId) -> Result<fs::File, EngineError> {
        file_lock::lock_folder(&self.home.sandbox(id))
    }

    /// Turns the disk of a stopped sandbox into a snapshot, then calls `remove` to remove the rest
    /// of the sandbox. `sandbox` is `None` when the sandbox has no record.
    pub(crate) fn save_stopped(
        &self,
        id: &SandboxId,
        sandbox: Option<&SandboxDisk>,
        snapshot: &SnapshotId,
        remove: &dyn Fn() -> Result<(), EngineError>,
    ) -> Result<Snapshot, EngineError> {
        let Some(sandbox) = sandbox else {
            // Either a retry after the last step, or an unknown sandbox.
            return self
                .snapshot(snapshot)?
                .ok_or_else(|| EngineError::NotRunning { sandbox: id.clone() });
        };
        let saved = self.save_upper(sandbox, snapshot)?;
        remove()?;
        Ok(saved)
    }

    fn save_upper(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
    ) -> Result<Snapshot, EngineError> {
        let _sandbox_lock = self.lock_sandbox(&sandbox.id)?;
        let _gc_lock = self.lock_against_gc()?;
        let pending = self.pending_save(&sandbox.id)?;
        if let Some(saved) = self.snapshot(snapshot)? {
            // Without a save in progress, this id names an earlier capture, and removing the
            // sandbox would lose everything written since.
            return match pending {
                Some(_) => Ok(saved),
                None => Err(EngineError::SnapshotTaken(snapshot.clone())),
            };
        }
        let folder = self.home.sandbox(&sandbox.id);
        // A save that was begun under another snapshot id may have moved the disk to its layer
        // already.
        let pending = if let Some(pending) = pending {
            pending
        } else {
            let pending = PendingSave { layer: self.layer_for(&sandbox.id, snapshot)? };
            self.record_write(&folder.join("pending-save.json"), &pending)?;
            pending
        };
        let bytes = self.growth_since_capture(&sandbox.id)?;
        self.move_upper(&writable::saved_part(&folder, self.home.store()), &pending.layer)?;
        let snapshot = Snapshot { bytes, ..sandbox.snapshot(snapshot, [pending.layer]) };
        self.snapshot_write_of(snapshot, &sandbox.boot)
    }

    fn move_upper(&self, upper: &Path, layer: &LayerId) -> Result<(), EngineError> {
        let target = self.home.layers().join(layer.as_str());
        match (upper.is_dir(), target.is_dir()) {
            (true, there) => {
                if there {
                    // Left by a capture with this id that was killed before it wrote the record.
                    trash::move_to_trash(&target, &self.home.trash())?;
                }
                fs::rename(upper, &target).at("save", upper)
            }
            (false, true) => Ok(()),
            (false, false) => Err(EngineError::file("find", upper, ErrorKind::NotFound)),
        }
    }
}

fn now_nanos() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
