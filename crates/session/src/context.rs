//! The dependencies of sessions (provider, doors, forge, vault), which the binary provides, and the
//! context that all drivers share.

use std::{
    any::Any,
    collections::HashSet,
    io,
    path::Path,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use harvest_forge::{LocalForge, NewPullRequest};
use harvest_gateway::{
    Gateway,
    ledger::{DoorPolicy, GitAccess, ResolvedPolicy},
    vault::Vault,
};
use harvest_proto::{
    BranchName, ModelRef, NetworkPolicy, SandboxId, SessionId, Timestamp, Upstream,
    api::{Evidence, PullRequest, Repository},
};
use harvest_store::{Lease, SessionRecord, Store, StoreError};
use tokio::sync::Semaphore;
use tokio_util::{future::FutureExt as _, sync::CancellationToken, task::TaskTracker};

use crate::{
    admission::Admission, admission::Limits, metrics::Metrics, monotonic_clock::MonotonicClock,
    provider::Provider, retention::Retention, timeouts::Timeouts,
};

/// Opens doors for sandboxes.
pub trait Doors: Send + Sync {
    /// Serves one sandbox's door until the returned guard is dropped.
    ///
    /// # Errors
    /// When the socket cannot be created.
    fn open(&self, socket: &Path, pass: DoorPolicy) -> io::Result<Box<dyn Any + Send>>;
}

impl Doors for Gateway {
    fn open(&self, socket: &Path, pass: DoorPolicy) -> io::Result<Box<dyn Any + Send>> {
        Ok(Box::new(Self::open(self, socket, pass)?))
    }
}

/// A pull request to open or to update.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullRequestSpec {
    /// Of the repository.
    pub url: String,
    pub title: String,
    pub body: String,
    /// The head branch.
    pub branch: String,
    /// The base branch.
    pub base: String,
}

/// Where pull requests live.
#[async_trait]
pub trait Forge: Send + Sync {
    /// Opens a pull request, or updates the branch's open one. `None` when the repository belongs
    /// to no known forge.
    async fn open_pull_request(
        &self,
        spec: PullRequestSpec,
    ) -> Result<Option<PullRequest>, ForgeFailure>;

    /// Shows the result of the check on a pull request.
    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), ForgeFailure>;

    /// A URL to store: the forge's own URLs may change with the server's address.
    fn stable_url(&self, url: &str) -> String {
        url.to_owned()
    }

    /// The current form of a stored URL.
    fn current_url(&self, url: &str) -> String {
        url.to_owned()
    }

    /// Blocks the registration of repositories until the guard is dropped; fails during one.
    fn try_lock(&self) -> Result<Box<dyn std::any::Any + Send>, ForgeFailure> {
        Ok(Box::new(()))
    }

    /// Removes a repository from the forge; returns whether it belonged to it. Idempotent.
    async fn remove_repository(&self, _url: &str) -> Result<bool, ForgeFailure> {
        Ok(false)
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the forge failed")]
pub struct ForgeFailure(#[source] pub Box<dyn std::error::Error + Send + Sync>);

#[async_trait]
impl Forge for LocalForge {
    async fn open_pull_request(
        &self,
        spec: PullRequestSpec,
    ) -> Result<Option<PullRequest>, ForgeFailure> {
        let Some(name) = self.repository_name(&spec.url) else { return Ok(None) };
        let PullRequestSpec { title, body, branch, base, .. } = spec;
        let pull =
            self.open_pull_request(&name, NewPullRequest { title, body, branch, base }).await;
        pull.map(Some).map_err(|error| ForgeFailure(Box::new(error)))
    }

    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), ForgeFailure> {
        let Some(name) = self.repository_name(url) else { return Ok(()) };
        Self::set_evidence(self, &name, number, evidence)
            .await
            .map(drop)
            .map_err(|error| ForgeFailure(Box::new(error)))
    }

    fn stable_url(&self, url: &str) -> String {
        Self::stable_url(self, url)
    }

    fn current_url(&self, url: &str) -> String {
        Self::current_url(self, url)
    }

    fn try_lock(&self) -> Result<Box<dyn std::any::Any + Send>, ForgeFailure> {
        match Self::try_lock(self) {
            Ok(Some(lock)) => Ok(Box::new(lock)),
            Ok(None) => Err(ForgeFailure("a repository is being registered".into())),
            Err(error) => Err(ForgeFailure(Box::new(error))),
        }
    }

    async fn remove_repository(&self, url: &str) -> Result<bool, ForgeFailure> {
        let Some(name) = self.repository_name(url) else { return Ok(false) };
        let forge = self.clone();
        let removed = tokio::task::spawn_blocking(move || forge.remove(&name)).await;
        let removed = removed.map_err(|panicked| ForgeFailure(Box::new(panicked)))?;
        removed.map(|()| true).map_err(|error| ForgeFailure(Box::new(error)))
    }
}

#[derive(Debug, Clone)]
pub struct Config {
    pub timeouts: Timeouts,
    pub limits: Limits,
    pub retention: Retention,
    /// The default image of repositories.
    pub image: String,
    /// The names `trusted` sandboxes may reach.
    pub trusted: Vec<String>,
    /// The token budget of a session, input and output; beyond it model calls are refused.
    pub budget_tokens: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            timeouts: Timeouts::default(),
            limits: Limits::default(),
            retention: Retention::default(),
            image: "claude".to_owned(),
            trusted: Vec::new(),
            budget_tokens: None,
        }
    }
}

/// Everything sessions depend on.
pub struct Dependencies {
    pub store: Store,
    /// The server's lease, from [`Store::server_lease`]; the ledger carries the same.
    pub lease: Lease,
    pub provider: Arc<dyn Provider>,
    pub doors: Arc<dyn Doors>,
    pub forge: Arc<dyn Forge>,
    pub vault: Arc<Vault>,
    pub config: Config,
}

/// The context that all drivers share.
pub(crate) struct Shared {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) doors: Arc<dyn Doors>,
    pub(crate) forge: Arc<dyn Forge>,
    pub(crate) vault: Arc<Vault>,
    pub(crate) config: Config,
    pub(crate) trusted: Trusted,
    /// For timeouts.
    pub(crate) clock: MonotonicClock,
    pub(crate) stop: CancellationToken,
    pub(crate) tracker: TaskTracker,
    /// The sandboxes of builds and checks.
    pub(crate) ephemeral: Mutex<HashSet<SandboxId>>,
    pub(crate) metrics: Arc<Metrics>,
    /// Wakes the task that carries out removals.
    pub(crate) removals: tokio::sync::Notify,
    pub(crate) admission: Admission,
    /// Slots of builds and checks, apart from those of sessions: a turn whose push is being checked
    /// must not wait for itself.
    pub(crate) checks: Semaphore,
}

/// The names `trusted` sandboxes may reach, once they are known.
pub(crate) type Trusted = futures_util::future::Shared<BoxFuture<'static, Vec<String>>>;

impl Shared {
    /// Spawns a task that is cancelled when the server stops.
    pub(crate) fn spawn(
        &self,
        task: impl Future<Output = ()> + Send + 'static,
    ) -> tokio::task::JoinHandle<Option<()>> {
        // Not wrapped in an async block, which would hold the task's future twice.
        self.tracker.spawn(task.with_cancellation_token_owned(self.stop.clone()))
    }

    /// The repositories of a session, the primary one first.
    pub(crate) async fn repositories(
        &self,
        record: &SessionRecord,
    ) -> Result<Vec<Repository>, StoreError> {
        let mut all = Vec::with_capacity(record.checkouts.len());
        for checkout in &record.checkouts {
            all.push(self.store.repository_get(&checkout.repository).await?);
        }
        Ok(all)
    }

    /// The sandboxes of builds and checks that have not been removed.
    pub(crate) fn ephemeral(&self) -> Vec<SandboxId> {
        self.ephemeral.lock().expect("no holder of this lock can panic").iter().cloned().collect()
    }

    /// The pass of a sandbox. Without a branch it may only read. With the `trusted` policy this
    /// waits until the trusted names are known.
    pub(crate) async fn pass(&self, repositories: &[Repository], spec: PassSpec) -> DoorPolicy {
        let access = |repository: &Repository| GitAccess {
            name: repository.name.clone(),
            url: self.forge.current_url(&repository.url),
            secret: repository.secret.clone(),
            branch: spec.branch.clone(),
        };
        DoorPolicy {
            session: spec.session,
            network: match spec.network {
                NetworkPolicy::None => ResolvedPolicy::None,
                NetworkPolicy::Trusted => ResolvedPolicy::Trusted(self.trusted.clone().await),
            },
            upstream: spec.upstream,
            repositories: repositories.iter().map(access).collect(),
        }
    }
}

pub(crate) struct PassSpec {
    pub(crate) session: SessionId,
    pub(crate) network: NetworkPolicy,
    pub(crate) upstream: Upstream,
    pub(crate) branch: Option<BranchName>,
}

impl From<&SessionRecord> for PassSpec {
    fn from(record: &SessionRecord) -> Self {
        Self {
            session: record.session.id.clone(),
            network: record.session.network,
            upstream: record.session.model.as_ref().map_or(Upstream::Anthropic, ModelRef::upstream),
            branch: Some(record.session.branch.clone()),
        }
    }
}

/// The wall-clock time.
pub(crate) fn now() -> Timestamp {
    std::time::SystemTime::now().into()
}

/// An error and its sources, in one line.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// The git remote of a repository, as seen from its sandboxes.
pub(crate) fn remote(name: &str) -> String {
    format!("http://{}/{name}.git", harvest_proto::door::GIT_NAME)
}
