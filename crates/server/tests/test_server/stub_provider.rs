//! A provider without images, doors or a forge: sessions can be created but fail to start.

use std::{
    any::Any,
    io,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use async_trait::async_trait;
use harvest_gateway::ledger::DoorPolicy;
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{Evidence, PullRequest},
    event::SnapshotKind,
};
use harvest_session::{
    Doors, Forge, ForgeFailure, PullRequestSpec,
    provider::{
        BridgeStream, Found, FreezeControl, Provider, ProviderError, Snapshots, StartFrom,
        StartSpec, Started,
    },
};

#[derive(Default)]
pub(super) struct StubProvider {
    failing: AtomicBool,
}

impl StubProvider {
    /// Makes every later call fail.
    pub(super) fn fail(&self) {
        self.failing.store(true, Ordering::SeqCst);
    }
}

fn not_running<T>(sandbox: &SandboxId) -> Result<T, ProviderError> {
    Err(ProviderError::NotRunning { sandbox: sandbox.clone() })
}

#[async_trait]
impl Provider for StubProvider {
    async fn start(&self, _: StartSpec) -> Result<Started, ProviderError> {
        Err(ProviderError::ImageMissing { image: "claude".into() })
    }

    async fn find(&self, _: &SandboxId) -> Result<Found, ProviderError> {
        Ok(Found::Gone)
    }

    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError> {
        not_running(sandbox)
    }

    async fn wait_for_exit(&self, sandbox: &SandboxId) -> Result<String, ProviderError> {
        not_running(sandbox)
    }

    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        _: &SnapshotId,
        _: SnapshotKind,
    ) -> Result<(), ProviderError> {
        not_running(sandbox)
    }

    async fn remove(&self, _: &SandboxId) -> Result<(), ProviderError> {
        Ok(())
    }

    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError> {
        match self.failing.load(Ordering::SeqCst) {
            true => Err(ProviderError::ImageMissing { image: "none".into() }),
            false => Ok(vec![]),
        }
    }

    async fn can_start_from(&self, _: &StartFrom) -> Result<bool, ProviderError> {
        Ok(false)
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        None
    }

    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        None
    }
}

impl Doors for StubProvider {
    fn open(&self, _: &Path, _: DoorPolicy) -> io::Result<Box<dyn Any + Send>> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[async_trait]
impl Forge for StubProvider {
    async fn open_pull_request(
        &self,
        _: PullRequestSpec,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        Ok(None)
    }

    async fn set_evidence(&self, _: &str, _: u64, _: Evidence) -> Result<(), ForgeFailure> {
        Ok(())
    }
}
