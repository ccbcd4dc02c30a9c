//! Builds accounts, repositories, sandboxes and sessions from the dependencies that the binary
//! provides.

use std::{
    path::PathBuf,
    sync::{Arc, OnceLock},
};

use futures_util::FutureExt;
use harvest_forge::Forge;
use harvest_gateway::{PrivateHosts, vault::Vault};
use harvest_proto::api::{AllowedName, PullRequestMode, SandboxLimits};
use harvest_store::{Lease, Store};
use tokio::sync::Notify;

use crate::{
    accounts::Accounts,
    agents::{Agents, ConfiguredAgents},
    artifacts::ArtifactFiles,
    check_slots::CheckSlots,
    compute_meter::ComputeMeter,
    context::{PendingSnapshots, Shared},
    doors::Doors,
    error::SessionError,
    monotonic_clock::MonotonicClock,
    pool::{Pool, PoolConfig},
    removals::Removals,
    repositories::{
        ForgeCalls, ForgeNews, LiveVerifications, OpenPolicies, Repositories, RepositoryContext,
        ServerDoors, Trusted,
    },
    retention::{Retention, RetentionEnforcer},
    root_locks::RootLocks,
    sandbox_context::SandboxContext,
    sandboxes::{Limits, SandboxProvider, Sandboxes},
    sessions::Sessions,
    tasks::Tasks,
    timeouts::Timeouts,
    tools,
};

#[derive(Debug, Clone, Default)]
pub struct Config {
    pub timeouts: Timeouts,
    pub limits: Limits,
    pub retention: Retention,
    /// Resource limits of a session's sandbox; the provider's defaults for absent ones.
    pub resources: SandboxLimits,
    /// The image of sessions and repositories that name none; without it, the one with all agents
    /// if that is built.
    pub image: Option<String>,
    /// The agents besides the built-in ones.
    pub agents: ConfiguredAgents,
    /// The names `trusted` sandboxes may reach.
    pub trusted: Vec<AllowedName>,
    /// Hosts with private addresses that repositories may be at.
    pub private_hosts: PrivateHosts,
    /// The token budget of a session, input and output; beyond it model calls are refused.
    pub budget_tokens: Option<u64>,
    /// Whether repositories are looked at every half hour, and rebuilt when they have moved.
    pub schedule: bool,
    /// What is opened for branches that sessions push, unless a session says otherwise.
    pub pr_mode: PullRequestMode,
    /// The warm pool.
    pub pool: PoolConfig,
    /// The folder for the contents of artifacts; without it they are refused.
    pub artifacts: Option<PathBuf>,
}

/// Everything the parts of a server depend on.
pub struct Dependencies {
    pub store: Store,
    /// The server's lease, from [`Store::server_lease`]; the ledger carries the same.
    pub lease: Lease,
    pub provider: Arc<dyn SandboxProvider>,
    pub doors: Arc<dyn Doors>,
    pub forge: Arc<dyn Forge>,
    pub vault: Arc<Vault>,
    pub config: Config,
}

/// The parts of one server behind its API. Cheap to clone; the background work of all parts stops
/// when the last clone of `sessions` is dropped.
#[derive(Clone)]
pub struct ServerParts {
    pub accounts: Accounts,
    pub repositories: Repositories,
    pub sandboxes: Sandboxes,
    pub sessions: Sessions,
}

impl ServerParts {
    /// Recovers every stored session: running sandboxes are adopted, dead ones saved as recovered,
    /// orphaned ones removed.
    ///
    /// # Errors
    /// When the store cannot be read, or the provider cannot list its sandboxes.
    pub async fn open(dependencies: Dependencies) -> Result<Self, SessionError> {
        let trusted = dependencies.config.trusted.clone();
        Self::open_with_trusted(dependencies, std::future::ready(trusted)).await
    }

    /// As [`ServerParts::open`], with trusted names that are resolved later, in place of those in
    /// the configuration: resolving them takes a host seconds. Only the doors of `trusted`
    /// sandboxes wait for them.
    ///
    /// # Errors
    /// As [`ServerParts::open`].
    pub async fn open_with_trusted(
        dependencies: Dependencies,
        trusted: impl Future<Output = Vec<AllowedName>> + Send + 'static,
    ) -> Result<Self, SessionError> {
        let tasks = Tasks::default();
        let vault = Arc::clone(&dependencies.vault);
        let accounts = Accounts::new(dependencies.store.clone(), vault, tasks.clone());
        let scheduled = dependencies.config.schedule;
        let shared = shared(dependencies, trusted.boxed().shared(), tasks.clone()).await?;
        let repositories = shared.repositories.clone();
        let sandboxes = shared.sandboxes.service.clone();
        let doors = Arc::clone(&shared.sandboxes.doors);
        let opener = ServerDoors::new(&repositories, doors);
        let sandboxes = sandboxes.with_doors(Arc::new(opener));
        let sessions = Sessions::open(shared).await?;
        let adopting = sandboxes.clone();
        // Not before the trusted names are known, which takes a host seconds.
        tasks.spawn(async move { adopting.open_doors().await });
        if scheduled {
            repositories.spawn_schedule(&tasks);
        }
        repositories.spawn_forge_news(&tasks);
        Ok(Self { accounts, repositories, sandboxes, sessions })
    }
}

/// Builds the context of sessions, from the bottom up.
async fn shared(
    dependencies: Dependencies,
    trusted: Trusted,
    tasks: Tasks,
) -> Result<Shared, SessionError> {
    let mut timeouts = dependencies.config.timeouts.clone();
    let can_freeze = dependencies.provider.freeze_control().is_some();
    timeouts.idle_freeze = timeouts.idle_freeze.filter(|_| can_freeze);
    let clock = MonotonicClock::open(&dependencies.store).await?;
    let sandboxes = Arc::new(sandbox_context(&dependencies, &timeouts, clock, &tasks));
    let Dependencies { store, lease, forge, config, vault, .. } = dependencies;
    let artifacts = Arc::new(ArtifactFiles::new(config.artifacts));
    artifacts.remove_partial();
    let removals = Arc::new(Removals {
        store: store.clone(),
        lease,
        artifacts: Arc::clone(&artifacts),
        forge: Arc::clone(&forge),
        sandboxes: Arc::clone(&sandboxes),
        wake: Arc::new(Notify::new()),
    });
    let retention = RetentionEnforcer { rules: config.retention, removals: Arc::clone(&removals) };
    let repositories = Repositories::new(RepositoryContext {
        store: store.clone(),
        forge,
        sandboxes: Arc::clone(&sandboxes),
        removals: Arc::clone(&removals),
        image: config.image,
        trusted,
        open_policies: OpenPolicies::default(),
        private_hosts: config.private_hosts,
        schedule: config.schedule,
        pr_mode: config.pr_mode,
        news: ForgeNews::default(),
        forge_calls: ForgeCalls::default(),
        clock,
        verifications: LiveVerifications::default(),
        build_ended: Notify::new(),
        changes: Arc::default(),
    });
    let pool = Pool::new(
        (store.clone(), lease),
        clock,
        Arc::clone(&sandboxes),
        repositories.clone(),
        config.pool,
        tools::definitions,
    );
    Ok(Shared {
        store,
        lease,
        tasks,
        vault,
        clock,
        timeouts,
        sandboxes,
        repositories,
        pool,
        removals,
        artifacts,
        retention: Arc::new(retention),
        pending_snapshots: PendingSnapshots::default(),
        tool_host: OnceLock::new(),
        spawning: RootLocks::default(),
    })
}

fn sandbox_context(
    dependencies: &Dependencies,
    timeouts: &Timeouts,
    clock: MonotonicClock,
    tasks: &Tasks,
) -> SandboxContext {
    let (provider, limits) = (Arc::clone(&dependencies.provider), dependencies.config.limits);
    let (store, lease) = (dependencies.store.clone(), dependencies.lease);
    let meter = ComputeMeter::new(store.clone(), lease, Arc::clone(&provider), clock);
    let meter = Arc::new(meter);
    let service = Sandboxes::new(provider, limits, Some(store), tasks.clone());
    let service = service.with_meter(Arc::clone(&meter));
    SandboxContext {
        provider: Arc::clone(service.provider()),
        admission: Arc::clone(service.admission()),
        service,
        meter,
        doors: Arc::clone(&dependencies.doors),
        agents: Agents::new(dependencies.config.agents.clone()),
        lease: dependencies.lease,
        timeouts: timeouts.clone(),
        tasks: tasks.clone(),
        resources: dependencies.config.resources,
        checks: CheckSlots::new(limits.checks),
    }
}
