//! What the engine offers around disks: keep one, look one up, forget one, clean up. Joins the
//! processes of `sandbox` with the files of `snapshot`, `image` and `collect`.
use harvest_proto::{SandboxId, SnapshotId};

use crate::{
    Captured, Collected, Engine, EngineError, Image, Owner, SandboxState, Snapshot, disk,
    home::start_ticks,
    room::What,
    sandbox::Record,
    snapshot::{SandboxDisk, Still},
};

impl Engine {
    /// Ends a sandbox, if it lives, and keeps its disk, in one act: a rename. Also takes what a sandbox
    /// left that died by itself. Idempotent by the snapshot's id; a call cut short anywhere is finished
    /// by the next.
    ///
    /// # Errors
    /// When nobody knows the sandbox, or `snapshot` names an earlier capture of it.
    pub fn end_kept(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<Snapshot, EngineError> {
        self.kill(id)?;
        let sandbox = self.sandbox_disk(id)?;
        let kept = self.disk.end_kept(id, sandbox.as_ref(), snapshot, &|| self.remove(id))?;
        self.sync_later();
        Ok(kept)
    }

    /// Keeps the disk of a sandbox that goes on: stops its commands, copies what has changed since the
    /// last time, lets them go on. Idempotent by the snapshot's id.
    ///
    /// # Errors
    /// When nobody knows the sandbox or the disk is full; there is no snapshot then, and it goes on.
    pub fn capture(&self, id: &SandboxId, snapshot: &SnapshotId) -> Result<Captured, EngineError> {
        self.capture_as(id, snapshot, false)
    }

    /// The same for the server's sessions, which know of each snapshot that is theirs.
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
        self.store.wake()?;
        let sandbox = self
            .sandbox_disk(id)?
            .ok_or_else(|| EngineError::NotRunning { sandbox: id.clone() })?;
        let sandbox = SandboxDisk { of_sessions, ..sandbox };
        // What is there already takes no room.
        if self.disk.snapshot(snapshot)?.is_none() {
            self.has_room(What::Snapshot)?;
        }
        let still = if matches!(self.find(id)?, SandboxState::Running(_)) {
            Still { runs: true, freeze: &|| self.freeze(id), thaw: &|| self.thaw(id) }
        } else {
            Still { runs: false, freeze: &|| Ok(()), thaw: &|| Ok(()) }
        };
        let captured = self.disk.capture(&sandbox, snapshot, &still)?;
        self.sync_later();
        Ok(captured)
    }

    /// A snapshot, if there is one of this id.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn snapshot(&self, id: &SnapshotId) -> Result<Option<Snapshot>, EngineError> {
        self.store.wake()?;
        self.disk.snapshot(id)
    }

    /// Every snapshot of this home.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn snapshots(&self) -> Result<Vec<Snapshot>, EngineError> {
        self.store.wake()?;
        self.disk.snapshot_list()
    }

    /// Forgets a snapshot; its layers go with the next [`Engine::gc`], if nothing uses them. Idempotent.
    ///
    /// # Errors
    /// When the record cannot be removed.
    pub fn snapshot_remove(&self, id: &SnapshotId) -> Result<(), EngineError> {
        self.store.wake()?;
        self.disk.snapshot_remove(id)
    }

    /// Brings every snapshot to the disk and marks it durable. Captures start this by themselves; a
    /// process about to exit may want to wait for it.
    ///
    /// # Errors
    /// When the disk says no.
    pub fn snapshots_sync(&self) -> Result<(), EngineError> {
        self.store.wake()?;
        self.disk.snapshots_sync()
    }

    /// An image, if there is one of this name.
    ///
    /// # Errors
    /// When its record cannot be read.
    pub fn image(&self, name: &str) -> Result<Option<Image>, EngineError> {
        self.disk.image(name)
    }

    /// Every image, by name.
    ///
    /// # Errors
    /// When a record cannot be read.
    pub fn images(&self) -> Result<Vec<Image>, EngineError> {
        self.disk.image_list()
    }

    /// Forgets an image; its layers go with the next [`Engine::gc`], if nothing uses them. Idempotent.
    ///
    /// # Errors
    /// When the record cannot be removed.
    pub fn image_remove(&self, name: &str) -> Result<(), EngineError> {
        self.disk.image_remove(name)
    }

    /// Throws away what nothing uses: sandboxes whose owner is gone, layers no record refers to, what
    /// crashes left; then empties the trash, which may take a while. With `dry_run` it only says what.
    ///
    /// # Errors
    /// When a record cannot be read: then nothing is known to be unused.
    pub fn gc(&self, dry_run: bool) -> Result<Collected, EngineError> {
        let mut collected = Collected::default();
        for id in self.list()? {
            if self.is_ownerless(&id)? {
                if !dry_run {
                    self.remove(&id)?;
                }
                collected.sandboxes.push(id);
            }
        }
        if !dry_run {
            self.volumes_sweep()?;
        }
        let waste = self.disk.collect(dry_run, &mut collected)?;
        if !dry_run {
            self.disk.delete(&waste)?;
            self.disk.settle()?;
        }
        Ok(collected)
    }

    /// Frees what removed snapshots and sandboxes have left in this home. As [`Engine::gc`], but quick: the
    /// cache that homes share is left alone and nothing is measured. Answers how many layers went.
    ///
    /// # Errors
    /// When a record cannot be read: then nothing is known to be unused.
    pub fn sweep(&self) -> Result<usize, EngineError> {
        self.store.wake()?;
        let (waste, layers) = self.disk.sweep()?;
        self.disk.delete(&waste)?;
        self.disk.settle()?;
        Ok(layers)
    }

    /// Whether the sandboxes and snapshots of sessions here belong to the store of this name. The first one
    /// to ask has them.
    ///
    /// # Errors
    /// When the name cannot be read or written.
    pub fn belongs_to(&self, store: &str) -> Result<bool, EngineError> {
        self.store.wake()?;
        let path = self.home.path().join("sessions-of.json");
        if let Some(owner) = disk::read_record::<String>(&path)? {
            return Ok(owner == store);
        }
        self.disk.record_write(&path, &store)?;
        Ok(true)
    }

    fn is_ownerless(&self, id: &SandboxId) -> Result<bool, EngineError> {
        let Some(record) = Record::read(&self.home, id)? else { return Ok(false) };
        let Owner::Process(pid) = record.owner else { return Ok(false) };
        Ok(start_ticks(pid).is_none() && matches!(self.find(id)?, SandboxState::Dead { .. }))
    }

    fn sandbox_disk(&self, id: &SandboxId) -> Result<Option<SandboxDisk>, EngineError> {
        let record = Record::read(&self.home, id)?;
        Ok(record.map(|record| SandboxDisk {
            of_sessions: record.owner() == Owner::Sessions,
            id: record.id,
            layers: record.layers,
            config: record.config,
            parent: record.snapshot,
            limit: record.limits.writable_bytes.filter(|_| self.home.has_quotas()),
        }))
    }

    // In the background: a sync may take seconds, and when it fails the records say so. One for everybody, or
    // a hundred sessions would wait with a thread each, and each read every record.
    fn sync_later(&self) {
        let disk = self.disk.clone();
        self.syncs.ask("snapshot-sync", move || {
            let _ = disk.snapshots_sync();
        });
    }
}
