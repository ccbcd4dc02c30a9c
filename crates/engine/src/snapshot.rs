//! Snapshots: a sandbox's disk kept as a stack of layers. Ending with a snapshot renames the writable
//! layer; a live capture freezes, copies what has changed and thaws. Does not start anything from them.
//!
//! Every step here may be the last before kill -9. What is written first is what a retry needs:
//!
//! ```text
//! end_kept:  ending.json → rename upper into layers/ → snapshot record → sandbox removed
//! capture:   partial/ filled → rename into layers/ → index, captures.json → snapshot record
//! ```

pub(crate) mod delta;
pub(crate) mod index;

use std::{
    cell::Cell,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime},
};

use harvest_proto::{SandboxId, SnapshotId, Timestamp};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::{
    EngineError,
    disk::{self, Disk, disk_error},
    home::{boot_id, make_private},
    layer::layer_of,
    spec::{ImageConfig, LayerId},
    trash,
};
use delta::Copied;
use index::Index;

// A freeze nobody renews is lifted after 5 s; this leaves room for a slow disk between two renewals.
const RENEW_AFTER: Duration = Duration::from_secs(1);

// Each delta is one more place to look for every name that is not there. Measured with overlay's own
// limit (500) far away, the sum starts to show near 16.
const LONGEST_CHAIN: usize = 16;

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
    /// Whether it is of a sandbox of the server's sessions, which would miss it.
    #[serde(default = "known_to_sessions")]
    pub of_sessions: bool,
}

// Before it was written down, only sessions took snapshots.
fn known_to_sessions() -> bool {
    true
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
    /// Whether it is a session's.
    pub(crate) of_sessions: bool,
}

/// What live captures of a sandbox have left so far.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Captures {
    /// The copies, oldest first: on top of the sandbox's own layers they show the last capture.
    pub(crate) chain: Vec<LayerId>,
    /// The index of the last capture: a file beside this one.
    index: String,
}

/// Where the writable layer of a sandbox that is being ended goes, or has gone.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ending {
    pub(crate) layer: LayerId,
}

/// How a sandbox's work is made to stand still. `freeze` also renews.
pub(crate) struct Still<'a> {
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
            let record: Option<Record> = disk::read_record(&self.snapshots().join(format!("{name}.json")))?;
            found.extend(record.map(|record| record.snapshot));
        }
        Ok(found)
    }

    /// Forgets a snapshot. Its layers go with the next collection, if nothing else uses them.
    pub(crate) fn snapshot_remove(&self, id: &SnapshotId) -> Result<(), EngineError> {
        let _records = self.lock_records()?;
        disk::remove_file(&self.snapshot_path(id))
    }

    // Two may want to rewrite a record: whoever removes it and whoever marks it durable.
    fn lock_records(&self) -> Result<fs::File, EngineError> {
        disk::lock(&self.home().join("records.lock"), FlockOperation::LockExclusive)
    }

    pub(crate) fn snapshot_write(
        &self,
        id: &SnapshotId,
        layers: Vec<LayerId>,
        config: ImageConfig,
        of_sessions: bool,
    ) -> Result<Snapshot, EngineError> {
        let created_at = Timestamp::from(SystemTime::now());
        let snapshot = Snapshot { id: id.clone(), layers, config, created_at, durable: false, of_sessions };
        let record = Record { snapshot, boot: boot_id().to_owned() };
        disk::write_record(&self.snapshot_path(id), &record)?;
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
            if let Some(mut record) = disk::read_record::<Record>(&path)?.filter(|record| record.boot == boot)
            {
                record.snapshot.durable = true;
                disk::write_record(&path, &record)?;
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

    // One capture or end of a sandbox at a time.
    pub(crate) fn lock_sandbox(&self, id: &SandboxId) -> Result<fs::File, EngineError> {
        disk::lock(&self.sandbox(id).join("capture.lock"), FlockOperation::LockExclusive)
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
            return self.snapshot(snapshot)?.ok_or_else(|| EngineError::NotRunning { sandbox: id.clone() });
        };
        let kept = self.keep_upper(sandbox, snapshot)?;
        remove()?;
        Ok(kept)
    }

    fn keep_upper(&self, sandbox: &SandboxDisk, snapshot: &SnapshotId) -> Result<Snapshot, EngineError> {
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
            let ending = Ending { layer: layer_of(snapshot) };
            disk::write_record(&folder.join("ending.json"), &ending)?;
            ending
        };
        self.move_upper(&folder.join("upper"), &ending.layer)?;
        let layers = sandbox.layers.iter().cloned().chain([ending.layer]).collect();
        self.snapshot_write(snapshot, layers, sandbox.config.clone(), sandbox.of_sessions)
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

    /// Captures the disk of a sandbox that may go on running.
    pub(crate) fn capture(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
        still: &Still<'_>,
    ) -> Result<Captured, EngineError> {
        let _turn = self.lock_sandbox(&sandbox.id)?;
        if let Some(snapshot) = self.snapshot(snapshot)? {
            return Ok(Captured { snapshot, frozen_millis: 0, names: 0, bytes: 0 });
        }
        if self.ending(&sandbox.id)?.is_some() {
            return Err(EngineError::NotRunning { sandbox: sandbox.id.clone() });
        }
        let _hold = self.hold()?;
        let layer = layer_of(snapshot);
        let partial = self.partial().join(layer.as_str());
        let captured = self.capture_into(sandbox, snapshot, &layer, &partial, still);
        if captured.is_err() && partial.exists() {
            // The disk may be full, so the error worth telling is the first one.
            let _ = trash::throw_away(&partial, &self.trash());
        }
        captured
    }

    fn capture_into(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
        layer: &LayerId,
        partial: &Path,
        still: &Still<'_>,
    ) -> Result<Captured, EngineError> {
        let folder = self.sandbox(&sandbox.id);
        let (mut captures, previous) = self.last_capture(&sandbox.id)?;
        self.clear(partial)?;
        make_private(partial)?;
        let (index, copied, frozen) = copy_still(&folder.join("upper"), partial, &previous, still)?;
        if copied.names > 0 {
            let target = self.layers().join(layer.as_str());
            self.clear(&target)?;
            fs::rename(partial, &target).map_err(|e| disk_error("keep", partial, e))?;
            captures.chain.push(layer.clone());
            self.write_captures(&folder, captures.chain.clone(), layer, &index)?;
        } else {
            trash::throw_away(partial, &self.trash())?;
        }
        let layers = sandbox.layers.iter().cloned().chain(captures.chain).collect();
        let snapshot = self.snapshot_write(snapshot, layers, sandbox.config.clone(), sandbox.of_sessions)?;
        let frozen_millis = u64::try_from(frozen.as_millis()).unwrap_or(u64::MAX);
        Ok(Captured { snapshot, frozen_millis, names: copied.names, bytes: copied.bytes })
    }

    // Whatever lies where a layer is to be written was left by a crash.
    fn clear(&self, path: &Path) -> Result<(), EngineError> {
        if path.exists() { trash::throw_away(path, &self.trash()) } else { Ok(()) }
    }

    // Without a readable index everything is copied again, and then no earlier copy is needed: a whole
    // copy has no whiteouts for what only they hold.
    fn last_capture(&self, id: &SandboxId) -> Result<(Captures, Index), EngineError> {
        let captures = self.captures(id)?;
        let bytes = fs::read(self.sandbox(id).join(&captures.index)).unwrap_or_default();
        match Index::decode(&bytes) {
            Some(index) if captures.chain.len() < LONGEST_CHAIN => Ok((captures, index)),
            _ => Ok((Captures::default(), Index::default())),
        }
    }

    fn write_captures(
        &self,
        folder: &Path,
        chain: Vec<LayerId>,
        layer: &LayerId,
        index: &Index,
    ) -> Result<(), EngineError> {
        let name = format!("index-{layer}");
        // Not synced: it is of use only to this run of the kernel.
        fs::write(folder.join(&name), index.encode())
            .map_err(|e| disk_error("write", folder.join(&name), e))?;
        disk::write_record(&folder.join("captures.json"), &Captures { chain, index: name.clone() })?;
        for other in disk::names_in(folder)? {
            if other.starts_with("index-") && other != name {
                disk::remove_file(&folder.join(other))?;
            }
        }
        Ok(())
    }
}

fn copy_still(
    upper: &Path,
    partial: &Path,
    previous: &Index,
    still: &Still<'_>,
) -> Result<(Index, Copied, Duration), EngineError> {
    (still.freeze)()?;
    let frozen = Instant::now();
    let thawed = Thaw { still, done: Cell::new(false) };
    let mut renewed = Instant::now();
    let mut pulse = || {
        if renewed.elapsed() >= RENEW_AFTER {
            renewed = Instant::now();
            (still.freeze)()?;
        }
        Ok(())
    };
    let (index, copied) = delta::copy_delta(upper, partial, previous, now_nanos(), &mut pulse)?;
    thawed.thaw()?;
    Ok((index, copied, frozen.elapsed()))
}

/// Thaws however the copying ends.
struct Thaw<'a> {
    still: &'a Still<'a>,
    done: Cell<bool>,
}

impl Thaw<'_> {
    fn thaw(&self) -> Result<(), EngineError> {
        self.done.set(true);
        (self.still.thaw)()
    }
}

impl Drop for Thaw<'_> {
    fn drop(&mut self) {
        if !self.done.get() {
            // The error on its way already says what went wrong; the zygote thaws in the worst case.
            let _ = (self.still.thaw)();
        }
    }
}

fn now_nanos() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests;
