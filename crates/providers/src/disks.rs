//! Snapshots of sessions on this machine, stored by the engine.

use std::{os::unix::ffi::OsStrExt as _, path::Path, thread};

use async_trait::async_trait;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_engine::{Baseline, Change, ChangeKind as EngineChangeKind, SnapshotUsage, VolumeName};
use harvest_proto::{
    SnapshotId,
    api::{ChangeKind, FileChange, FileChanges},
};
use harvest_session::{
    disks::{DiffBase, Disks, SnapshotDisk},
    provider::ProviderError,
};
use tokio::sync::oneshot;

use crate::Local;

#[async_trait]
impl Disks for Local {
    async fn claim_for_store(&self, store: &str) -> Result<bool, ProviderError> {
        let store = store.to_owned();
        self.engine("cannot read which store owns these disks".into(), move |engine| {
            engine.belongs_to(&store)
        })
        .await
    }

    async fn list(&self) -> Result<Vec<SnapshotDisk>, ProviderError> {
        let snapshots =
            self.engine("cannot list snapshots".into(), |engine| engine.snapshots()).await?;
        let of_sessions = snapshots.into_iter().filter(|snapshot| snapshot.of_sessions);
        let disk = |snapshot: harvest_engine::Snapshot| SnapshotDisk {
            id: snapshot.id,
            bytes: snapshot.bytes.unwrap_or(0),
            created_at: snapshot.created_at,
            layers: Vec::new(),
        };
        Ok(of_sessions.map(disk).collect())
    }

    async fn list_with_sizes(&self) -> Result<Vec<SnapshotDisk>, ProviderError> {
        let usages =
            self.engine("cannot measure snapshots".into(), |engine| engine.snapshot_usage());
        let of_sessions = usages.await?.into_iter().filter(|usage| usage.snapshot.of_sessions);
        let disk = |SnapshotUsage { snapshot, layers }| {
            let own = snapshot
                .layers
                .last()
                .and_then(|own| layers.iter().find(|(layer, _)| layer == own));
            SnapshotDisk {
                bytes: own.map_or(0, |(_, bytes)| *bytes),
                id: snapshot.id,
                created_at: snapshot.created_at,
                layers: layers
                    .into_iter()
                    .map(|(layer, bytes)| (layer.to_string(), bytes))
                    .collect(),
            }
        };
        Ok(of_sessions.map(disk).collect())
    }

    async fn reclaim(&self) -> Result<(), ProviderError> {
        // A plain thread: deleting may take minutes, and the runtime's shutdown would wait for a
        // blocking task. The next server deletes the rest.
        let (sender, done) = oneshot::channel();
        let engine = self.clone_engine();
        thread::spawn(move || {
            let _ = sender.send(engine.gc_home());
        });
        let doing = || "cannot free the space of removed snapshots".to_owned();
        match done.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                Err(ProviderError::Failed { doing: doing(), source: Box::new(error) })
            }
            Err(gone) => Err(ProviderError::Failed { doing: doing(), source: gone.into() }),
        }
    }

    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError> {
        let name = VolumeName::of_repository(repository);
        let doing = format!("cannot remove the state of repository {repository}");
        self.engine(doing, move |engine| engine.volume_remove(&name)).await
    }

    async fn changes(
        &self,
        before: &DiffBase,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<FileChanges, ProviderError> {
        let before = match before.clone() {
            DiffBase::Snapshot(snapshot) => Baseline::Snapshot(snapshot),
            DiffBase::OriginOf(snapshot) => Baseline::StartOf(snapshot),
        };
        let (doing, after) = ("cannot compare two snapshots".to_owned(), after.clone());
        let changes =
            self.engine(doing, move |engine| engine.changes(&before, &after, limit)).await?;
        Ok(FileChanges {
            items: changes.entries.into_iter().map(file_change).collect(),
            added: changes.added,
            changed: changes.changed,
            removed: changes.removed,
            cut: changes.truncated,
        })
    }
}

fn file_change(change: Change) -> FileChange {
    let path = Path::new("/").join(&change.path);
    let text = path.to_str().map(str::to_owned);
    FileChange {
        path_base64: text.is_none().then(|| BASE64_STANDARD.encode(path.as_os_str().as_bytes())),
        path: text.unwrap_or_else(|| path.to_string_lossy().into_owned()),
        change: match change.kind {
            EngineChangeKind::Added => ChangeKind::Added,
            EngineChangeKind::Changed => ChangeKind::Changed,
            EngineChangeKind::Removed => ChangeKind::Removed,
        },
        kind: change.file_type.to_owned(),
        before_bytes: change.size_before,
        after_bytes: change.size_after,
    }
}
