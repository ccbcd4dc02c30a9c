//! A machine without an image, a door or a forge: sessions can be created, and fail to start.

use std::{
    any::Any,
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use async_trait::async_trait;
use harvest_gateway::ledger::Pass;
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{Evidence, Pull},
    event::SnapshotKind,
};
use harvest_session::{
    Doors, PullOrder, Pulls, PullsError,
    provider::{
        BridgeStream, Found, Freezing, Provider, ProviderError, Snapshots, StartFrom, StartOrder,
        Started,
    },
};

#[derive(Default)]
pub(super) struct Bare {
    broken: AtomicBool,
}

impl Bare {
    /// From now on nothing answers.
    pub(super) fn break_down(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }
}

fn not_running<T>(sandbox: &SandboxId) -> Result<T, ProviderError> {
    Err(ProviderError::NotRunning { sandbox: sandbox.clone() })
}

#[async_trait]
impl Provider for Bare {
    async fn start(&self, _: StartOrder) -> Result<Started, ProviderError> {
        Err(ProviderError::ImageMissing { image: "claude".into() })
    }

    async fn find(&self, _: &SandboxId) -> Result<Found, ProviderError> {
        Ok(Found::Gone)
    }

    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError> {
        not_running(sandbox)
    }

    async fn ended(&self, sandbox: &SandboxId) -> Result<String, ProviderError> {
        not_running(sandbox)
    }

    async fn end_kept(
        &self,
        sandbox: &SandboxId,
        _: &SnapshotId,
        _: SnapshotKind,
    ) -> Result<(), ProviderError> {
        not_running(sandbox)
    }

    async fn end(&self, _: &SandboxId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError> {
        match self.broken.load(Ordering::SeqCst) {
            true => Err(ProviderError::ImageMissing { image: "none".into() }),
            false => Ok(vec![]),
        }
    }

    async fn holds(&self, _: &StartFrom) -> Result<bool, ProviderError> {
        Ok(false)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }

    fn freezing(&self) -> Option<&dyn Freezing> {
        None
    }
}

impl Doors for Bare {
    fn open(&self, _: &Path, _: Pass) -> io::Result<Box<dyn Any + Send>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[async_trait]
impl Pulls for Bare {
    async fn open(&self, _: PullOrder) -> Result<Option<Pull>, PullsError> {
        Ok(None)
    }

    async fn set_evidence(&self, _: &str, _: u64, _: Evidence) -> Result<(), PullsError> {
        Ok(())
    }
}
