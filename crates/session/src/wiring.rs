//! What a session is handed: a machine, a door, a forge, a vault. The binary brings the real ones.

use std::{
    any::Any,
    collections::HashSet,
    io,
    path::Path,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use harvest_gateway::{
    Gateway,
    ledger::{GitAccess, Pass, Policy, Upstream},
    vault::Vault,
};
use harvest_github::{Forge, NewPull};
use harvest_proto::{
    SandboxId, SessionId, Timestamp,
    api::{Evidence, Pull, Repository},
};
use harvest_store::{Lease, SessionRecord, Store, StoreError};
use tokio::sync::Semaphore;
use tokio_util::{future::FutureExt as _, sync::CancellationToken, task::TaskTracker};

use crate::{
    clocks::Clocks, meters::Meters, places::Limits, provider::Provider, retention::Retention,
    steady::Steady, usher::Usher,
};

/// Opens doors for sandboxes.
pub trait Doors: Send + Sync {
    /// Serves one sandbox's door until what this gives is dropped.
    ///
    /// # Errors
    /// When the socket cannot be made.
    fn open(&self, socket: &Path, pass: Pass) -> io::Result<Box<dyn Any + Send>>;
}

impl Doors for Gateway {
    fn open(&self, socket: &Path, pass: Pass) -> io::Result<Box<dyn Any + Send>> {
        Ok(Box::new(Self::open(self, socket, pass)?))
    }
}

/// A pull request to open or to bring up to date.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullOrder {
    /// Where the repository is.
    pub url: String,
    /// What to call it.
    pub title: String,
    /// What it says.
    pub body: String,
    /// The branch it proposes.
    pub branch: String,
    /// The branch it is for.
    pub base: String,
}

/// Opens pull requests.
#[async_trait]
pub trait Pulls: Send + Sync {
    /// Opens one, or brings the open one of the branch up to date. `None` when no forge we know
    /// answers for the repository.
    async fn open(&self, order: PullOrder) -> Result<Option<Pull>, PullsError>;

    /// Shows on it what the platform saw.
    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), PullsError>;

    /// A URL as it can be remembered: the forge's own may change with the server's address.
    fn lasting(&self, url: &str) -> String {
        url.to_owned()
    }

    /// Where a remembered URL leads now.
    fn current(&self, url: &str) -> String {
        url.to_owned()
    }

    /// While what this gives is kept nobody registers anything on the forge; fails while somebody does.
    fn hold(&self) -> Result<Box<dyn std::any::Any + Send>, PullsError> {
        Ok(Box::new(()))
    }

    /// Removes a repository that the forge was made to hold; answers whether it was one. Idempotent.
    async fn forget(&self, _url: &str) -> Result<bool, PullsError> {
        Ok(false)
    }
}

/// Why a forge did not do it, in words.
#[derive(Debug, thiserror::Error)]
#[error("the forge refused")]
pub struct PullsError(#[source] pub Box<dyn std::error::Error + Send + Sync>);

#[async_trait]
impl Pulls for Forge {
    async fn open(&self, order: PullOrder) -> Result<Option<Pull>, PullsError> {
        let Some(name) = self.owns(&order.url) else { return Ok(None) };
        let PullOrder { title, body, branch, base, .. } = order;
        let pull = self.pull_open(&name, NewPull { title, body, branch, base }).await;
        pull.map(Some).map_err(|error| PullsError(Box::new(error)))
    }

    async fn set_evidence(
        &self,
        url: &str,
        number: u64,
        evidence: Evidence,
    ) -> Result<(), PullsError> {
        let Some(name) = self.owns(url) else { return Ok(()) };
        Self::set_evidence(self, &name, number, evidence)
            .await
            .map(drop)
            .map_err(|error| PullsError(Box::new(error)))
    }

    fn lasting(&self, url: &str) -> String {
        Self::lasting(self, url)
    }

    fn current(&self, url: &str) -> String {
        Self::current(self, url)
    }

    fn hold(&self) -> Result<Box<dyn std::any::Any + Send>, PullsError> {
        match Self::hold(self) {
            Ok(Some(held)) => Ok(Box::new(held)),
            Ok(None) => Err(PullsError("somebody registers a repository on it".into())),
            Err(error) => Err(PullsError(Box::new(error))),
        }
    }

    async fn forget(&self, url: &str) -> Result<bool, PullsError> {
        let Some(name) = self.owns(url) else { return Ok(false) };
        let forge = self.clone();
        let removed = tokio::task::spawn_blocking(move || forge.remove(&name)).await;
        let removed = removed.map_err(|panicked| PullsError(Box::new(panicked)))?;
        removed.map(|()| true).map_err(|error| PullsError(Box::new(error)))
    }
}

/// How sessions behave.
#[derive(Debug, Clone)]
pub struct Config {
    /// How long things may take.
    pub clocks: Clocks,
    /// How much may run at once.
    pub limits: Limits,
    /// What is kept of sessions.
    pub retention: Retention,
    /// The image of repositories that name none.
    pub image: String,
    /// The names `trusted` sandboxes may reach.
    pub trusted: Vec<String>,
    /// A session that has used so many tokens, read and written, gets no more model calls.
    pub budget_tokens: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            clocks: Clocks::default(),
            limits: Limits::default(),
            retention: Retention::default(),
            image: "claude".to_owned(),
            trusted: Vec::new(),
            budget_tokens: None,
        }
    }
}

/// Everything sessions are handed.
pub struct Parts {
    /// What remembers.
    pub store: Store,
    /// The server's lease, from [`Store::server_lease`]; the ledger carries the same.
    pub lease: Lease,
    /// What starts sandboxes.
    pub provider: Arc<dyn Provider>,
    /// What opens doors.
    pub doors: Arc<dyn Doors>,
    /// What opens pull requests.
    pub pulls: Arc<dyn Pulls>,
    /// What seals secrets.
    pub vault: Arc<Vault>,
    /// How to behave.
    pub config: Config,
}

/// What every driver needs.
pub(crate) struct Shared {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) doors: Arc<dyn Doors>,
    pub(crate) pulls: Arc<dyn Pulls>,
    pub(crate) vault: Arc<Vault>,
    pub(crate) config: Config,
    pub(crate) trusted: Trusted,
    /// What clocks are looked at by.
    pub(crate) steady: Steady,
    pub(crate) stop: CancellationToken,
    pub(crate) tracker: TaskTracker,
    /// The sandboxes that belong to no session.
    pub(crate) hidden: Mutex<HashSet<SandboxId>>,
    /// What happens, counted.
    pub(crate) meters: Arc<Meters>,
    /// Wakes whoever removes what nobody uses any more.
    pub(crate) removals: tokio::sync::Notify,
    /// Who has a sandbox, and who waits for one.
    pub(crate) usher: Usher,
    /// Room for builds and checks: a session never waits for them, nor they for a session, so that a turn
    /// whose push is being checked cannot wait for itself.
    pub(crate) checks: Semaphore,
}

/// The names `trusted` sandboxes may reach, once they are known.
pub(crate) type Trusted = futures_util::future::Shared<BoxFuture<'static, Vec<String>>>;

impl Shared {
    /// Spawns work that ends with the server.
    pub(crate) fn spawn(
        &self,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> tokio::task::JoinHandle<Option<()>> {
        // No async block around it: that would have room for the work twice.
        self.tracker.spawn(work.with_cancellation_token_owned(self.stop.clone()))
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

    /// The sandboxes that belong to no session and are there still, as far as we know.
    pub(crate) fn hidden(&self) -> Vec<SandboxId> {
        self.hidden.lock().expect("no holder of this lock can panic").iter().cloned().collect()
    }

    /// What a sandbox may do at the door. Without a branch it only reads. Only a sandbox that may reach
    /// the trusted names waits until they are known.
    pub(crate) async fn pass(&self, repositories: &[Repository], order: PassOrder) -> Pass {
        let access = |repository: &Repository| GitAccess {
            name: repository.name.clone(),
            url: self.pulls.current(&repository.url),
            secret: repository.secret.clone(),
            branch: order.branch.clone(),
        };
        Pass {
            session: order.session,
            policy: match order.network.as_str() {
                "none" => Policy::None,
                _ => Policy::Trusted(self.trusted.clone().await),
            },
            upstream: match order.model.as_deref() {
                Some("scripted") => Upstream::Scripted,
                _ => Upstream::Anthropic,
            },
            repositories: repositories.iter().map(access).collect(),
        }
    }
}

/// Whose pass it is.
pub(crate) struct PassOrder {
    pub(crate) session: SessionId,
    pub(crate) network: String,
    pub(crate) model: Option<String>,
    pub(crate) branch: Option<String>,
}

impl From<&SessionRecord> for PassOrder {
    fn from(record: &SessionRecord) -> Self {
        Self {
            session: record.session.id.clone(),
            network: record.session.network.clone(),
            model: record.session.model.clone(),
            branch: Some(record.session.branch.clone()),
        }
    }
}

/// The time.
pub(crate) fn now() -> Timestamp {
    std::time::SystemTime::now().into()
}

/// An error with everything behind it, in one line.
#[must_use]
pub fn words(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(inner) = source {
        text = format!("{text}: {inner}");
        source = inner.source();
    }
    text
}

/// The remote of a repository as its sandboxes see it.
pub(crate) fn remote(name: &str) -> String {
    format!("http://{}/{name}.git", harvest_proto::door::GIT_NAME)
}
