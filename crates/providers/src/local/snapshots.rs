//! Snapshots on this machine, stored by the engine.

use std::{os::unix::ffi::OsStrExt as _, path::Path, thread};

use async_trait::async_trait;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_engine::{
    Baseline, Change, ChangeKind as EngineChangeKind, Engine, Snapshot, SnapshotUsage,
};
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{ChangeKind, FileChange, FileChanges, SnapshotOwner, StoredSnapshot},
    event::SnapshotKind,
};
use harvest_session::sandboxes::{
    Captured, DiffBase, Durability, SandboxError, SnapshotSize, Snapshots,
};
use tokio::sync::oneshot;

use super::{Local, errors::sandbox_error, images::config};

#[async_trait]
impl Snapshots for Local {
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: Option<SnapshotKind>,
    ) -> Result<Captured, SandboxError> {
        let snapshot = snapshot.clone();
        let captured = self.on(sandbox, "take a snapshot of", move |engine, id| match kind {
            Some(_) => engine.capture_for_sessions(id, &snapshot),
            None => engine.capture(id, &snapshot),
        });
        let captured = captured.await?;
        Ok(Captured { frozen_millis: captured.frozen_millis, bytes: captured.bytes })
    }

    async fn sync(&self) -> Result<(), SandboxError> {
        self.engine("cannot write snapshots to disk", Engine::snapshots_sync).await.map(drop)
    }

    async fn durability(&self, snapshot: &SnapshotId) -> Result<Durability, SandboxError> {
        let (id, doing) = (snapshot.clone(), format!("cannot read snapshot {snapshot}"));
        let found = self.engine(doing, move |engine| engine.snapshot_durability(&id)).await?;
        Ok(match found {
            Some(harvest_engine::Durability::Durable) => Durability::Durable,
            Some(harvest_engine::Durability::Torn) => Durability::Torn,
            Some(harvest_engine::Durability::Pending) | None => Durability::Pending,
        })
    }

    async fn remove(&self, snapshot: &SnapshotId) -> Result<(), SandboxError> {
        let (id, doing) = (snapshot.clone(), format!("cannot remove snapshot {snapshot}"));
        self.engine(doing, move |engine| engine.snapshot_remove(&id)).await
    }

    async fn ids(&self) -> Result<Vec<SnapshotId>, SandboxError> {
        self.engine("cannot list snapshots", Engine::snapshot_ids).await
    }

    async fn find(&self, snapshot: &SnapshotId) -> Result<Option<StoredSnapshot>, SandboxError> {
        let (id, doing) = (snapshot.clone(), format!("cannot read snapshot {snapshot}"));
        let found = self.engine(doing, move |engine| engine.snapshot(&id)).await?;
        Ok(found.map(stored_snapshot))
    }

    async fn list(&self) -> Result<Vec<StoredSnapshot>, SandboxError> {
        let mut snapshots = self.engine("cannot list snapshots", Engine::snapshots).await?;
        snapshots.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created_at));
        Ok(snapshots.into_iter().map(stored_snapshot).collect())
    }

    async fn claim_for_store(&self, store: &str) -> Result<bool, SandboxError> {
        let store = store.to_owned();
        let doing = "cannot read which store owns these disks";
        self.engine(doing, move |engine| engine.belongs_to(&store)).await
    }

    async fn sizes(&self) -> Result<Vec<SnapshotSize>, SandboxError> {
        let usages = self.engine("cannot measure snapshots", |engine| engine.snapshot_usage());
        let of_sessions = usages.await?.into_iter().filter(|usage| usage.snapshot.of_sessions);
        let disk = |SnapshotUsage { snapshot, layers }| {
            let own = layers.iter().find(|(layer, _)| snapshot.layers.last() == Some(layer));
            let bytes = own.map_or(0, |(_, bytes)| *bytes);
            let layers = layers.into_iter().map(|(layer, bytes)| (layer.into(), bytes)).collect();
            SnapshotSize { id: snapshot.id, bytes, created_at: snapshot.created_at, layers }
        };
        Ok(of_sessions.map(disk).collect())
    }

    async fn reclaim(&self) -> Result<(), SandboxError> {
        // A plain thread: deleting may take minutes, and the runtime's shutdown would wait for a
        // blocking task. The next server deletes the rest.
        let (sender, done) = oneshot::channel();
        let engine = self.engine.clone();
        thread::spawn(move || {
            // It reads the record of every snapshot; users' requests come first.
            let _ = rustix::process::nice(10);
            let _ = sender.send(engine.gc_home());
        });
        let doing = "cannot free the space of removed snapshots";
        match done.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(sandbox_error(doing, error)),
            Err(gone) => Err(SandboxError::failed(doing, gone)),
        }
    }

    async fn changes(
        &self,
        before: &DiffBase,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<FileChanges, SandboxError> {
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

fn stored_snapshot(snapshot: Snapshot) -> StoredSnapshot {
    StoredSnapshot {
        id: snapshot.id,
        owner: if snapshot.of_sessions { SnapshotOwner::Session } else { SnapshotOwner::You },
        layers: snapshot.layers.into_iter().map(String::from).collect(),
        config: config(snapshot.config),
        created_at: snapshot.created_at,
        durable: snapshot.durable,
        sandbox: Some(snapshot.sandbox),
        parent: snapshot.parent,
        bytes: snapshot.bytes,
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
