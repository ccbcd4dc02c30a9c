//! Repositories: registered by URL and prebuilt into a snapshot from which sessions start. A build
//! is published only after a sandbox has started from it; a failed build leaves the previous one in
//! place. Commits that a session has pushed are reviewed (`evidence`).

mod check;
mod door_policy;
mod evidence;
mod memory;
mod network;
mod origin;

use std::{sync::Arc, time::Duration};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_gateway::{DoorObserver, PrivateHosts, RemoteUrlError, normalize_remote_url};
use harvest_proto::{
    AgentName, BranchName, EventBody, NetworkPolicy, RepositoryName, RepositoryRef, SandboxId,
    SecretOwner, SessionId, SnapshotId, UpstreamName,
    api::{AddRepository, Build, BuildLine, CheckOutcome, Repository},
    bridge::BootStart,
};
use harvest_store::{RuleOwner, Store, StoreError};
use tokio::sync::{mpsc, watch};

use crate::{
    check_slots::CheckSlot,
    checkout,
    ephemeral::{EphemeralDoor, EphemeralError, EphemeralSandbox},
    error::SessionError,
    error_chain::error_chain,
    forge::Forge,
    monotonic_clock::MonotonicClock,
    removals::Removals,
    sandbox_context::SandboxContext,
    sandboxes::StartFrom,
    timeouts::millis,
    wall_clock::now,
};

pub(crate) use door_policy::{PassSpec, Trusted, owners_of, shared_owners};
pub(crate) use evidence::{PullRequestText, describe_failures};
pub(crate) use network::{OpenPolicies, network_rule};
pub(crate) use origin::boot_start;
pub use origin::{ALL_AGENTS, default_image};

/// The network policy of builds.
const BUILD_POLICY: NetworkPolicy = NetworkPolicy::Trusted;

/// The repositories of one server. Cheap to clone.
#[derive(Clone)]
pub struct Repositories {
    shared: Arc<RepositoryContext>,
}

/// What repositories, their builds and their checks need.
pub(crate) struct RepositoryContext {
    pub(crate) store: Store,
    pub(crate) forge: Arc<dyn Forge>,
    pub(crate) sandboxes: Arc<SandboxContext>,
    pub(crate) removals: Arc<Removals>,
    /// The image of sessions and repositories that name none.
    pub(crate) image: Option<String>,
    /// The names `trusted` sandboxes may reach.
    pub(crate) trusted: Trusted,
    /// The policies of the doors that are open.
    pub(crate) open_policies: OpenPolicies,
    /// Hosts with private addresses that repositories may be at.
    pub(crate) private_hosts: PrivateHosts,
    /// For the duration of builds.
    pub(crate) clock: MonotonicClock,
}

impl Repositories {
    pub(crate) fn new(context: RepositoryContext) -> Self {
        Self { shared: Arc::new(context) }
    }

    /// Registers a repository, after a look at its remote.
    ///
    /// # Errors
    /// When the URL or name is invalid, the name is taken, or the remote is not a repository or has
    /// no such base.
    pub async fn add(&self, add: AddRepository) -> Result<Repository, SessionError> {
        let url = self.checked_url(&add.url)?;
        let provider = &self.shared.sandboxes.provider;
        if let Some(image) = &add.image
            && !provider.can_start_from(&StartFrom::Image(image.clone())).await?
        {
            return Err(SessionError::missing(format!("image `{image}`")));
        }
        let name = RepositoryName::from_url(&url, add.name.as_ref())
            .map_err(|invalid| SessionError::invalid("invalid_name", invalid.to_string()))?;
        let repository = Repository {
            name,
            url: self.shared.forge.stable_url(&url),
            base: add.base,
            secret: add.secret,
            image: add.image,
            build: None,
            created_at: now(),
        };
        // A taken name is the better error of the two.
        if self.shared.store.repository_get(&repository.name).await.is_err() {
            self.check_remote(&repository).await?;
        }
        self.shared.store.repository_insert(&repository).await?;
        Ok(Repository { url, ..repository })
    }

    async fn check_remote(&self, repository: &Repository) -> Result<(), SessionError> {
        let access = self.git_access(repository, None);
        let checked = self.shared.sandboxes.doors.check_remote(&access).await;
        checked.map_err(|why| {
            let what = format!("{} is not registered: {why}", access.url);
            SessionError::invalid("remote_unavailable", what).with_hint(
                "check the URL; `harvest repo add URL --secret NAME` reads a private one",
            )
        })?;
        match &repository.base {
            Some(base) => self.check_branch(repository, base).await,
            None => Ok(()),
        }
    }

    /// Refuses a branch that the remote is known not to have.
    pub(crate) async fn check_branch(
        &self,
        repository: &Repository,
        branch: &BranchName,
    ) -> Result<(), SessionError> {
        let access = self.git_access(repository, None);
        if self.shared.sandboxes.doors.has_branch(&access, branch).await != Some(false) {
            return Ok(());
        }
        let (name, url) = (&repository.name, &access.url);
        // The forge's copy of a folder has only the branches that were checked out there.
        let hint = match self.shared.forge.stable_url(url) == *url {
            true => format!("`git ls-remote --heads {url}` lists its branches"),
            false => "switch to it in the folder, then name the folder with -r".to_owned(),
        };
        let what = format!("branch {branch} does not exist in {name}");
        Err(SessionError::invalid("no_branch", what).with_hint(hint))
    }

    /// Lists all repositories by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn list(&self) -> Result<Vec<Repository>, SessionError> {
        let mut all = self.shared.store.repository_list().await?;
        all.iter_mut().for_each(|one| one.url = self.shared.forge.current_url(&one.url));
        Ok(all)
    }

    /// The repository that a user means: `OWNER/NAME`, or `NAME` if only one repository has it.
    ///
    /// # Errors
    /// When no repository or more than one matches.
    pub async fn resolve(&self, wanted: &RepositoryRef) -> Result<RepositoryName, SessionError> {
        let mut names = self.shared.store.repository_names().await?;
        names.retain(|name| wanted.matches(name));
        match names.len() {
            0 => Err(SessionError::missing(format!("repository `{wanted}`"))),
            1 => Ok(names.remove(0)),
            _ => {
                let names: Vec<&str> = names.iter().map(RepositoryName::as_str).collect();
                let what = format!("repository `{wanted}` is ambiguous: {}", names.join(", "));
                Err(SessionError::conflict("ambiguous_name", what, "name it as OWNER/NAME"))
            }
        }
    }

    /// # Errors
    /// When the repository does not exist.
    pub async fn get(&self, name: &RepositoryName) -> Result<Repository, SessionError> {
        let one = self.shared.store.repository_get(name).await?;
        Ok(Repository { url: self.shared.forge.current_url(&one.url), ..one })
    }

    /// Removes a repository that no session uses, including its copy on the local forge.
    ///
    /// # Errors
    /// When the repository does not exist or a session uses it.
    pub async fn delete(&self, name: &RepositoryName) -> Result<(), SessionError> {
        let deleted = self.shared.store.repository_delete(name, now()).await;
        let removals = deleted.map_err(|error| match error {
            error @ StoreError::InUse { .. } => SessionError::conflict(
                "in_use",
                error.to_string(),
                "`harvest ls --all` lists sessions, `harvest rm` removes them",
            ),
            other => other.into(),
        })?;
        self.shared.removals.remove_now(&removals).await;
        Ok(())
    }

    /// Prebuilds a repository for a user, whose e-mail address decides when it is the build's turn.
    /// The build continues when the stream is dropped.
    ///
    /// # Errors
    /// When the repository does not exist or is already being built.
    pub async fn build(
        &self,
        name: &RepositoryName,
        user: &str,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        let repository = self.get(name).await?;
        let (snapshot, sandbox) = (SnapshotId::random(), SandboxId::random());
        let SandboxContext { lease, provider, .. } = &*self.shared.sandboxes;
        let begun =
            self.shared.store.build_begin(*lease, name, &snapshot, provider.name(), now()).await;
        begun.map_err(|error| match error {
            StoreError::Exists { .. } => SessionError::conflict(
                "building",
                format!("a build of `{name}` is already running"),
                "when it has finished, `harvest repo ls` shows it; sessions start without it \
                 meanwhile",
            ),
            other => other.into(),
        })?;
        let (progress, lines) = mpsc::unbounded_channel();
        // E-mail addresses are compared without case.
        let (repositories, user) = (self.clone(), user.to_lowercase());
        self.shared.sandboxes.tasks.spawn(async move {
            // The time limit starts once the build has a slot.
            let slot = repositories.shared.sandboxes.checks.acquire(&user).await;
            let last =
                build_and_publish(&repositories, &repository, &snapshot, sandbox, &progress, slot)
                    .await;
            let _ = progress.send(last);
        });
        Ok(stream::unfold(lines, async |mut lines| lines.recv().await.map(|line| (line, lines)))
            .boxed())
    }

    /// The normal form of a remote's URL, which is at a public address or on the own forge.
    pub(crate) fn checked_url(&self, url: &str) -> Result<String, SessionError> {
        let url = self.current_url(url.trim().trim_end_matches('/'));
        if self.shared.forge.is_own(&url) {
            return Ok(url);
        }
        normalize_remote_url(&url, &self.shared.private_hosts).map_err(|error| {
            let code = match error {
                RemoteUrlError::Invalid(_) => "invalid_url",
                RemoteUrlError::Private { .. } => "private_address",
            };
            SessionError::invalid(code, error.to_string())
        })
    }

    /// The current form of a stored URL: the forge's own URLs change with the server's address.
    pub(crate) fn current_url(&self, url: &str) -> String {
        self.shared.forge.current_url(url)
    }
}

type Progress = mpsc::UnboundedSender<BuildLine>;

async fn build_and_publish(
    repositories: &Repositories,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    progress: &Progress,
    slot: CheckSlot,
) -> BuildLine {
    let shared = &repositories.shared;
    let limit = shared.sandboxes.timeouts.build;
    let timed_out = Err(EphemeralError::TimedOut { limit });
    let build = build(repositories, repository, snapshot, sandbox, progress);
    let built = tokio::time::timeout(limit, build).await.unwrap_or(timed_out);
    drop(slot);
    let failed = |code: &str, message: String| BuildLine::Failed { code: code.to_owned(), message };
    let build = match built {
        Ok(build) => build,
        Err(error) => {
            let message = error_chain(&error);
            let _ =
                shared.store.build_fail(shared.sandboxes.lease, snapshot, &message, now()).await;
            if let Some(snapshots) = shared.sandboxes.provider.snapshots() {
                let _ = snapshots.remove(snapshot).await;
            }
            return failed("build_failed", message);
        }
    };
    match shared.store.build_publish(shared.sandboxes.lease, &build).await {
        Ok(()) => {
            remove_outdated_builds(shared, &repository.name).await;
            BuildLine::Built { build }
        }
        Err(error) => failed("store_failed", error_chain(&error)),
    }
}

/// Removes each snapshot before its row, so that the next build retries after a crash in between.
async fn remove_outdated_builds(shared: &RepositoryContext, repository: &RepositoryName) {
    let Some(snapshots) = shared.sandboxes.provider.snapshots() else { return };
    for snapshot in shared.store.build_outdated(repository).await.unwrap_or_default() {
        match snapshots.remove(&snapshot).await {
            Ok(()) => {
                let _ = shared.store.build_forget(shared.sandboxes.lease, &snapshot).await;
            }
            Err(error) => {
                tracing::warn!(%snapshot, error = error_chain(&error), "cannot remove an outdated build")
            }
        }
    }
}

async fn build(
    repositories: &Repositories,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    progress: &Progress,
) -> Result<Build, EphemeralError> {
    let shared = &repositories.shared;
    let report = |message: &str| {
        let _ = progress.send(BuildLine::Progress { message: message.to_owned() });
    };
    let started = shared.clock.now();
    let order = PassSpec {
        // Not a real session: the observer gets the events of the door.
        session: SessionId::random(),
        owner: RuleOwner::Repository(repository.name.clone()),
        network: BUILD_POLICY,
        upstream: watch::channel(UpstreamName::scripted()).1,
        branch: None,
        secrets: vec![SecretOwner::Repository(repository.name.clone()), SecretOwner::Global],
    };
    let policy = repositories
        .pass(std::slice::from_ref(repository), order)
        .await
        .map_err(|error| EphemeralError::Other(error_chain(&error)))?;
    let door = EphemeralDoor { policy, observer: Some(refusal_observer(progress.clone())) };
    report("starting a sandbox");
    let image = repositories.image(Some(repository), &AgentName::default()).await?;
    let from = StartFrom::Image(image);
    let mut sandbox = EphemeralSandbox::start(&shared.sandboxes, sandbox, from, Some(door)).await?;
    sandbox.boot(&repository.name, repository.base.clone(), BootStart::Build, &report).await?;
    let head = checkout::head(&sandbox.bridge, &repository.name.folder()).await?;
    let commit = head
        .commit
        .ok_or_else(|| EphemeralError::Other("the repository has no commit".to_owned()))?;
    let limit: Duration = shared.sandboxes.timeouts.warm;
    let start = || report("running .harvest/check.sh");
    let evidence =
        check::run(&sandbox.bridge, &repository.name, commit.clone(), limit, start).await?;
    report("saving a snapshot");
    sandbox.save(snapshot).await?;
    report("starting a sandbox from the snapshot");
    let (id, from) = (SandboxId::random(), StartFrom::Snapshot(snapshot.clone()));
    let proof = EphemeralSandbox::start(&shared.sandboxes, id, from, None).await?;
    proof.remove().await;
    Ok(Build {
        snapshot_id: snapshot.clone(),
        provider: shared.sandboxes.provider.name().to_owned(),
        commit,
        check: Some(evidence).filter(|evidence| evidence.outcome != CheckOutcome::NoneDeclared),
        millis: millis(shared.clock.now().since(started)),
        built_at: now(),
    })
}

/// Reports the connections that the network policy refuses.
fn refusal_observer(progress: Progress) -> DoorObserver {
    Box::new(move |event| {
        if let EventBody::EgressRefused { name, reason, hint } = event {
            // The client may have disconnected.
            let _ = progress.send(BuildLine::EgressRefused { name, reason, hint });
        }
    })
}
