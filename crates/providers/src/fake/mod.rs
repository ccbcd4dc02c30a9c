//! A provider without a machine: sandboxes are entries in memory, each with a small supervisor that
//! speaks the real frames. For tests of everything above a provider; it outlives the server that uses
//! it, as real sandboxes do.
//!
//! What a turn does is told by its prompt's first word: `hold` waits for [`Fake::release`] or a stop,
//! `deaf` waits and ignores stops, `ask` asks a question, `fail` fails, `write PATH TEXT` writes a file;
//! anything else is echoed.

mod commands;
mod connection;
mod disks;
mod machine;
mod machines;

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
        BridgeStream, Found, Freezing, Provider, ProviderError, Snapshots, StartFrom, StartOrder,
        Started,
    },
};

use machine::Machine;

/// What a disk holds.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// A provider without a machine. Cheap to clone; all clones are one.
#[derive(Clone, Default)]
pub struct Fake {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    sandboxes: BTreeMap<SandboxId, Arc<Machine>>,
    snapshots: BTreeMap<SnapshotId, (Files, SnapshotKind)>,
    missing_images: BTreeSet<String>,
    orders: Vec<StartOrder>,
    runs: Arc<Mutex<Vec<PromptId>>>,
    failing: BTreeSet<Act>,
    boots: Boots,
    /// The store that has these disks.
    store: Option<String>,
    /// Repositories whose state was removed.
    states_removed: Vec<String>,
    sweeps: usize,
    own: machines::Own,
}

/// How booting goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Boots {
    #[default]
    Good,
    Failing,
    Hanging,
}

/// What can be made to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Act {
    /// Starting a sandbox.
    Start,
    /// Dialling one.
    Dial,
    /// Keeping one that runs.
    Capture,
    /// Ending and keeping one.
    EndKept,
    /// Ending one.
    End,
    /// Removing a snapshot.
    Remove,
    /// Making one stand still.
    Freeze,
}

impl Fake {
    /// Nothing in it yet. It has an image of every name but `no-such-image`.
    #[must_use]
    pub fn new() -> Self {
        let fake = Self::default();
        fake.forget_image("no-such-image");
        fake
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of this lock can panic")
    }

    /// From now on this fails, or works again.
    pub fn set_failing(&self, act: Act, failing: bool) {
        let mut inner = self.inner();
        if failing {
            inner.failing.insert(act);
        } else {
            inner.failing.remove(&act);
        }
    }

    /// From now on, booting fails in its setup phase, or works again.
    pub fn set_boots_failing(&self, failing: bool) {
        self.inner().boots = if failing { Boots::Failing } else { Boots::Good };
    }

    /// From now on, booting begins and never ends.
    pub fn set_boots_hanging(&self) {
        self.inner().boots = Boots::Hanging;
    }

    /// From now on there is no image of this name.
    pub fn forget_image(&self, name: &str) {
        self.inner().missing_images.insert(name.to_owned());
    }

    /// Every sandbox that was asked for, in order.
    #[must_use]
    pub fn orders(&self) -> Vec<StartOrder> {
        self.inner().orders.clone()
    }

    /// Every prompt that was begun anywhere, in order. One that is here twice has run twice.
    #[must_use]
    pub fn runs(&self) -> Vec<PromptId> {
        self.inner().runs.lock().expect("no holder of this lock can panic").clone()
    }

    /// The snapshots there are, and why they were taken.
    #[must_use]
    pub fn kept(&self) -> Vec<(SnapshotId, SnapshotKind)> {
        self.inner().snapshots.iter().map(|(id, (_, kind))| (id.clone(), *kind)).collect()
    }

    /// What a file of a sandbox holds.
    #[must_use]
    pub fn file(&self, sandbox: &SandboxId, path: &str) -> Option<Vec<u8>> {
        self.machine(sandbox).ok()?.files().get(path).cloned()
    }

    /// What a sandbox was told to get ready, if it was.
    #[must_use]
    pub fn boot(&self, sandbox: &SandboxId) -> Option<Boot> {
        self.machine(sandbox).ok()?.booted()
    }

    /// The turn that holds in this sandbox ends well.
    pub fn release(&self, sandbox: &SandboxId) {
        if let Ok(machine) = self.machine(sandbox) {
            machine.release();
        }
    }

    /// The sandbox dies, as if the machine had killed it.
    pub fn crash(&self, sandbox: &SandboxId, reason: &str) {
        if let Ok(machine) = self.machine(sandbox) {
            machine.die(reason);
        }
    }

    /// Every connection to the sandbox breaks; the sandbox goes on.
    pub fn drop_connections(&self, sandbox: &SandboxId) {
        if let Ok(machine) = self.machine(sandbox) {
            machine.drop_connections();
        }
    }

    /// So many detached commands run in the sandbox from now on.
    pub fn set_detached(&self, sandbox: &SandboxId, count: u32) {
        if let Ok(machine) = self.machine(sandbox) {
            machine.set_detached(count);
        }
    }

    /// Whether what runs in the sandbox stands still: no command and no turn begins in it.
    #[must_use]
    pub fn is_still(&self, sandbox: &SandboxId) -> bool {
        self.machine(sandbox).is_ok_and(|machine| machine.is_still())
    }

    fn set_still(&self, sandbox: &SandboxId, still: bool) -> Result<(), ProviderError> {
        let machine = self.machine(sandbox)?;
        if machine.ended().is_some() {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        }
        machine.set_still(still);
        Ok(())
    }

    fn machine(&self, sandbox: &SandboxId) -> Result<Arc<Machine>, ProviderError> {
        let inner = self.inner();
        inner
            .sandboxes
            .get(sandbox)
            .cloned()
            .ok_or_else(|| ProviderError::NotRunning { sandbox: sandbox.clone() })
    }

    fn check(&self, act: Act) -> Result<(), ProviderError> {
        if self.inner().failing.contains(&act) {
            let source = std::io::Error::other("told to fail").into();
            return Err(ProviderError::Machine { doing: format!("{act:?}"), source });
        }
        Ok(())
    }
}

fn door(sandbox: &SandboxId) -> Started {
    Started { door: format!("/nowhere/{}/door.sock", sandbox.part()).into() }
}

#[async_trait]
impl Provider for Fake {
    async fn start(&self, order: StartOrder) -> Result<Started, ProviderError> {
        self.check(Act::Start)?;
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
        let machine = Machine::new(files, Arc::clone(&inner.runs), inner.boots);
        inner.sandboxes.insert(order.sandbox.clone(), Arc::new(machine));
        let started = door(&order.sandbox);
        inner.orders.push(order);
        Ok(started)
    }

    async fn find(&self, sandbox: &SandboxId) -> Result<Found, ProviderError> {
        Ok(match self.machine(sandbox) {
            Err(_) => Found::Gone,
            Ok(machine) => match machine.ended() {
                Some(reason) => Found::Dead { reason },
                None => Found::Running(door(sandbox)),
            },
        })
    }

    async fn dial(&self, sandbox: &SandboxId) -> Result<Box<dyn BridgeStream>, ProviderError> {
        self.check(Act::Dial)?;
        let machine = self.machine(sandbox)?;
        if machine.ended().is_some() {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        }
        let (ours, theirs) = tokio::io::duplex(256 * 1024);
        tokio::spawn(connection::serve(machine, theirs));
        Ok(Box::new(ours))
    }

    async fn ended(&self, sandbox: &SandboxId) -> Result<String, ProviderError> {
        let machine = self.machine(sandbox)?;
        Ok(machine.wait().await)
    }

    async fn end_kept(
        &self,
        sandbox: &SandboxId,
        snapshot: &SnapshotId,
        kind: SnapshotKind,
    ) -> Result<(), ProviderError> {
        self.check(Act::EndKept)?;
        let mut inner = self.inner();
        let Some(machine) = inner.sandboxes.remove(sandbox) else {
            // Idempotent: it was kept under this id before.
            if inner.snapshots.contains_key(snapshot) {
                return Ok(());
            }
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        };
        machine.die("ended");
        inner.snapshots.insert(snapshot.clone(), (machine.files().clone(), kind));
        Ok(())
    }

    async fn end(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        self.check(Act::End)?;
        if let Some(machine) = self.inner().sandboxes.remove(sandbox) {
            machine.die("ended");
        }
        Ok(())
    }

    async fn list(&self) -> Result<Vec<SandboxId>, ProviderError> {
        // Those people made for themselves are none of the sessions' business.
        let inner = self.inner();
        Ok(inner.sandboxes.keys().filter(|id| !inner.own.has(id)).cloned().collect())
    }

    async fn others(&self) -> Result<Vec<(SandboxId, Option<String>)>, ProviderError> {
        let inner = self.inner();
        let runs = |id: &SandboxId| {
            inner.sandboxes.get(id).is_some_and(|machine| machine.ended().is_none())
        };
        let kept = inner.own.kept().filter(|(id, _)| runs(id));
        Ok(kept.map(|(id, user)| (id.clone(), user.cloned())).collect())
    }

    async fn holds(&self, from: &StartFrom) -> Result<bool, ProviderError> {
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

    fn freezing(&self) -> Option<&dyn Freezing> {
        Some(self)
    }
}

#[async_trait]
impl Freezing for Fake {
    async fn freeze(&self, sandbox: &SandboxId, hold: Duration) -> Result<(), ProviderError> {
        self.check(Act::Freeze)?;
        self.set_still(sandbox, true)?;
        let machine = self.machine(sandbox)?;
        let asked = machine.freezes();
        tokio::spawn(async move {
            tokio::time::sleep(hold).await;
            if machine.freezes() == asked {
                machine.set_still(false);
            }
        });
        Ok(())
    }

    async fn thaw(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        self.set_still(sandbox, false)
    }

    async fn rouse(&self, sandbox: &SandboxId) -> Result<(), ProviderError> {
        // A disk is kept in no time here.
        self.set_still(sandbox, false)
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
        self.check(Act::Capture)?;
        let machine = self.machine(sandbox)?;
        if machine.ended().is_some() {
            return Err(ProviderError::NotRunning { sandbox: sandbox.clone() });
        }
        let files = machine.files().clone();
        self.inner().snapshots.entry(snapshot.clone()).or_insert((files, kind));
        Ok(0)
    }

    async fn remove(&self, snapshot: &SnapshotId) -> Result<(), ProviderError> {
        self.check(Act::Remove)?;
        self.inner().snapshots.remove(snapshot);
        Ok(())
    }
}
