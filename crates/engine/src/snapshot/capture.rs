//! Captures of a sandbox that goes on: in plain folders by copying what has changed, on btrfs by a
//! snapshot of its subvolume. Either way its work stands still only for what must not change meanwhile.

use std::{
    cell::Cell,
    fs,
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use harvest_proto::{SandboxId, SnapshotId};

use super::{
    Captured, Captures, SandboxDisk, Snapshot, Still,
    delta::{self, Copied},
    index::Index,
    now_nanos,
};
use crate::{
    EngineError,
    disk::{self, Disk, disk_error},
    home::make_private,
    spec::LayerId,
    trash, tree, writable,
};

// A freeze nobody renews is lifted after 5 s; this leaves room for a slow disk between two renewals.
const RENEW_AFTER: Duration = Duration::from_secs(1);

// Each delta is one more place to look for every name that is not there. Measured with overlay's own
// limit (500) far away, the sum starts to show near 16.
pub(super) const LONGEST_CHAIN: usize = 16;

// Copied within the time that a second walk over a large tree takes. Tests have small trees, and are to
// find either way.
const SMALL_BYTES: u64 = if cfg!(test) { 8 << 10 } else { 16 << 20 };

impl Disk {
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
        let layer = self.layer_for(&sandbox.id, snapshot)?;
        if self.store().is_btrfs() {
            return self.capture_subvolume(sandbox, snapshot, &layer, still);
        }
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
        still: &Still<'_>,
    ) -> Result<Captured, EngineError> {
        let folder = self.sandbox(&sandbox.id);
        self.clear(&self.partial().join(layer.as_str()))?;
        self.clear(&self.layers().join(layer.as_str()))?;
        writable::flush(&folder, &self.partial(), layer.as_str())?;
        let capture =
            |_: &mut Pulse<'_>| writable::capture(&folder, &self.layers(), layer.as_str());
        let ((), frozen) = while_frozen(still, capture)?;
        let bytes = self.grown_since(&sandbox.id)?;
        let taken = self.captures(&sandbox.id)?.taken + bytes.unwrap_or(0);
        if let Some(limit) = sandbox.limit {
            writable::limit_again(&folder, limit, taken)?;
        }
        // No chain: the next capture is a whole one again, so this layer is the snapshot's alone.
        let captures = Captures { taken, ..Captures::default() };
        self.record_write(&folder.join("captures.json"), &captures)?;
        // The kernel has written it down before it answered.
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

    /// What a sandbox's disk takes more than at its last capture, where the store counts.
    pub(super) fn grown_since(&self, id: &SandboxId) -> Result<Option<u64>, EngineError> {
        if !self.store().is_btrfs() {
            return Ok(None);
        }
        let taken = self.taken(&writable::folder(&self.sandbox(id), self.store()));
        let before = self.captures(id)?.taken;
        Ok(taken.map(|taken| taken.referenced.saturating_sub(before)))
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
        self.record_write(
            &folder.join("captures.json"),
            &Captures { chain, index: name.clone(), taken: 0 },
        )?;
        for other in disk::names_in(folder)? {
            if other.starts_with("index-") && other != name {
                disk::remove_file(&folder.join(other))?;
            }
        }
        Ok(())
    }
}

/// Copies what must be copied. What is little is copied while the sandbox stands still; of the rest most
/// while it runs.
fn copy_still(
    upper: &Path,
    partial: &Path,
    previous: &Index,
    still: &Still<'_>,
) -> Result<(Index, Copied, Duration), EngineError> {
    if !still.runs {
        let (index, copied) =
            delta::copy_delta(upper, partial, previous, now_nanos(), &mut || Ok(()))?;
        return Ok((index, copied, Duration::ZERO));
    }
    let mut frozen = Duration::ZERO;
    // Without an earlier capture everything is to be copied, which is seldom little.
    if !previous.is_empty() {
        let small = |pulse: &mut Pulse<'_>| {
            delta::copy_small_delta(upper, partial, previous, SMALL_BYTES, now_nanos(), pulse)
        };
        let (done, took) = while_frozen(still, small)?;
        frozen += took;
        if let Some((index, copied)) = done {
            return Ok((index, copied, frozen));
        }
        empty(partial)?;
    }
    let (seen, first) = match delta::copy_running(upper, partial, previous, now_nanos()) {
        Err(error) if !delta::is_full(&error) => {
            // Too much moved under us. Without a first pass the second does it all.
            empty(partial)?;
            Default::default()
        }
        result => result?,
    };
    let rest = |pulse: &mut Pulse<'_>| {
        delta::bring_up_to_date(upper, partial, previous, &seen, now_nanos(), pulse)
    };
    let ((index, second), took) = while_frozen(still, rest)?;
    let copied = Copied { names: first.names + second.names, bytes: first.bytes + second.bytes };
    Ok((index, copied, frozen + took))
}

type Pulse<'a> = dyn FnMut() -> Result<(), EngineError> + 'a;

/// Does something while the sandbox's work stands still, and says for how long it did.
fn while_frozen<T>(
    still: &Still<'_>,
    work: impl FnOnce(&mut Pulse<'_>) -> Result<T, EngineError>,
) -> Result<(T, Duration), EngineError> {
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
    let result = work(&mut pulse)?;
    thawed.thaw()?;
    Ok((result, frozen.elapsed()))
}

/// Takes away what half a copy has left.
fn empty(partial: &Path) -> Result<(), EngineError> {
    let folder = tree::open_root(partial)?;
    let failed = |e| disk_error("tidy", partial, e);
    for name in tree::names(folder.as_fd()).map_err(failed)? {
        trash::delete_in(folder.as_fd(), &name).map_err(failed)?;
    }
    Ok(())
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

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
