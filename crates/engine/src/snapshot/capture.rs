//! Captures the disk of a running sandbox: in plain folders by copying what changed, on btrfs by a
//! subvolume snapshot. The sandbox is frozen only while its disk must not change.

use std::{
    fs,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, SnapshotId};

use super::{
    Captured, Captures, FreezeControl, SandboxDisk, Snapshot,
    delta::{CopyStats, Delta, Heartbeat, Pass, is_disk_full},
    index::Index,
    now_nanos,
};
use crate::{
    EngineError, disk::Disk, error::AtPath, records, records::create_private_dir, spec::LayerId,
    trash, tree, writable,
};

// The zygote thaws a sandbox 5 s after the last renewal; 1 s leaves time for slow disk operations.
const FREEZE_RENEWAL: Duration = Duration::from_secs(1);

// Overlayfs looks up a missing name in every layer. The cost becomes measurable near 16 layers, far
// below overlayfs's own limit of 500.
pub(super) const MAX_CHAIN: usize = 16;

// Copying this much takes no longer than a second walk over a large tree. Tests have small trees
// and must reach both paths.
const SMALL_DELTA_BYTES: u64 = if cfg!(test) { 8 << 10 } else { 16 << 20 };

impl Disk {
    /// Captures the disk of a sandbox, which keeps running. Idempotent by the snapshot's id.
    pub(crate) fn capture(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
        freezer: &FreezeControl<'_>,
    ) -> Result<Captured, EngineError> {
        let _sandbox_lock = self.lock_sandbox(&sandbox.id)?;
        if let Some(snapshot) = self.snapshot(snapshot)? {
            return Ok(Captured { snapshot, frozen_millis: 0, names: 0, bytes: 0 });
        }
        if self.pending_save(&sandbox.id)?.is_some() {
            return Err(EngineError::NotRunning { sandbox: sandbox.id.clone() });
        }
        let _gc_lock = self.lock_against_gc()?;
        let layer = self.layer_for(&sandbox.id, snapshot)?;
        if self.home.store().is_btrfs() {
            return self.capture_subvolume(sandbox, snapshot, &layer, freezer);
        }
        let partial = self.home.partial().join(layer.as_str());
        let captured = self.capture_into(sandbox, snapshot, &layer, &partial, freezer);
        if captured.is_err() && partial.exists() {
            // The disk may be full; the first error is the one to report.
            let _ = trash::move_to_trash(&partial, &self.home.trash());
        }
        captured
    }

    fn capture_into(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
        layer: &LayerId,
        partial: &Path,
        freezer: &FreezeControl<'_>,
    ) -> Result<Captured, EngineError> {
        let folder = self.home.sandbox(&sandbox.id);
        let (mut captures, previous) = self.last_capture(&sandbox.id)?;
        self.remove_leftover(partial)?;
        create_private_dir(partial)?;
        let (index, copied, frozen) =
            copy_changes(&folder.join("upper"), partial, &previous, freezer)?;
        if copied.names > 0 {
            let target = self.home.layers().join(layer.as_str());
            self.remove_leftover(&target)?;
            fs::rename(partial, &target).at("save", partial)?;
            captures.chain.push(layer.clone());
            self.write_captures(&folder, captures.chain.clone(), layer, &index)?;
        } else {
            trash::move_to_trash(partial, &self.home.trash())?;
        }
        let snapshot = sandbox.snapshot(snapshot, captures.chain);
        let CopyStats { names, bytes } = copied;
        let snapshot = self.snapshot_write(Snapshot { bytes: Some(bytes), ..snapshot })?;
        Ok(Captured { snapshot, frozen_millis: millis(frozen), names, bytes })
    }

    fn capture_subvolume(
        &self,
        sandbox: &SandboxDisk,
        snapshot: &SnapshotId,
        layer: &LayerId,
        freezer: &FreezeControl<'_>,
    ) -> Result<Captured, EngineError> {
        let folder = self.home.sandbox(&sandbox.id);
        self.remove_leftover(&self.home.partial().join(layer.as_str()))?;
        self.remove_leftover(&self.home.layers().join(layer.as_str()))?;
        writable::flush(&folder, &self.home.partial(), layer.as_str())?;
        let ((), frozen) = while_frozen(freezer, |_| {
            writable::capture(&folder, &self.home.layers(), layer.as_str())
        })?;
        let bytes = self.growth_since_capture(&sandbox.id)?;
        let grown = bytes.unwrap_or(0);
        let referenced_bytes = self.captures(&sandbox.id)?.referenced_bytes + grown;
        if let Some(limit) = sandbox.limit {
            writable::raise_limit(&folder, limit, referenced_bytes)?;
        }
        // No chain: every capture on btrfs is complete, so only this snapshot uses the layer.
        let captures = Captures { referenced_bytes, ..Captures::default() };
        self.record_write(&folder.join("captures.json"), &captures)?;
        // The kernel has committed the subvolume snapshot before it returned: it is durable.
        let snapshot =
            Snapshot { bytes, durable: true, ..sandbox.snapshot(snapshot, [layer.clone()]) };
        let snapshot = self.snapshot_write(snapshot)?;
        Ok(Captured { snapshot, frozen_millis: millis(frozen), names: 0, bytes: grown })
    }

    /// By how much a sandbox's disk has grown since its last capture, where the store has quotas.
    pub(super) fn growth_since_capture(&self, id: &SandboxId) -> Result<Option<u64>, EngineError> {
        if !self.home.store().is_btrfs() {
            return Ok(None);
        }
        let usage = self.subvolume_usage(&self.home.writable(id));
        let before = self.captures(id)?.referenced_bytes;
        Ok(usage.map(|usage| usage.referenced.saturating_sub(before)))
    }

    // Anything at the path of a new layer is left over from a crash.
    fn remove_leftover(&self, path: &Path) -> Result<(), EngineError> {
        if path.exists() { trash::move_to_trash(path, &self.home.trash()) } else { Ok(()) }
    }

    // Without a readable index, everything is copied again and the chain of earlier captures is
    // dropped: a full copy has no whiteouts for names that only they contain.
    fn last_capture(&self, id: &SandboxId) -> Result<(Captures, Index), EngineError> {
        let captures = self.captures(id)?;
        let bytes = fs::read(self.home.sandbox(id).join(&captures.index)).unwrap_or_default();
        match Index::decode(&bytes) {
            Some(index) if captures.chain.len() < MAX_CHAIN => Ok((captures, index)),
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
        // Not synced: a lost index only makes the next capture a full copy.
        fs::write(folder.join(&name), index.encode()).at("write", folder.join(&name))?;
        let captures = Captures { chain, index: name.clone(), referenced_bytes: 0 };
        self.record_write(&folder.join("captures.json"), &captures)?;
        for other in records::names_in(folder)? {
            if other.starts_with("index-") && other != name {
                records::remove_file(&folder.join(other))?;
            }
        }
        Ok(())
    }
}

/// Copies what changed since `previous`. A small change is copied while the sandbox is frozen; of a
/// large one, most is copied while it runs.
fn copy_changes(
    upper: &Path,
    partial: &Path,
    previous: &Index,
    freezer: &FreezeControl<'_>,
) -> Result<(Index, CopyStats, Duration), EngineError> {
    let changes = Delta { source: upper, target: partial, previous };
    if !freezer.is_running {
        let (index, copied) = changes.copy_all(Pass::ALL, now_nanos(), &mut || Ok(()))?;
        return Ok((index, copied, Duration::ZERO));
    }
    let mut frozen = Duration::ZERO;
    // Without an earlier capture everything must be copied, which is rarely small.
    if !previous.is_empty() {
        let small = Pass::Only { max_bytes: SMALL_DELTA_BYTES };
        let (done, took) =
            while_frozen(freezer, |heartbeat| changes.copy(small, now_nanos(), heartbeat))?;
        frozen += took;
        if let Some((index, copied)) = done {
            return Ok((index, copied, frozen));
        }
        remove_contents(partial)?;
    }
    let (seen, first) = match changes.copy_all(Pass::First, now_nanos(), &mut || Ok(())) {
        Err(error) if !is_disk_full(&error) => {
            // Too many races with the sandbox: the second pass copies everything.
            remove_contents(partial)?;
            Default::default()
        }
        result => result?,
    };
    let ((index, second), took) = while_frozen(freezer, |heartbeat| {
        changes.copy_all(Pass::Second(&seen), now_nanos(), heartbeat)
    })?;
    let copied = CopyStats { names: first.names + second.names, bytes: first.bytes + second.bytes };
    Ok((index, copied, frozen + took))
}

/// Runs `work` while the sandbox is frozen, and returns how long it was frozen.
fn while_frozen<T>(
    freezer: &FreezeControl<'_>,
    work: impl FnOnce(&mut Heartbeat<'_>) -> Result<T, EngineError>,
) -> Result<(T, Duration), EngineError> {
    (freezer.freeze)()?;
    let mut guard = ThawGuard(Some(freezer));
    let frozen = Instant::now();
    let mut renewed = frozen;
    let result = work(&mut || {
        if renewed.elapsed() >= FREEZE_RENEWAL {
            renewed = Instant::now();
            (freezer.freeze)()?;
        }
        Ok(())
    });
    // Also after a failure, whose error matters more; at worst the zygote thaws the sandbox.
    guard.0 = None;
    let thawed = (freezer.thaw)();
    let result = result?;
    thawed?;
    Ok((result, frozen.elapsed()))
}

/// Thaws the sandbox when the work on it panics.
struct ThawGuard<'a, 'b>(Option<&'a FreezeControl<'b>>);

impl Drop for ThawGuard<'_, '_> {
    fn drop(&mut self) {
        if let Some(freezer) = self.0 {
            let _ = (freezer.thaw)();
        }
    }
}

/// Removes a partial copy.
fn remove_contents(partial: &Path) -> Result<(), EngineError> {
    let folder = tree::open_root(partial)?;
    for name in tree::names(folder.as_fd()).at("clean up", partial)? {
        trash::delete_in(folder.as_fd(), &name).at("clean up", partial)?;
    }
    Ok(())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
