//! The disks of this machine, by the engine.

use std::{os::unix::ffi::OsStrExt as _, path::Path, thread};

use async_trait::async_trait;
use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_engine::{Before, Change, How, VolumeName, Weighed};
use harvest_proto::{
    SnapshotId,
    api::{ChangeKind, MachineChange, MachineChanges},
};
use harvest_session::{
    disks::{DiskBefore, Disks, KeptDisk},
    provider::ProviderError,
};
use tokio::sync::oneshot;

use crate::Local;

#[async_trait]
impl Disks for Local {
    async fn belongs_to(&self, store: &str) -> Result<bool, ProviderError> {
        let store = store.to_owned();
        self.engine("cannot tell whose disks these are".into(), move |engine| {
            engine.belongs_to(&store)
        })
        .await
    }

    async fn list(&self) -> Result<Vec<KeptDisk>, ProviderError> {
        let snapshots =
            self.engine("cannot list snapshots".into(), |engine| engine.snapshots()).await?;
        let ours = snapshots.into_iter().filter(|snapshot| snapshot.of_sessions);
        let disk = |snapshot: harvest_engine::Snapshot| KeptDisk {
            id: snapshot.id,
            bytes: snapshot.bytes.unwrap_or(0),
            created_at: snapshot.created_at,
            layers: Vec::new(),
        };
        Ok(ours.map(disk).collect())
    }

    async fn weigh(&self) -> Result<Vec<KeptDisk>, ProviderError> {
        let weighed =
            self.engine("cannot measure snapshots".into(), |engine| engine.snapshots_weighed());
        let ours = weighed.await?.into_iter().filter(|weighed| weighed.snapshot.of_sessions);
        let disk = |Weighed { snapshot, layers }| {
            let own = snapshot
                .layers
                .last()
                .and_then(|own| layers.iter().find(|(layer, _)| layer == own));
            KeptDisk {
                bytes: own.map_or(0, |(_, bytes)| *bytes),
                id: snapshot.id,
                created_at: snapshot.created_at,
                layers: layers
                    .into_iter()
                    .map(|(layer, bytes)| (layer.to_string(), bytes))
                    .collect(),
            }
        };
        Ok(ours.map(disk).collect())
    }

    async fn sweep(&self) -> Result<(), ProviderError> {
        // A thread of its own: deleting may take minutes, and the runtime would wait for a blocking task
        // of its own before it ends. What is left then is swept by the next.
        let (tell, told) = oneshot::channel();
        let engine = self.clone_engine();
        thread::spawn(move || {
            let _ = tell.send(engine.sweep());
        });
        let doing = || "cannot free the room of what was removed".to_owned();
        match told.await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                Err(ProviderError::Machine { doing: doing(), source: Box::new(error) })
            }
            Err(gone) => Err(ProviderError::Machine { doing: doing(), source: gone.into() }),
        }
    }

    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError> {
        let name = VolumeName::of_repository(repository);
        let doing = format!("cannot remove the state of repository {repository}");
        self.engine(doing, move |engine| engine.volume_remove(&name)).await
    }

    async fn changes(
        &self,
        before: &DiskBefore,
        after: &SnapshotId,
        limit: usize,
    ) -> Result<MachineChanges, ProviderError> {
        let before = match before.clone() {
            DiskBefore::Snapshot(snapshot) => Before::Snapshot(snapshot),
            DiskBefore::BeginningOf(snapshot) => Before::BeginningOf(snapshot),
        };
        let (doing, after) = ("cannot compare two snapshots".to_owned(), after.clone());
        let changes =
            self.engine(doing, move |engine| engine.changes(&before, &after, limit)).await?;
        Ok(MachineChanges {
            items: changes.entries.into_iter().map(told).collect(),
            added: changes.added,
            changed: changes.changed,
            removed: changes.removed,
            cut: changes.cut,
        })
    }
}

fn told(change: Change) -> MachineChange {
    let path = Path::new("/").join(&change.path);
    let text = path.to_str().map(str::to_owned);
    MachineChange {
        path_base64: text.is_none().then(|| BASE64_STANDARD.encode(path.as_os_str().as_bytes())),
        path: text.unwrap_or_else(|| path.to_string_lossy().into_owned()),
        change: match change.how {
            How::Added => ChangeKind::Added,
            How::Changed => ChangeKind::Changed,
            How::Removed => ChangeKind::Removed,
        },
        kind: change.kind.to_owned(),
        before_bytes: change.before,
        after_bytes: change.after,
    }
}
