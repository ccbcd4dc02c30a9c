//! A server that is killed at a certain step: before or after a call of its provider or a write of
//! its store. Nothing of the server goes on.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use harvest_gateway::DoorListener;
use harvest_proto::{
    SandboxId, SnapshotId,
    api::{Sandbox, SandboxList},
    event::SnapshotKind,
};
use harvest_providers::Fake;
use harvest_session::{
    Store,
    sandboxes::{
        BridgeStream, Created, Found, FreezeControl, ListedSandbox, SandboxError, SandboxProvider,
        SandboxSpec, Snapshots, StartFrom,
    },
};
use tokio::sync::Notify;

/// Stops everything that calls it at a certain step.
pub(crate) struct Fuse {
    at: usize,
    steps: AtomicUsize,
    blown: Notify,
}

impl Fuse {
    pub(crate) fn new(at: usize) -> Arc<Self> {
        Arc::new(Self { at, steps: AtomicUsize::default(), blown: Notify::new() })
    }

    /// Returns when the server has to be killed.
    pub(crate) async fn blown(&self) {
        self.blown.notified().await;
    }

    async fn step(&self) {
        if self.steps.fetch_add(1, Ordering::SeqCst) == self.at {
            self.blown.notify_one();
            std::future::pending::<()>().await;
        }
    }

    /// The store, with a step before and after each write.
    pub(crate) fn store(self: &Arc<Self>, store: Store) -> Store {
        let fuse = Arc::clone(self);
        store.with_write_steps(Arc::new(move || {
            let fuse = Arc::clone(&fuse);
            Box::pin(async move { fuse.step().await })
        }))
    }
}

/// A provider with a step before and after each call.
pub(crate) struct Fused {
    fake: Arc<dyn SandboxProvider>,
    fuse: Arc<Fuse>,
}

impl Fused {
    pub(crate) fn new(fake: Fake, fuse: &Arc<Fuse>) -> Self {
        Self { fake: Arc::new(fake), fuse: Arc::clone(fuse) }
    }

    async fn call<T>(&self, call: impl Future<Output = T>) -> T {
        self.fuse.step().await;
        let result = call.await;
        self.fuse.step().await;
        result
    }

    fn freezes(&self) -> &dyn FreezeControl {
        self.fake.freeze_control().expect("the fake freezes")
    }
}

#[async_trait]
impl SandboxProvider for Fused {
    fn name(&self) -> &'static str {
        self.fake.name()
    }

    async fn create(&self, spec: SandboxSpec) -> Result<Created, SandboxError> {
        self.call(self.fake.create(spec)).await
    }

    async fn find(&self, sandbox: &SandboxId) -> Result<Found, SandboxError> {
        self.call(self.fake.find(sandbox)).await
    }

    async fn get(&self, sandbox: &SandboxId) -> Result<Sandbox, SandboxError> {
        self.fake.get(sandbox).await
    }

    async fn get_all(&self) -> Result<SandboxList, SandboxError> {
        self.fake.get_all().await
    }

    async fn list(&self) -> Result<Vec<ListedSandbox>, SandboxError> {
        self.fake.list().await
    }

    async fn connect(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, SandboxError> {
        self.call(self.fake.connect(sandbox)).await
    }

    async fn listen(&self, sandbox: &SandboxId) -> Result<Box<dyn DoorListener>, SandboxError> {
        self.call(self.fake.listen(sandbox)).await
    }

    async fn wait(&self, sandbox: &SandboxId) -> Result<String, SandboxError> {
        self.fake.wait(sandbox).await
    }

    async fn stop(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.call(self.fake.stop(sandbox)).await
    }

    async fn restart(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.fake.restart(sandbox).await
    }

    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), SandboxError> {
        self.call(self.fake.snapshot_and_remove(sandbox, snapshot, kind)).await
    }

    async fn remove(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.call(self.fake.remove(sandbox)).await
    }

    async fn agents(
        &self,
        from: &StartFrom,
    ) -> Result<Option<BTreeMap<String, String>>, SandboxError> {
        self.fake.agents(from).await
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        self.fake.snapshots()
    }

    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        Some(self)
    }
}

#[async_trait]
impl FreezeControl for Fused {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), SandboxError> {
        self.call(self.freezes().freeze(sandbox, hold)).await
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.call(self.freezes().thaw(sandbox)).await
    }

    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), SandboxError> {
        self.call(self.freezes().thaw_unless_saving(sandbox)).await
    }
}
