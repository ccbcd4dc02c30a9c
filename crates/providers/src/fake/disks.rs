//! The disks a fake keeps, and what tests ask and do about them.

use async_trait::async_trait;
use harvest_proto::{
    SnapshotId, Timestamp,
    api::{ChangeKind, MachineChange, MachineChanges},
    event::SnapshotKind,
};
use harvest_session::{
    disks::{DiskBefore, Disks, KeptDisk},
    provider::ProviderError,
};

use super::{Fake, Files};

impl Fake {
    /// A snapshot vanishes, as if somebody had deleted its files.
    pub fn lose(&self, snapshot: &SnapshotId) {
        self.inner().snapshots.remove(snapshot);
    }

    /// A snapshot nobody asked for lies here.
    pub fn plant(&self, snapshot: &SnapshotId) {
        self.inner().snapshots.insert(snapshot.clone(), (Files::new(), SnapshotKind::Turn));
    }

    /// These disks belong to another store from now on.
    pub fn give_to(&self, store: &str) {
        self.inner().store = Some(store.to_owned());
    }

    /// The repositories whose state was removed, in order.
    #[must_use]
    pub fn states_removed(&self) -> Vec<String> {
        self.inner().states_removed.clone()
    }

    /// How often the room of what was removed has been freed.
    #[must_use]
    pub fn sweeps(&self) -> usize {
        self.inner().sweeps
    }
}

#[async_trait]
impl Disks for Fake {
    async fn belongs_to(&self, store: &str) -> Result<bool, ProviderError> {
        Ok(self.inner().store.get_or_insert_with(|| store.to_owned()) == store)
    }

    async fn list(&self) -> Result<Vec<KeptDisk>, ProviderError> {
        let size = |files: &Files| files.values().map(|content| content.len() as u64).sum();
        let disk = |(id, (files, _)): (&SnapshotId, &(Files, _))| KeptDisk {
            id: id.clone(),
            bytes: size(files),
            created_at: Timestamp::from_millis(0),
            layers: vec![(id.to_string(), size(files))],
        };
        Ok(self.inner().snapshots.iter().map(disk).collect())
    }

    async fn weigh(&self) -> Result<Vec<KeptDisk>, ProviderError> {
        self.list().await
    }

    async fn sweep(&self) -> Result<(), ProviderError> {
        self.inner().sweeps += 1;
        Ok(())
    }

    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError> {
        self.inner().states_removed.push(repository.to_owned());
        Ok(())
    }

    async fn changes(
        &self,
        before: &DiskBefore,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<MachineChanges, ProviderError> {
        let inner = self.inner();
        let files = |snapshot: &SnapshotId| match inner.snapshots.get(snapshot) {
            Some((files, _)) => Ok(files.clone()),
            None => Err(ProviderError::SnapshotMissing { snapshot: snapshot.clone() }),
        };
        let before = match before {
            DiskBefore::Snapshot(snapshot) => files(snapshot)?,
            DiskBefore::BeginningOf(_) => Files::new(),
        };
        let after = files(after)?;
        let mut changes = MachineChanges::default();
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
            changes.items.push(MachineChange {
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
