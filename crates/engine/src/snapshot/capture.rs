//! Captures the disk of a running sandbox: in plain folders by copying what changed, on btrfs by a
//! subvolume snapshot. The sandbox is frozen only while its disk must not change.

use std::{
    cell::Cell,
    fs,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, SnapshotId};

use super::{
    Captured, Captures, FreezeControl, SandboxDisk, Snapshot,
    delta::{self, CopyStats},
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
        let snapshot = self.snapshot_write(Snapshot { bytes: Some(copied.bytes), ..snapshot })?;
        Ok(Captured {
            snapshot,
            frozen_millis: millis(frozen),
            names: copied.names,
            bytes: copied.bytes,
        })
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
        let capture =
            |_: &mut Heartbeat<'_>| writable::capture(&folder, &self.home.layers(), layer.as_str());
        let ((), frozen) = while_frozen(freezer, capture)?;
        let bytes = self.growth_since_capture(&sandbox.id)?;
        let referenced_bytes = self.captures(&sandbox.id)?.referenced_bytes + bytes.unwrap_or(0);
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
        Ok(Captured {
            snapshot,
            frozen_millis: millis(frozen),
            names: 0,
            bytes: bytes.unwrap_or(0),
        })
    }

    /// By how much a sandbox's disk has grown since its last capture, where the store has quotas.
    pub(super) fn growth_since_capture(&self, id: &SandboxId) -> Result<Option<u64>, EngineError> {
        if !self.home.store().is_btrfs() {
            return Ok(None);
        }
        let usage =
            self.subvolume_usage(&writable::folder(&self.home.sandbox(id), self.home.store()));
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
        fs::write(folder.join(&name), index.encode())
            .map_err(|e| EngineError::file("write", folder.join(&name), e))?;
        self.record_write(
            &folder.join("captures.json"),
            &Captures { chain, index: name.clone(), referenced_bytes: 0 },
        )?;
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
    if !freezer.is_running {
        let (index, copied) =
            delta::copy_delta(upper, partial, previous, now_nanos(), &mut || Ok(()))?;
        return Ok((index, copied, Duration::ZERO));
    }
    let mut frozen = Duration::ZERO;
    // Without an earlier capture everything must be copied, which is rarely small.
    if !previous.is_empty() {
        let small = |heartbeat: &mut Heartbeat<'_>| {
            delta::copy_small_delta(
                upper,
                partial,
                previous,
                SMALL_DELTA_BYTES,
                now_nanos(),
                heartbeat,
            )
        };
        let (done, took) = while_frozen(freezer, small)?;
        frozen += took;
        if let Some((index, copied)) = done {
            return Ok((index, copied, frozen));
        }
        remove_contents(partial)?;
    }
    let (seen, first) = match delta::copy_first_pass(upper, partial, previous, now_nanos()) {
        Err(error) if !delta::is_disk_full(&error) => {
            // Too many races with the sandbox: the second pass copies everything.
            remove_contents(partial)?;
            Default::default()
        }
        result => result?,
    };
    let rest = |heartbeat: &mut Heartbeat<'_>| {
        delta::copy_second_pass(upper, partial, previous, &seen, now_nanos(), heartbeat)
    };
    let ((index, second), took) = while_frozen(freezer, rest)?;
    let copied = CopyStats { names: first.names + second.names, bytes: first.bytes + second.bytes };
    Ok((index, copied, frozen + took))
}

type Heartbeat<'a> = dyn FnMut() -> Result<(), EngineError> + 'a;

/// Runs `work` while the sandbox is frozen, and returns how long it was frozen.
fn while_frozen<T>(
    freezer: &FreezeControl<'_>,
    work: impl FnOnce(&mut Heartbeat<'_>) -> Result<T, EngineError>,
) -> Result<(T, Duration), EngineError> {
    (freezer.freeze)()?;
    let frozen = Instant::now();
    let thawed = ThawGuard { freezer, done: Cell::new(false) };
    let mut renewed = Instant::now();
    let mut heartbeat = || {
        if renewed.elapsed() >= FREEZE_RENEWAL {
            renewed = Instant::now();
            (freezer.freeze)()?;
        }
        Ok(())
    };
    let result = work(&mut heartbeat)?;
    thawed.thaw()?;
    Ok((result, frozen.elapsed()))
}

/// Removes a partial copy.
fn remove_contents(partial: &Path) -> Result<(), EngineError> {
    let folder = tree::open_root(partial)?;
    let failed = |e| EngineError::file("clean up", partial, e);
    for name in tree::names(folder.as_fd()).map_err(failed)? {
        trash::delete_in(folder.as_fd(), &name).map_err(failed)?;
    }
    Ok(())
}

/// Thaws the sandbox when dropped, whether the copy succeeded or failed.
struct ThawGuard<'a> {
    freezer: &'a FreezeControl<'a>,
    done: Cell<bool>,
}

impl ThawGuard<'_> {
    fn thaw(&self) -> Result<(), EngineError> {
        self.done.set(true);
        (self.freezer.thaw)()
    }
}

impl Drop for ThawGuard<'_> {
    fn drop(&mut self) {
        if !self.done.get() {
            // The error being returned matters more; at worst the zygote thaws the sandbox.
            let _ = (self.freezer.thaw)();
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
