//! Repositories: registered by URL and prebuilt into a snapshot from which sessions start
//! (`builds`). Commits that a session has pushed are reviewed (`evidence`).

mod build_report;
mod build_start;
mod build_steps;
mod builds;
pub(crate) mod check;
mod check_run;
mod door_policy;
mod evidence;
mod forge_access;
mod forge_calls;
mod forge_news;
mod judge;
mod memory;
mod network;
mod origin;
mod pull_request_body;
mod pull_request_verbs;
mod pull_requests;
mod refresh_images;
mod schedule;
mod state_caches;
mod verifications;
mod verify;

use std::sync::Arc;

use harvest_forge::Forge;
use harvest_gateway::{PrivateHosts, RemoteUrlError, normalize_remote_url};
use harvest_proto::{
    BranchName, RepositoryName, RepositoryRef,
    api::{AddRepository, PullRequestMode, Repository, UpdateRepository},
    bridge::Author,
    repository_address::{ADDRESS_FORMS, https_url},
};
use harvest_store::{Store, StoreError};
use tokio::sync::Notify;

use crate::{
    error::SessionError, monotonic_clock::MonotonicClock, removals::Removals,
    sandbox_context::SandboxContext, sandboxes::StartFrom, wall_clock::now,
};

pub(crate) use door_policy::{PassSpec, Trusted, default_network, owners_of, shared_owners};
pub(crate) use evidence::describe_failures;
pub(crate) use forge_access::ForgeReadError;
pub(crate) use forge_calls::ForgeCalls;
pub(crate) use forge_news::ForgeNews;
pub use forge_news::WebhookRefusal;
pub(crate) use network::{OpenPolicies, ServerDoors, network_rule};
pub(crate) use origin::boot_start;
pub use origin::{ALL_AGENTS, default_image};
pub(crate) use pull_requests::PullRequestText;
pub(crate) use verifications::LiveVerifications;

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
    /// Whether the schedule runs.
    pub(crate) schedule: bool,
    /// What is opened for pushed branches, unless a session says otherwise.
    pub(crate) pr_mode: PullRequestMode,
    /// What webhooks told of.
    pub(crate) news: ForgeNews,
    /// How often the programs of sessions use forges.
    pub(crate) forge_calls: ForgeCalls,
    /// For the duration of builds.
    pub(crate) clock: MonotonicClock,
    /// The verifications in progress.
    pub(crate) verifications: LiveVerifications,
    /// Notifies those that wait for the end of a build.
    pub(crate) build_ended: Notify,
    /// Notified when a repository is changed, built or removed: the warm pool follows.
    pub(crate) changes: Arc<Notify>,
}

impl Repositories {
    pub(crate) fn new(context: RepositoryContext) -> Self {
        Self { shared: Arc::new(context) }
    }

    /// Notified when a repository is changed, built or removed. For one task.
    pub(crate) fn changes(&self) -> Arc<Notify> {
        Arc::clone(&self.shared.changes)
    }

    /// Registers a repository, after a look at its remote, for which a private one on github.com
    /// may need the user's token.
    ///
    /// # Errors
    /// When the URL or name is invalid, the name is taken, or the remote is not a repository or has
    /// no such base.
    pub async fn add(&self, add: AddRepository, user: &Author) -> Result<Repository, SessionError> {
        let url = self.checked_url(&add.url)?;
        if let Some(image) = &add.image {
            self.check_image(image).await?;
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
            self.check_remote(&repository, user).await?;
        }
        self.shared.store.repository_insert(&repository).await?;
        Ok(Repository { url, ..repository })
    }

    /// Changes the base, secret or image of a repository, after a look at its remote.
    ///
    /// # Errors
    /// When the repository does not exist, the image is not on this machine, or the remote cannot
    /// be read with the new secret or has no such base.
    pub async fn update(
        &self,
        name: &RepositoryName,
        update: UpdateRepository,
        user: &Author,
    ) -> Result<Repository, SessionError> {
        let before = self.get(name).await?;
        let UpdateRepository { base, secret, image } = update;
        let after = Repository {
            base: base.unwrap_or_else(|| before.base.clone()),
            secret: secret.unwrap_or_else(|| before.secret.clone()),
            image: image.unwrap_or_else(|| before.image.clone()),
            ..before.clone()
        };
        if let Some(image) = after.image.as_ref().filter(|_| after.image != before.image) {
            self.check_image(image).await?;
        }
        if (&after.base, &after.secret) != (&before.base, &before.secret) {
            self.check_remote(&after, user).await?;
        }
        self.shared.store.repository_update(&after).await?;
        self.shared.changes.notify_one();
        Ok(after)
    }

    async fn check_image(&self, image: &str) -> Result<(), SessionError> {
        let from = StartFrom::Image(image.to_owned());
        match self.shared.sandboxes.provider.can_start_from(&from).await? {
            true => Ok(()),
            false => Err(SessionError::missing(format!("image `{image}`"))),
        }
    }

    async fn check_remote(
        &self,
        repository: &Repository,
        user: &Author,
    ) -> Result<(), SessionError> {
        let access = self.git_access(repository, None);
        let owners = shared_owners([repository.name.clone()].into_iter(), user);
        let checked = self.shared.sandboxes.doors.check_remote(&access, &owners).await;
        checked.map_err(|why| {
            let what = format!("{} is not registered: {why}", access.url);
            SessionError::invalid("remote_unavailable", what).with_hint(
                "check the URL; `harvest repo add URL --secret NAME` reads a private one",
            )
        })?;
        match &repository.base {
            Some(base) => self.check_branch(repository, base, user).await,
            None => Ok(()),
        }
    }

    /// Refuses a branch that the remote is known not to have.
    pub(crate) async fn check_branch(
        &self,
        repository: &Repository,
        branch: &BranchName,
        user: &Author,
    ) -> Result<(), SessionError> {
        let access = self.git_access(repository, None);
        let owners = shared_owners([repository.name.clone()].into_iter(), user);
        if self.shared.sandboxes.doors.tip(&access, &owners, Some(branch)).await != Some(None) {
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
        self.shared.changes.notify_one();
        self.shared.removals.remove_now(&removals).await;
        Ok(())
    }

    /// The normal form of a remote's URL, which is at a public address or on the own forge.
    pub(crate) fn checked_url(&self, url: &str) -> Result<String, SessionError> {
        let url = url.trim().trim_end_matches('/');
        let url = https_url(url, self.shared.forge.names_at()).unwrap_or_else(|| url.to_owned());
        let url = self.current_url(&url);
        if self.shared.forge.is_local(&url) {
            return Ok(url);
        }
        normalize_remote_url(&url, &self.shared.private_hosts).map_err(|error| {
            let code = match &error {
                RemoteUrlError::Invalid(_) => "invalid_url",
                RemoteUrlError::Private { .. } => "private_address",
            };
            match error {
                RemoteUrlError::Invalid(_) if !url.contains("://") => {
                    let what =
                        format!("`{url}` is no address of a repository: use {ADDRESS_FORMS}");
                    SessionError::invalid(code, what)
                }
                other => SessionError::invalid(code, other.to_string()),
            }
        })
    }

    /// The current form of a stored URL: the forge's own URLs change with the server's address.
    pub(crate) fn current_url(&self, url: &str) -> String {
        self.shared.forge.current_url(url)
    }
}
