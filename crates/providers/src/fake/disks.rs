//! The snapshots of a fake provider, and how tests inspect and change them.

use async_trait::async_trait;
use harvest_proto::{
    SnapshotId, Timestamp,
    api::{ChangeKind, FileChange, FileChanges},
    event::SnapshotKind,
};
use harvest_session::{
    disks::{DiffBase, Disks, SnapshotDisk},
    provider::ProviderError,
};

use super::{Fake, Files};

impl Fake {
    /// Deletes a snapshot behind the server's back.
    pub fn lose_snapshot(&self, snapshot: &SnapshotId) {
        self.inner().snapshots.remove(snapshot);
    }

    /// Adds a snapshot behind the server's back.
    pub fn add_snapshot(&self, snapshot: &SnapshotId) {
        self.inner().snapshots.insert(snapshot.clone(), (Files::new(), SnapshotKind::Turn));
    }

    /// Makes these disks belong to another store.
    pub fn set_owner_store(&self, store: &str) {
        self.inner().store = Some(store.to_owned());
    }

    /// The repositories whose state volume was removed, in order.
    #[must_use]
    pub fn states_removed(&self) -> Vec<String> {
        self.inner().states_removed.clone()
    }

    /// How often space was reclaimed.
    #[must_use]
    pub fn reclaims(&self) -> usize {
        self.inner().reclaims
    }
}

#[async_trait]
impl Disks for Fake {
    async fn claim_for_store(&self, store: &str) -> Result<bool, ProviderError> {
        Ok(self.inner().store.get_or_insert_with(|| store.to_owned()) == store)
    }

    async fn list(&self) -> Result<Vec<SnapshotDisk>, ProviderError> {
        let size = |files: &Files| files.values().map(|content| content.len() as u64).sum();
        let disk = |(id, (files, _)): (&SnapshotId, &(Files, _))| SnapshotDisk {
            id: id.clone(),
            bytes: size(files),
            created_at: Timestamp::from_millis(0),
            layers: vec![(id.to_string(), size(files))],
        };
        Ok(self.inner().snapshots.iter().map(disk).collect())
    }

    async fn list_with_sizes(&self) -> Result<Vec<SnapshotDisk>, ProviderError> {
        self.list().await
    }

    async fn reclaim(&self) -> Result<(), ProviderError> {
        self.inner().reclaims += 1;
        Ok(())
    }

    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError> {
        self.inner().states_removed.push(repository.to_owned());
        Ok(())
    }

    async fn changes(
        &self,
        before: &DiffBase,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<FileChanges, ProviderError> {
        let inner = self.inner();
        let files = |snapshot: &SnapshotId| match inner.snapshots.get(snapshot) {
            Some((files, _)) => Ok(files.clone()),
            None => Err(ProviderError::SnapshotMissing { snapshot: snapshot.clone() }),
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
