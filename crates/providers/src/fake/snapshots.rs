//! The snapshots of a fake provider, and how tests inspect and change them.

use async_trait::async_trait;
use harvest_proto::{
    RepositoryName, SandboxId, SnapshotId, Timestamp,
    api::{ChangeKind, FileChange, FileChanges, SnapshotOwner, StoredSnapshot},
    event::SnapshotKind,
};
use harvest_session::sandboxes::{
    Captured, DiffBase, Durability, SandboxError, SnapshotSize, Snapshots,
};

use super::{Fake, FakeOp, Files, host::config};

impl Fake {
    /// Deletes a snapshot behind the server's back.
    pub fn lose_snapshot(&self, snapshot: &SnapshotId) {
        self.inner().snapshots.remove(snapshot);
    }

    /// Adds a snapshot behind the server's back.
    pub fn add_snapshot(&self, snapshot: &SnapshotId) {
        self.inner().snapshots.insert(snapshot.clone(), (Files::new(), Some(SnapshotKind::Turn)));
    }

    /// A power cut takes the last writes of a snapshot.
    pub fn tear_snapshot(&self, snapshot: &SnapshotId) {
        self.inner().torn.insert(snapshot.clone());
    }

    /// Makes these disks belong to another store.
    pub fn set_owner_store(&self, store: &str) {
        self.inner().store = Some(store.to_owned());
    }

    /// The repositories whose state volume was removed, in order.
    #[must_use]
    pub fn states_removed(&self) -> Vec<RepositoryName> {
        self.inner().states_removed.clone()
    }

    /// How often space was reclaimed.
    #[must_use]
    pub fn reclaims(&self) -> usize {
        self.inner().reclaims
    }
}

#[async_trait]
impl Snapshots for Fake {
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: Option<SnapshotKind>,
    ) -> Result<Captured, SandboxError> {
        self.check(FakeOp::Capture)?;
        let fake_sandbox = self.sandbox(sandbox)?;
        if fake_sandbox.ended().is_some() {
            return Err(SandboxError::NotRunning { sandbox: sandbox.clone() });
        }
        let files = fake_sandbox.files();
        self.inner().snapshots.entry(snapshot.clone()).or_insert((files, kind));
        Ok(Captured::default())
    }

    async fn sync(&self) -> Result<(), SandboxError> {
        Ok(())
    }

    async fn durability(&self, snapshot: &SnapshotId) -> Result<Durability, SandboxError> {
        match self.inner().torn.contains(snapshot) {
            true => Ok(Durability::Torn),
            false => Ok(Durability::Durable),
        }
    }

    async fn remove(&self, snapshot: &SnapshotId) -> Result<(), SandboxError> {
        self.check(FakeOp::SnapshotRemove)?;
        self.inner().snapshots.remove(snapshot);
        Ok(())
    }

    async fn ids(&self) -> Result<Vec<SnapshotId>, SandboxError> {
        Ok(self.inner().snapshots.keys().cloned().collect())
    }

    async fn find(&self, snapshot: &SnapshotId) -> Result<Option<StoredSnapshot>, SandboxError> {
        Ok(Snapshots::list(self).await?.into_iter().find(|stored| stored.id == *snapshot))
    }

    async fn list(&self) -> Result<Vec<StoredSnapshot>, SandboxError> {
        let stored = |(id, (_, kind)): (&SnapshotId, &(Files, Option<SnapshotKind>))| {
            let owner = if kind.is_some() { SnapshotOwner::Session } else { SnapshotOwner::You };
            StoredSnapshot {
                id: id.clone(),
                owner,
                layers: vec!["lay_fake".to_owned()],
                config: config(),
                created_at: Timestamp::from_millis(0),
                durable: true,
                sandbox: None,
                parent: None,
                bytes: None,
            }
        };
        Ok(self.inner().snapshots.iter().map(stored).collect())
    }

    async fn sizes(&self) -> Result<Vec<SnapshotSize>, SandboxError> {
        let inner = self.inner();
        let of_sessions = inner.snapshots.iter().filter(|(_, (_, kind))| kind.is_some());
        let size = of_sessions.map(|(id, (files, _))| {
            let bytes = files.values().map(|content| content.len() as u64).sum();
            SnapshotSize {
                id: id.clone(),
                bytes,
                created_at: Timestamp::from_millis(0),
                layers: vec![(id.to_string(), bytes)],
            }
        });
        Ok(size.collect())
    }

    async fn claim_for_store(&self, store: &str) -> Result<bool, SandboxError> {
        Ok(self.inner().store.get_or_insert_with(|| store.to_owned()) == store)
    }

    async fn reclaim(&self) -> Result<(), SandboxError> {
        self.inner().reclaims += 1;
        Ok(())
    }

    async fn changes(
        &self,
        before: &DiffBase,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<FileChanges, SandboxError> {
        let inner = self.inner();
        let files = |snapshot: &SnapshotId| match inner.snapshots.get(snapshot) {
            Some((files, _)) => Ok(files.clone()),
            None => Err(SandboxError::no_snapshot(snapshot)),
        };
        let before = match before {
            DiffBase::Snapshot(snapshot) => files(snapshot)?,
            DiffBase::OriginOf(_) => Files::new(),
        };
        let after = files(after)?;
        let mut changes = FileChanges::default();
        let paths: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).collect();
        for path in paths {
            let (one, other) = (before.get(path), after.get(path));
            let (change, count) = match (one, other) {
                (None, _) => (ChangeKind::Added, &mut changes.added),
                (_, None) => (ChangeKind::Removed, &mut changes.removed),
                _ if one != other => (ChangeKind::Changed, &mut changes.changed),
                _ => continue,
            };
            *count += 1;
            let bytes = |content: Option<&Vec<u8>>| content.map(|content| content.len() as u64);
            let (path, kind) = (path.clone(), "file".to_owned());
            let (before_bytes, after_bytes) = (bytes(one), bytes(other));
            let path_base64 = None;
            changes.items.push(FileChange {
                path,
                path_base64,
                change,
                kind,
                before_bytes,
                after_bytes,
            });
        }
        changes.cut = changes.items.len() > limit;
        changes.items.truncate(limit);
        Ok(changes)
    }
}
