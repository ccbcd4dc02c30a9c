//! The engine's public snapshot operations: they join a sandbox's processes with the snapshot files
//! in the store.

use harvest_proto::{SandboxId, SnapshotId};

use super::{Captured, Durability, FreezeControl, SandboxDisk, Snapshot};
use crate::{
    Engine, EngineError, Owner, SandboxState, disk_thresholds::DiskOperation,
    sandbox_record::Record,
};

impl Engine {
    /// Stops a sandbox if it runs, saves its disk as a snapshot by a rename, and removes the
    /// sandbox. Also saves the disk of a sandbox that died. Idempotent by the snapshot's id; a
    /// retry completes an interrupted call.
    ///
    /// # Errors
    /// When the sandbox is unknown, or `snapshot` is the id of an earlier capture of it.
    pub fn stop_and_save(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<Snapshot, EngineError> {
        self.kill(id)?;
        let sandbox = self.sandbox_disk(id)?;
        let saved = self.disk.save_stopped(id, sandbox.as_ref(), snapshot, &|| self.remove(id))?;
        self.sync_in_background();
        Ok(saved)
    }

    /// Captures the disk of a sandbox, which keeps running: freezes it, copies what changed since
    /// the last capture, and thaws it. Idempotent by the snapshot's id.
    ///
    /// # Errors
    /// When the sandbox is unknown or the disk is full. Then no snapshot exists and the sandbox
    /// keeps running.
    pub fn capture(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<Captured, EngineError> {
        self.capture_as(id, snapshot, false)
    }

    /// [`Engine::capture`] for a session of the server, which then owns the snapshot.
    ///
    /// # Errors
    /// As [`Engine::capture`].
    pub fn capture_for_sessions(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
    ) -> Result<Captured, EngineError> {
        self.capture_as(id, snapshot, true)
    }

    fn capture_as(
        &self,
        id: &SandboxId,
        snapshot: &SnapshotId,
        of_sessions: bool,
    ) -> Result<Captured, EngineError> {
        self.store.ensure_mounted()?;
        let sandbox = self
            .sandbox_disk(id)?
            .ok_or_else(|| EngineError::NotRunning { sandbox: id.clone() })?;
        let sandbox = SandboxDisk { of_sessions, ..sandbox };
        // A retry for an existing snapshot needs no space.
        if self.disk.snapshot(snapshot)?.is_none() {
            self.check_free_space(DiskOperation::Snapshot)?;
        }
        let freezer = if matches!(self.find(id)?, SandboxState::Running(_)) {
            FreezeControl { is_running: true, freeze: &|| self.freeze(id), thaw: &|| self.thaw(id) }
        } else {
            FreezeControl { is_running: false, freeze: &|| Ok(()), thaw: &|| Ok(()) }
        };
        let captured = self.disk.capture(&sandbox, snapshot, &freezer)?;
        self.sync_in_background();
        Ok(captured)
    }

    /// The snapshot with this id, if it exists.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>, EngineError> {
        self.store.ensure_mounted()?;
        self.disk.snapshot(id)
    }

    /// Whether a snapshot survives a power cut; `None` when it does not exist.
    ///
    /// # Errors
    /// When the record cannot be read.
    pub fn snapshot_durability(&self, id: &SnapshotId) -> Result<Option<Durability>, EngineError> {
        self.store.ensure_mounted()?;
        self.disk.durability(id)
    }

    /// The ids of all snapshots of this home, without reading them.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub fn snapshot_ids(&self) -> Result<Vec<SnapshotId>, EngineError> {
        self.store.ensure_mounted()?;
        self.disk.snapshot_ids()
    }

    /// Every snapshot of this home.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, EngineError> {
        self.store.ensure_mounted()?;
        self.disk.snapshot_list()
    }

    /// Removes a snapshot. The next [`Engine::gc`] removes its layers once nothing refers to them.
    /// Idempotent.
    ///
    /// # Errors
    /// When the record cannot be removed.
    pub fn snapshot_remove(&self, id: &SnapshotId) -> Result<(), EngineError> {
        self.store.ensure_mounted()?;
        self.disk.snapshot_remove(id)
    }

    /// Syncs every snapshot to the disk and marks it durable. Captures start this in the
    /// background; a process about to exit may want to wait for it.
    ///
    /// # Errors
    /// When the sync fails.
    pub fn snapshots_sync(&self) -> Result<(), EngineError> {
        self.store.ensure_mounted()?;
        self.disk.snapshots_sync()
    }

    fn sandbox_disk(&self, id: &SandboxId) -> Result<Option<SandboxDisk>, EngineError> {
        let record = Record::read(&self.disk.home, id)?;
        Ok(record.map(|record| SandboxDisk {
            of_sessions: record.owner == Owner::Sessions,
            boot: record.boot,
            id: record.id,
            layers: record.layers,
            config: record.config,
            parent: record.snapshot,
            limit: record.limits.writable_bytes.filter(|_| self.disk.home.has_quotas()),
        }))
    }

    // A sync may take seconds; after a failed one the records stay marked as not durable.
    // Coalesced, so that a hundred sessions do not need a thread each.
    fn sync_in_background(&self) {
        let disk = self.disk.clone();
        self.snapshot_sync.request("snapshot-sync", move || {
            let _ = disk.snapshots_sync();
        });
    }
}
