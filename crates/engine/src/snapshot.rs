//! Snapshots: a sandbox's disk kept as a stack of layers. Ending with a snapshot renames the writable
//! layer; a live capture freezes, copies what has changed and thaws. Does not start anything from them.
//!
//! Every step here may be the last before kill -9. What is written first is what a retry needs:
//!
//! ```text
//! end_kept:  ending.json → rename upper into layers/ → snapshot record → sandbox removed
//! capture:   partial/ filled → rename into layers/ → index, captures.json → snapshot record
//! on btrfs:  subvolume snapshot into layers/ → captures.json → snapshot record
//! ```

mod capture;
pub(crate) mod delta;
pub(crate) mod index;

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::SystemTime,
};

use harvest_proto::{SandboxId, SnapshotId, Timestamp};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::{
    EngineError,
    disk::{self, Disk, disk_error},
    home::{UNFINISHED, boot_id},
    layer::layer_of,
    spec::{ImageConfig, LayerId},
    trash, writable,
};

/// A sandbox's disk, kept.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// Its id.
    pub id: SnapshotId,
    /// What it consists of, bottom first.
    pub layers: Vec<LayerId>,
    /// What commands get.
    pub config: ImageConfig,
    /// When it was captured.
    pub created_at: Timestamp,
    /// Whether it survives a power cut; it survives the end of every process at once.
    pub durable: bool,
    /// The sandbox it was taken of.
    #[serde(default)]
    pub sandbox: Option<SandboxId>,
    /// The snapshot that sandbox began as, if it did.
    #[serde(default)]
    pub parent: Option<SnapshotId>,
    /// How many of the layers its sandbox began with; not known of old ones.
    #[serde(default)]
    pub stands_on: Option<usize>,
    /// What it added on the disk to what it stands on, where that is known without looking.
    #[serde(default)]
    pub bytes: Option<u64>,
    /// Whether it is of a sandbox of the server's sessions, which would miss it.
    #[serde(default = "known_to_sessions")]
    pub of_sessions: bool,
}

// Before it was written down, only sessions took snapshots.
fn known_to_sessions() -> bool {
    true
}

impl Snapshot {
    /// A snapshot taken now, of which no more is known.
    pub(crate) fn of(id: SnapshotId, layers: Vec<LayerId>, config: ImageConfig) -> Self {
        let created_at = Timestamp::from(SystemTime::now());
        let (sandbox, parent, stands_on, bytes) = (None, None, None, None);
        let (durable, of_sessions) = (false, true);
        Self {
            id,
            layers,
            config,
            created_at,
            durable,
            sandbox,
            parent,
            stands_on,
            bytes,
            of_sessions,
        }
    }
}

/// What a live capture came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    /// The snapshot.
    pub snapshot: Snapshot,
    /// How long the sandbox's work stood still.
    pub frozen_millis: u64,
    /// Files, folders and removals copied.
    pub names: u64,
    /// Bytes of content copied.
    pub bytes: u64,
}

/// A snapshot's record.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    #[serde(flatten)]
    snapshot: Snapshot,
    /// Which run of the kernel it was captured in. What was not on the disk when that run ended may be
    /// torn for ever, so a later sync proves nothing.
    boot: String,
}

/// A sandbox's disk as its record describes it.
#[derive(Debug, Clone)]
pub(crate) struct SandboxDisk {
    /// Its id.
    pub(crate) id: SandboxId,
    /// What it started from.
    pub(crate) layers: Vec<LayerId>,
    /// What commands get.
    pub(crate) config: ImageConfig,
    /// The snapshot it began as.
    pub(crate) parent: Option<SnapshotId>,
    /// What it may write, where the store sees to that.
    pub(crate) limit: Option<u64>,
    /// Whether it is a session's.
    pub(crate) of_sessions: bool,
}

impl SandboxDisk {
    /// A snapshot of it with these layers on top of what it started from.
    fn snapshot(&self, id: &SnapshotId, top: impl IntoIterator<Item = LayerId>) -> Snapshot {
        let layers = self.layers.iter().cloned().chain(top).collect();
        let snapshot = Snapshot::of(id.clone(), layers, self.config.clone());
        let (sandbox, parent) = (Some(self.id.clone()), self.parent.clone());
        let stands_on = Some(self.layers.len());
        Snapshot { sandbox, parent, stands_on, of_sessions: self.of_sessions, ..snapshot }
    }
}

/// What live captures of a sandbox have left so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Captures {
    /// The copies, oldest first: on top of the sandbox's own layers they show the last capture.
    /// None on btrfs, where no capture stands on an earlier one.
    pub(crate) chain: Vec<LayerId>,
    /// The index of the last capture: a file beside this one.
    index: String,
    /// What the disk took at the last capture, on btrfs.
    #[serde(default)]
    taken: u64,
}

/// Where the writable layer of a sandbox that is being ended goes, or has gone.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub(crate) layer: LayerId,
}

/// How a sandbox's work is made to stand still. `freeze` also renews.
pub(crate) struct Still<'a> {
    /// Whether there is work that could go on meanwhile.
    pub(crate) runs: bool,
    pub(crate) freeze: &'a dyn Fn() -> Result<(), EngineError>,
    pub(crate) thaw: &'a dyn Fn() -> Result<(), EngineError>,
}

impl Disk {
    /// A sandbox's folder.
    pub(crate) fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.part())
    }

    fn snapshot_path(&self, id: &SnapshotId) -> PathBuf {
        self.snapshots().join(format!("{}.json", id.part()))
    }

    /// A snapshot, if there is one of this id.
    pub(crate) fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>, EngineError> {
        let record: Option<Record> = disk::read_record(&self.snapshot_path(id))?;
        Ok(record.map(|record| record.snapshot))
    }

    /// Every snapshot of this home.
    pub(crate) fn snapshot_list(&self) -> Result<Vec<Snapshot>, EngineError> {
        let mut found = Vec::new();
        for name in disk::record_names(&self.snapshots())? {
            // Gone between listing and reading: removed by somebody else.
            let record: Option<Record> =
                disk::read_record(&self.snapshots().join(format!("{name}.json")))?;
            found.extend(record.map(|record| record.snapshot));
        }
        Ok(found)
    }

    /// Forgets a snapshot. Its layers go with the next collection, if nothing else uses them.
    pub(crate) fn snapshot_remove(&self, id: &SnapshotId) -> Result<(), EngineError> {
        let _records = self.lock_records()?;
        disk::remove_file(&self.snapshot_path(id))
    }

    /// Removes what was left by writers of records that were killed. The home is held alone, so nobody writes
    /// a new snapshot; whoever rewrites one has the records locked.
    pub(crate) fn snapshots_tidy(&self) -> Result<(), EngineError> {
        let _records = self.lock_records()?;
        let names = disk::names_in(&self.snapshots())?;
        for name in names.iter().filter(|name| name.ends_with(UNFINISHED)) {
            disk::remove_file(&self.snapshots().join(name))?;
        }
        Ok(())
    }

    // Two may want to rewrite a record: whoever removes it and whoever marks it durable.
    fn lock_records(&self) -> Result<fs::File, EngineError> {
        disk::lock(&self.home().join("records.lock"), FlockOperation::LockExclusive)
    }

    pub(crate) fn snapshot_write(&self, snapshot: Snapshot) -> Result<Snapshot, EngineError> {
        let record = Record { snapshot, boot: boot_id().to_owned() };
        self.record_write(&self.snapshot_path(&record.snapshot.id), &record)?;
        Ok(record.snapshot)
    }

    /// Brings every snapshot captured so far to the disk and marks it durable.
    pub(crate) fn snapshots_sync(&self) -> Result<(), EngineError> {
        let boot = boot_id();
        let waiting: Vec<_> =
            self.snapshot_list()?.into_iter().filter(|snapshot| !snapshot.durable).collect();
        if waiting.is_empty() {
            return Ok(());
        }
        let layers = self.layers();
        fs::File::open(&layers)
            .and_then(|folder| rustix::fs::syncfs(&folder).map_err(Into::into))
            .map_err(|e| disk_error("sync", &layers, e))?;
        let _records = self.lock_records()?;
        for snapshot in waiting {
            let path = self.snapshot_path(&snapshot.id);
            if let Some(mut record) =
                disk::read_record::<Record>(&path)?.filter(|record| record.boot == boot)
            {
                record.snapshot.durable = true;
                self.record_write(&path, &record)?;
            }
        }
        Ok(())
    }

    /// What live captures of a sandbox have left.
    pub(crate) fn captures(&self, id: &SandboxId) -> Result<Captures, EngineError> {
        Ok(disk::read_record(&self.sandbox(id).join("captures.json"))?.unwrap_or_default())
    }

    /// Where the writable layer of a sandbox is going, once its end has begun.
    pub(crate) fn ending(&self, id: &SandboxId) -> Result<Option<Ending>, EngineError> {
        disk::read_record(&self.sandbox(id).join("ending.json"))
    }

    /// The layer that is to hold what a snapshot of this sandbox adds. An earlier attempt under the same
    /// id may have got as far as `captures.json`: later captures stand on what it left, so it stays.
    fn layer_for(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<LayerId, EngineError> {
        let layer = layer_of(snapshot);
        let taken = self.captures(id)?.chain.contains(&layer);
        Ok(if taken { layer_of(&SnapshotId::random()) } else { layer })
    }

    // One capture or end of a sandbox at a time.
    pub(crate) fn lock_sandbox(&self, id: &SandboxId) -> Result<fs::File, EngineError> {
        disk::lock_folder(&self.sandbox(id))
    }

    /// Turns the disk of a sandbox that is dead into a snapshot. `sandbox` is `None` when there is no
    /// record of it; `remove` takes what is left of it away.
    pub(crate) fn end_kept(
        &self,
        id: &SandboxId,
        sandbox: Option<&SandboxDisk>,
        snapshot: &SnapshotId,
        remove: &dyn Fn() -> Result<(), EngineError>,
    ) -> Result<Snapshot, EngineError> {
        let Some(sandbox) = sandbox else {
            // A retry after the last step, or a stranger.
            return self
                .snapshot(snapshot)?
                .ok_or_else(|| EngineError::NotRunning { sandbox: id.clone() });
        };
        let kept = self.keep_upper(sandbox, snapshot)?;
        remove()?;
        Ok(kept)
    }

    fn keep_upper(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
    ) -> Result<Snapshot, EngineError> {
        let _turn = self.lock_sandbox(&sandbox.id)?;
        let _hold = self.hold()?;
        let ending = self.ending(&sandbox.id)?;
        if let Some(kept) = self.snapshot(snapshot)? {
            // Without an end that has begun, this id names an earlier capture, and ending the sandbox
            // under it would throw away everything since.
            return match ending {
                Some(_) => Ok(kept),
                None => Err(EngineError::SnapshotTaken { snapshot: snapshot.clone() }),
            };
        }
        let folder = self.sandbox(&sandbox.id);
        // An end that began under another id has moved the disk to where that id says.
        let ending = if let Some(ending) = ending {
            ending
        } else {
            let ending = Ending { layer: self.layer_for(&sandbox.id, snapshot)? };
            self.record_write(&folder.join("ending.json"), &ending)?;
            ending
        };
        let bytes = self.grown_since(&sandbox.id)?;
        self.move_upper(&writable::kept(&folder, self.store()), &ending.layer)?;
        self.snapshot_write(Snapshot { bytes, ..sandbox.snapshot(snapshot, [ending.layer]) })
    }

    fn move_upper(&self, upper: &Path, layer: &LayerId) -> Result<(), EngineError> {
        let target = self.layers().join(layer.as_str());
        match (upper.is_dir(), target.is_dir()) {
            (true, there) => {
                if there {
                    // Left by a live capture under this id that never got its record.
                    trash::throw_away(&target, &self.trash())?;
                }
                fs::rename(upper, &target).map_err(|e| disk_error("keep", upper, e))
            }
            (false, true) => Ok(()),
            (false, false) => Err(disk_error("find", upper, ErrorKind::NotFound)),
        }
    }
}

fn now_nanos() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
