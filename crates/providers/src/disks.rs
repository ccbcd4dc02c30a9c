//! The disks of this machine, by the engine.

use std::thread;

use async_trait::async_trait;
use harvest_engine::VolumeName;
use harvest_session::{
    disks::{Disks, KeptDisk},
    provider::ProviderError,
};
use tokio::sync::oneshot;

use crate::Local;

#[async_trait]
impl Disks for Local {
    async fn belongs_to(&self, store: &str) -> Result<bool, ProviderError> {
        let store = store.to_owned();
        self.engine("cannot tell whose disks these are".into(), move |engine| engine.belongs_to(&store)).await
    }

    async fn list(&self) -> Result<Vec<KeptDisk>, ProviderError> {
        let snapshots = self.engine("cannot list snapshots".into(), |engine| engine.snapshots()).await?;
        let ours = snapshots.into_iter().filter(|snapshot| snapshot.of_sessions);
        let disk = |snapshot: harvest_engine::Snapshot| KeptDisk {
            id: snapshot.id,
            bytes: snapshot.bytes.unwrap_or(0),
            created_at: snapshot.created_at,
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
            Ok(Err(error)) => Err(ProviderError::Machine { doing: doing(), source: Box::new(error) }),
            Err(gone) => Err(ProviderError::Machine { doing: doing(), source: gone.into() }),
        }
    }

    async fn state_remove(&self, repository: &str) -> Result<(), ProviderError> {
        let name = VolumeName::of_repository(repository);
        let doing = format!("cannot remove the state of repository {repository}");
        self.engine(doing, move |engine| engine.volume_remove(&name)).await
    }
}
