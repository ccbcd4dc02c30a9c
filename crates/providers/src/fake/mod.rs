//! An in-memory provider for tests. Each sandbox has a small supervisor that speaks the real bridge
//! protocol. Like real sandboxes, it outlives the server that uses it.
//!
//! The first word of a prompt selects what the turn does: `hold` waits for [`Fake::finish_turn`] or
//! a stop, `deaf` waits and ignores stops, `ask` asks a question, `fail` fails, `refuse` is
//! refused, `long BYTES` produces a blob, `write PATH TEXT` writes a file, `options` tells the
//! agent, model and effort of the turn; anything else is echoed. A sync ends as the file
//! [`SYNC_FILE`] says: `rebased`, `conflict` or `failed`.

mod commands;
mod connection;
mod host;
mod provider;
mod sandbox;
mod snapshots;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard},
};

use harvest_proto::{
    PromptId, RepositoryName, SandboxId, SnapshotId, bridge::Boot, event::SnapshotKind,
};
use harvest_session::sandboxes::{SandboxError, SandboxSpec};
use tokio::sync::watch;

use sandbox::FakeSandbox;

/// The outcome of syncs; without it a checkout is up to date.
pub const SYNC_FILE: &str = "/sync";

/// What a script that runs apt prints.
const UPDATES_FILE: &str = "/updates";

/// The content of a disk.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// A sandbox that exited for this reason may have lost its last writes.
pub const POWER_CUT: &str = "power cut";

/// An in-memory provider. Clones share one state.
#[derive(Clone, Default)]
pub struct Fake {
    name: &'static str,
    inner: Arc<Mutex<Inner>>,
}

#[derive(Default)]
struct Inner {
    sandboxes: BTreeMap<SandboxId, (SandboxSpec, Arc<FakeSandbox>)>,
    /// Without a kind it belongs to a user.
    snapshots: BTreeMap<SnapshotId, (Files, Option<SnapshotKind>)>,
    /// Snapshots of sandboxes that a power cut ended.
    torn: BTreeSet<SnapshotId>,
    /// The disk of every image.
    image_files: Files,
    missing_images: BTreeSet<String>,
    missing_agents: BTreeSet<String>,
    broken_images: BTreeSet<String>,
    warnings: Vec<String>,
    created: Vec<SandboxSpec>,
    prompts_run: Arc<Mutex<Vec<PromptId>>>,
    failing: BTreeSet<FakeOp>,
    creates_held: watch::Sender<bool>,
    boot: BootBehavior,
    boot_cpu_micros: u64,
    /// The store that owns these disks.
    store: Option<String>,
    states_removed: Vec<RepositoryName>,
    reclaims: usize,
    host: host::HostState,
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
    Create,
    Connect,
    Capture,
    SnapshotAndRemove,
    Remove,
    List,
    SnapshotRemove,
    Freeze,
}

impl Fake {
    /// An empty provider with an image of every name except `no-such-image`.
    #[must_use]
    pub fn new() -> Self {
        Self::named("fake")
    }

    /// As [`Fake::new`], under another provider's name.
    #[must_use]
    pub fn named(name: &'static str) -> Self {
        let fake = Self { name, ..Self::default() };
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

    /// Makes starts wait, or continue.
    pub fn hold_creates(&self, held: bool) {
        self.inner().creates_held.send_replace(held);
    }

    /// Makes boots fail in the setup phase, or work again.
    pub fn set_boot_failing(&self, failing: bool) {
        self.inner().boot = if failing { BootBehavior::Failing } else { BootBehavior::Succeeding };
    }

    /// Makes sandboxes start with warnings about what they lack.
    pub fn set_warnings(&self, warnings: &[&str]) {
        self.inner().warnings = warnings.iter().map(|&warning| warning.to_owned()).collect();
    }

    /// Makes each sandbox that starts from now on use this much CPU time.
    pub fn set_boot_cpu(&self, micros: u64) {
        self.inner().boot_cpu_micros = micros;
    }

    /// Makes boots start and never end.
    pub fn set_boot_hanging(&self) {
        self.inner().boot = BootBehavior::Hanging;
    }

    /// Makes Debian have this many packages that are newer than those of every image.
    pub fn set_updates(&self, count: u32) {
        let count = count.to_string().into_bytes();
        self.inner().image_files.insert(UPDATES_FILE.to_owned(), count);
    }

    pub fn remove_image(&self, name: &str) {
        self.inner().missing_images.insert(name.to_owned());
    }

    /// Makes an image exist, but not when a sandbox starts from it.
    pub fn break_image(&self, name: &str) {
        self.inner().broken_images.insert(name.to_owned());
    }

    /// Removes an agent from every image and snapshot.
    pub fn remove_agent(&self, name: &str) {
        self.inner().missing_agents.insert(name.to_owned());
    }

    /// Every created sandbox, in order.
    #[must_use]
    pub fn created(&self) -> Vec<SandboxSpec> {
        self.inner().created.clone()
    }

    /// The sandboxes that exist, of any owner.
    #[must_use]
    pub fn sandboxes(&self) -> Vec<SandboxId> {
        self.inner().sandboxes.keys().cloned().collect()
    }

    /// Every prompt that started in any sandbox, in order; listed twice if it ran twice.
    #[must_use]
    pub fn prompts_run(&self) -> Vec<PromptId> {
        self.inner().prompts_run.lock().expect("no holder of this lock can panic").clone()
    }

    /// The existing snapshots of sessions with their kinds.
    #[must_use]
    pub fn snapshots_taken(&self) -> Vec<(SnapshotId, SnapshotKind)> {
        let inner = self.inner();
        let kinds = inner.snapshots.iter().map(|(id, (_, kind))| Some((id.clone(), (*kind)?)));
        kinds.flatten().collect()
    }

    /// The content of a file in a sandbox.
    #[must_use]
    pub fn file(&self, sandbox: &SandboxId, path: &str) -> Option<Vec<u8>> {
        self.sandbox(sandbox).ok()?.files().get(path).cloned()
    }

    /// The last boot request of a sandbox, if it got one.
    #[must_use]
    pub fn boot(&self, sandbox: &SandboxId) -> Option<Boot> {
        self.boots(sandbox).pop()
    }

    /// The boot requests of a sandbox that it acted on: one of the warm pool gets two.
    #[must_use]
    pub fn boots(&self, sandbox: &SandboxId) -> Vec<Boot> {
        self.sandbox(sandbox).map_or_else(|_| Vec::new(), |fake_sandbox| fake_sandbox.boots())
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

    /// The sandbox uses this much more CPU time.
    pub fn use_cpu(&self, sandbox: &SandboxId, micros: u64) {
        if let Ok(fake_sandbox) = self.sandbox(sandbox) {
            fake_sandbox.use_cpu(micros);
        }
    }

    /// Whether the sandbox is frozen: no command and no turn starts in it.
    #[must_use]
    pub fn is_frozen(&self, sandbox: &SandboxId) -> bool {
        self.sandbox(sandbox).is_ok_and(|fake_sandbox| fake_sandbox.is_frozen())
    }

    fn set_frozen(&self, sandbox: &SandboxId, frozen: bool) -> Result<(), SandboxError> {
        let fake_sandbox = self.sandbox(sandbox)?;
        if fake_sandbox.ended().is_some() {
            return Err(SandboxError::NotRunning { sandbox: sandbox.clone() });
        }
        fake_sandbox.set_frozen(frozen);
        Ok(())
    }

    fn sandbox(&self, sandbox: &SandboxId) -> Result<Arc<FakeSandbox>, SandboxError> {
        let inner = self.inner();
        inner
            .sandboxes
            .get(sandbox)
            .map(|(_, fake_sandbox)| Arc::clone(fake_sandbox))
            .ok_or_else(|| SandboxError::no_sandbox(sandbox))
    }

    fn check(&self, op: FakeOp) -> Result<(), SandboxError> {
        if self.inner().failing.contains(&op) {
            let source = std::io::Error::other("made to fail by the test");
            return Err(SandboxError::failed(format!("{op:?}"), source));
        }
        Ok(())
    }
}
