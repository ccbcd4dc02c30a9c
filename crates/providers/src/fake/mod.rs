//! An in-memory provider for tests. Each sandbox has a small supervisor that speaks the real bridge
//! protocol. Like real sandboxes, it outlives the server that uses it.
//!
//! The first word of a prompt selects what the turn does: `hold` waits for [`Fake::finish_turn`] or
//! a stop, `deaf` waits and ignores stops, `ask` asks a question, `fail` fails, `refuse` is
//! refused, `long BYTES` produces a blob, `write PATH TEXT` writes a file; anything else is echoed.

mod commands;
mod connection;
mod disks;
mod sandbox;
mod standalone;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use async_trait::async_trait;
use harvest_proto::{PromptId, SandboxId, SnapshotId, bridge::Boot, event::SnapshotKind};
use harvest_session::{
    disks::Disks,
    provider::{
        BridgeStream, Found, FreezeControl, Provider, ProviderError, Snapshots, StartFrom,
        StartSpec, Started,
    },
};

use sandbox::FakeSandbox;

/// The content of a disk.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// An in-memory provider. Clones share one state.
#[derive(Clone, Default)]
pub struct Fake {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    sandboxes: BTreeMap<SandboxId, Arc<FakeSandbox>>,
    snapshots: BTreeMap<SnapshotId, (Files, SnapshotKind)>,
    missing_images: BTreeSet<String>,
    starts: Vec<StartSpec>,
    prompts_run: Arc<Mutex<Vec<PromptId>>>,
    failing: BTreeSet<FakeOp>,
    boot: BootBehavior,
    /// The store that owns these disks.
    store: Option<String>,
    states_removed: Vec<String>,
    reclaims: usize,
    standalone: standalone::StandaloneState,
}

/// How a sandbox boots.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum BootBehavior {
    #[default]
    Succeeding,
    Failing,
    Hanging,
}

/// An operation that can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FakeOp {
    Start,
    Dial,
    Capture,
    SnapshotAndRemove,
    Remove,
    SnapshotRemove,
    Freeze,
}

impl Fake {
    /// An empty provider with an image of every name except `no-such-image`.
    #[must_use]
    pub fn new() -> Self {
        let fake = Self::default();
        fake.remove_image("no-such-image");
        fake
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock can panic")
    }

    /// Makes an operation fail, or work again.
    pub fn set_failing(&self, op: FakeOp, failing: bool) {
        let mut inner = self.inner();
        if failing {
            inner.failing.insert(op);
        } else {
            inner.failing.remove(&op);
        }
    }

    /// Makes boots fail in the setup phase, or work again.
    pub fn set_boot_failing(&self, failing: bool) {
        self.inner().boot = if failing { BootBehavior::Failing } else { BootBehavior::Succeeding };
    }

    /// Makes boots start and never end.
    pub fn set_boot_hanging(&self) {
        self.inner().boot = BootBehavior::Hanging;
    }

    pub fn remove_image(&self, name: &str) {
        self.inner().missing_images.insert(name.to_owned());
    }

    /// Every started sandbox, in order.
    #[must_use]
    pub fn starts(&self) -> Vec<StartSpec> {
        self.inner().starts.clone()
    }

    /// Every prompt that started in any sandbox, in order; listed twice if it ran twice.
    #[must_use]
    pub fn prompts_run(&self) -> Vec<PromptId> {
        self.inner().prompts_run.lock().expect("no holder of this lock can panic").clone()
    }

    /// The existing snapshots with their kinds.
    #[must_use]
    pub fn snapshots_taken(&self) -> Vec<(SnapshotId, SnapshotKind)> {
        self.inner().snapshots.iter().map(|(id, (_, kind))| (id.clone(), *kind)).collect()
    }

    /// The content of a file in a sandbox.
    #[must_use]
    pub fn file(&self, sandbox: &SandboxId, path: &str) -> Option<Vec<u8>> {
        self.sandbox(sandbox).ok()?.files().get(path).cloned()
    }

    /// The boot request of a sandbox, if it got one.
    #[must_use]
    pub fn boot(&self, sandbox: &SandboxId) -> Option<Boot> {
        self.sandbox(sandbox).ok()?.booted()
    }

    /// Completes the `hold` turn of a sandbox.
    pub fn finish_turn(&self, sandbox: &SandboxId) {
        if let Ok(fake_sandbox) = self.sandbox(sandbox) {
            fake_sandbox.finish_turn();
        }
    }

    /// The sandbox exits, as if the host had killed it.
    pub fn crash(&self, sandbox: &SandboxId, reason: &str) {
        if let Ok(fake_sandbox) = self.sandbox(sandbox) {
            fake_sandbox.die(reason);
        }
    }

    /// Breaks every connection to the sandbox, which keeps running.
    pub fn drop_connections(&self, sandbox: &SandboxId) {
        if let Ok(fake_sandbox) = self.sandbox(sandbox) {
            fake_sandbox.drop_connections();
        }
    }

    /// Sets the number of detached commands that the sandbox reports.
    pub fn set_detached(&self, sandbox: &SandboxId, count: u32) {
        if let Ok(fake_sandbox) = self.sandbox(sandbox) {
            fake_sandbox.set_detached(count);
        }
    }

    /// Whether the sandbox is frozen: no command and no turn starts in it.
    #[must_use]
    pub fn is_frozen(&self, sandbox: &SandboxId) -> bool {
        self.sandbox(sandbox).is_ok_and(|fake_sandbox| fake_sandbox.is_frozen())
    }

    fn set_frozen(&self, sandbox: &SandboxId, frozen: bool) -> Result<(), ProviderError> {
        let fake_sandbox = self.sandbox(sandbox)?;
        if fake_sandbox.ended().is_some() {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        }
        fake_sandbox.set_frozen(frozen);
        Ok(())
    }

    fn sandbox(&self, sandbox: &SandboxId) -> Result<Arc<FakeSandbox>, ProviderError> {
        let inner = self.inner();
        inner
            .sandboxes
            .get(sandbox)
            .cloned()
            .ok_or_else(|| ProviderError::NotRunning { sandbox: sandbox.clone() })
    }

    fn check(&self, op: FakeOp) -> Result<(), ProviderError> {
        if self.inner().failing.contains(&op) {
            let source = std::io::Error::other("made to fail by the test").into();
            return Err(ProviderError::Failed { doing: format!("{op:?}"), source });
        }
        Ok(())
    }
}

fn door(sandbox: &SandboxId) -> Started {
    Started { door: format!("/nowhere/{}/door.sock", sandbox.part()).into() }
}

#[async_trait]
impl Provider for Fake {
    async fn start(&self, order: StartSpec) -> Result<Started, ProviderError> {
        self.check(FakeOp::Start)?;
        let mut inner = self.inner();
        let files = match &order.from {
            StartFrom::Image(image) if inner.missing_images.contains(image) => {
                return Err(ProviderError::ImageMissing { image: image.clone() });
            }
            StartFrom::Image(_) => Files::new(),
            StartFrom::Snapshot(snapshot) => match inner.snapshots.get(snapshot) {
                Some((files, _)) => files.clone(),
                None => return Err(ProviderError::SnapshotMissing { snapshot: snapshot.clone() }),
            },
        };
        let fake_sandbox = FakeSandbox::new(files, Arc::clone(&inner.prompts_run), inner.boot);
        inner.sandboxes.insert(order.sandbox.clone(), Arc::new(fake_sandbox));
        let started = door(&order.sandbox);
        inner.starts.push(order);
        Ok(started)
    }

    async fn find(&self, sandbox: &SandboxId) -> Result<Found, ProviderError> {
        Ok(match self.sandbox(sandbox) {
            Err(_) => Found::Gone,
            Ok(fake_sandbox) => match fake_sandbox.ended() {
                Some(reason) => Found::Dead { reason },
                None => Found::Running(door(sandbox)),
            },
        })
    }

    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError> {
        self.check(FakeOp::Dial)?;
        let fake_sandbox = self.sandbox(sandbox)?;
        if fake_sandbox.ended().is_some() {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        }
        let (ours, theirs) = tokio::io::duplex(256 * 1024);
        tokio::spawn(connection::serve(fake_sandbox, theirs));
        Ok(Box::new(ours))
    }

    async fn wait_for_exit(&self, sandbox: &SandboxId) -> Result<String, ProviderError> {
        let fake_sandbox = self.sandbox(sandbox)?;
        Ok(fake_sandbox.wait().await)
    }

    async fn snapshot_and_remove(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), ProviderError> {
        self.check(FakeOp::SnapshotAndRemove)?;
        let mut inner = self.inner();
        let Some(fake_sandbox) = inner.sandboxes.remove(sandbox) else {
            // Idempotent: an earlier call took this snapshot.
            if inner.snapshots.contains_key(snapshot) {
                return Ok(());
            }
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        };
        fake_sandbox.die("removed");
        inner.snapshots.insert(snapshot.clone(), (fake_sandbox.files().clone(), kind));
        Ok(())
    }

    async fn remove(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        self.check(FakeOp::Remove)?;
        if let Some(fake_sandbox) = self.inner().sandboxes.remove(sandbox) {
            fake_sandbox.die("removed");
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError> {
        // Standalone sandboxes are not listed.
        let inner = self.inner();
        Ok(inner.sandboxes.keys().filter(|id| !inner.standalone.has(id)).cloned().collect())
    }

    async fn list_standalone(&self) -> Result<Vec<(SandboxId, Option<String>)>, ProviderError> {
        let inner = self.inner();
        let runs = |id: &SandboxId| {
            inner.sandboxes.get(id).is_some_and(|fake_sandbox| fake_sandbox.ended().is_none())
        };
        let permanent = inner.standalone.permanent().filter(|(id, _)| runs(id));
        Ok(permanent.map(|(id, user)| (id.clone(), user.cloned())).collect())
    }

    async fn can_start_from(&self, from: &StartFrom) -> Result<bool, ProviderError> {
        let inner = self.inner();
        Ok(match from {
            StartFrom::Image(image) => !inner.missing_images.contains(image),
            StartFrom::Snapshot(snapshot) => inner.snapshots.contains_key(snapshot),
        })
    }

    fn snapshots(&self) -> Option<&dyn Snapshots> {
        Some(self)
    }

    fn disks(&self) -> Option<&dyn Disks> {
        Some(self)
    }

    fn freeze_control(&self) -> Option<&dyn FreezeControl> {
        Some(self)
    }
}

#[async_trait]
impl FreezeControl for Fake {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), ProviderError> {
        self.check(FakeOp::Freeze)?;
        self.set_frozen(sandbox, true)?;
        let fake_sandbox = self.sandbox(sandbox)?;
        let freezes = fake_sandbox.freezes();
        tokio::spawn(async move {
            tokio::time::sleep(hold).await;
            if fake_sandbox.freezes() == freezes {
                fake_sandbox.set_frozen(false);
            }
        });
        Ok(())
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        self.set_frozen(sandbox, false)
    }

    async fn thaw_unless_saving(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        // A snapshot takes no time here.
        self.set_frozen(sandbox, false)
    }
}

#[async_trait]
impl Snapshots for Fake {
    async fn capture(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<u64, ProviderError> {
        self.check(FakeOp::Capture)?;
        let fake_sandbox = self.sandbox(sandbox)?;
        if fake_sandbox.ended().is_some() {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        }
        let files = fake_sandbox.files().clone();
        self.inner().snapshots.entry(snapshot.clone()).or_insert((files, kind));
        Ok(0)
    }

    async fn snapshot_remove(&self, snapshot: &SnapshotId) -> Result<(), ProviderError> {
        self.check(FakeOp::SnapshotRemove)?;
        self.inner().snapshots.remove(snapshot);
        Ok(())
    }
}
