//! Repositories: registered by URL and prebuilt into a snapshot from which sessions start. A build
//! is published only after a sandbox has started from it; a failed build leaves the previous one in
//! place.

use std::{sync::Arc, time::Duration};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    NetworkPolicy, RepositoryName, SandboxId, SessionId, SnapshotId, Upstream,
    api::{AddRepository, Build, BuildLine, CheckOutcome, Repository},
    bridge::BootStart,
    names::InvalidRepositoryName,
};
use tokio::sync::mpsc;

use crate::{
    Sessions, check, checkout,
    context::{PassSpec, Shared, error_chain, now},
    ephemeral::{EphemeralError, EphemeralSandbox},
    error::SessionError,
    provider::StartFrom,
};

impl Sessions {
    /// Registers a repository.
    ///
    /// # Errors
    /// When the URL or name is invalid, or the name is taken.
    pub async fn repository_add(&self, add: AddRepository) -> Result<Repository, SessionError> {
        let url = add.url.trim().trim_end_matches('/').to_owned();
        check_url(&url)?;
        if let Some(image) = &add.image
            && !self.shared.provider.can_start_from(&StartFrom::Image(image.clone())).await?
        {
            return Err(SessionError::missing(format!("image `{image}`")));
        }
        let name = match add.name {
            Some(name) => name,
            None => {
                let last = url.rsplit('/').next().unwrap_or_default();
                repository_name(last.trim_end_matches(".git"))?
            }
        };
        let repository = Repository {
            name,
            url: self.shared.forge.stable_url(&url),
            base: add.base,
            secret: add.secret,
            image: add.image.unwrap_or_else(|| self.shared.config.image.clone()),
            build: None,
            created_at: now(),
        };
        self.shared.store.repository_insert(&repository).await?;
        Ok(Repository { url, ..repository })
    }

    /// Lists all repositories by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn repositories(&self) -> Result<Vec<Repository>, SessionError> {
        let mut all = self.shared.store.repository_list().await?;
        all.iter_mut().for_each(|one| one.url = self.shared.forge.current_url(&one.url));
        Ok(all)
    }

    /// # Errors
    /// When the repository does not exist.
    pub async fn repository(&self, name: &str) -> Result<Repository, SessionError> {
        let one = self.shared.store.repository_get(name).await?;
        Ok(Repository { url: self.shared.forge.current_url(&one.url), ..one })
    }

    /// Removes a repository that no session uses, including its copy on the local forge.
    ///
    /// # Errors
    /// When the repository does not exist or a session uses it.
    pub async fn repository_delete(&self, name: &str) -> Result<(), SessionError> {
        let deleted = self.shared.store.repository_delete(name, now()).await;
        let removals = deleted.map_err(|error| match error {
            error @ harvest_store::StoreError::InUse { .. } => SessionError::conflict(
                "in_use",
                error.to_string(),
                "delete those sessions first: `harvest ls` shows them",
            ),
            other => other.into(),
        })?;
        crate::removals::remove_now(&self.shared, &removals).await;
        Ok(())
    }

    /// Prebuilds a repository. The build continues when the stream is dropped.
    ///
    /// # Errors
    /// When the repository does not exist or is already being built.
    pub async fn repository_build(
        &self,
        name: &str,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        let repository = self.repository(name).await?;
        let (snapshot, sandbox) = (SnapshotId::random(), SandboxId::random());
        let lease = self.shared.lease;
        self.shared.store.build_begin(lease, name, &snapshot, now()).await.map_err(|error| {
            match error {
                harvest_store::StoreError::Exists { .. } => SessionError::conflict(
                    "building",
                    format!("a build of `{name}` is already running"),
                    "wait for the build to end",
                ),
                other => other.into(),
            }
        })?;
        let (progress, lines) = mpsc::unbounded_channel();
        let shared = Arc::clone(&self.shared);
        self.shared.spawn(async move {
            let last = build_and_publish(&shared, &repository, &snapshot, sandbox, &progress).await;
            let _ = progress.send(last);
        });
        Ok(stream::unfold(lines, async |mut lines| lines.recv().await.map(|line| (line, lines)))
            .boxed())
    }
}

type Progress = mpsc::UnboundedSender<BuildLine>;

async fn build_and_publish(
    shared: &Arc<Shared>,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    progress: &Progress,
) -> BuildLine {
    let limit = shared.config.timeouts.build;
    let built = match shared.check_slot().await {
        // The time limit starts once the build has a slot.
        Ok(_slot) => {
            tokio::time::timeout(limit, build(shared, repository, snapshot, sandbox, progress))
                .await
                .unwrap_or(Err(EphemeralError::TimedOut { limit }))
        }
        Err(error) => Err(error),
    };
    let failed = |code: &str, message: String| BuildLine::Failed { code: code.to_owned(), message };
    let build = match built {
        Ok(build) => build,
        Err(error) => {
            let message = error_chain(&error);
            let _ = shared.store.build_fail(shared.lease, snapshot, &message, now()).await;
            if let Some(snapshots) = shared.provider.snapshots() {
                let _ = snapshots.snapshot_remove(snapshot).await;
            }
            return failed("build_failed", message);
        }
    };
    match shared.store.build_publish(shared.lease, &build).await {
        Ok(()) => {
            remove_outdated_builds(shared, &repository.name).await;
            BuildLine::Built { build }
        }
        Err(error) => failed("store_failed", error_chain(&error)),
    }
}

/// Removes each snapshot before its row, so that the next build retries after a crash in between.
async fn remove_outdated_builds(shared: &Shared, repository: &str) {
    let Some(snapshots) = shared.provider.snapshots() else { return };
    for snapshot in shared.store.build_outdated(repository).await.unwrap_or_default() {
        match snapshots.snapshot_remove(&snapshot).await {
            Ok(()) => {
                let _ = shared.store.build_forget(shared.lease, &snapshot).await;
            }
            Err(error) => {
                tracing::warn!(%snapshot, error = error_chain(&error), "cannot remove an outdated build")
            }
        }
    }
}

async fn build(
    shared: &Arc<Shared>,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    progress: &Progress,
) -> Result<Build, EphemeralError> {
    let report = |message: &str| {
        let _ = progress.send(BuildLine::Progress { message: message.to_owned() });
    };
    let started = shared.clock.now();
    let order = PassSpec {
        // Not a real session: traffic through this door only appears in the log.
        session: SessionId::random(),
        network: NetworkPolicy::Trusted,
        upstream: Upstream::Scripted,
        branch: None,
    };
    let pass = shared.pass(std::slice::from_ref(repository), order).await;
    report("starting a sandbox");
    let from = StartFrom::Image(repository.image.clone());
    let mut sandbox = EphemeralSandbox::start(shared, sandbox, from, Some(pass)).await?;
    sandbox.boot(&repository.name, repository.base.clone(), BootStart::Build, &report).await?;
    let (commit, _) = checkout::head(&sandbox.bridge, &repository.name).await?;
    let commit =
        commit.ok_or_else(|| EphemeralError::Other("the repository has no commit".to_owned()))?;
    report("running the check");
    let limit: Duration = shared.config.timeouts.warm;
    let evidence = check::run(&sandbox.bridge, &repository.name, commit.clone(), limit).await?;
    report("saving a snapshot");
    sandbox.save(snapshot).await?;
    report("starting a sandbox from the snapshot");
    let proof = EphemeralSandbox::start(
        shared,
        SandboxId::random(),
        StartFrom::Snapshot(snapshot.clone()),
        None,
    )
    .await?;
    proof.remove().await?;
    Ok(Build {
        snapshot: snapshot.clone(),
        commit,
        check: Some(evidence).filter(|evidence| evidence.outcome != CheckOutcome::NoneDeclared),
        millis: u64::try_from(shared.clock.now().since(started).as_millis()).unwrap_or(u64::MAX),
        built_at: now(),
    })
}

fn check_url(url: &str) -> Result<(), SessionError> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let Some(rest) = rest else {
        return Err(SessionError::invalid(
            "invalid_url",
            "a repository URL must start with http:// or https://",
        ));
    };
    let host = rest.split('/').next().unwrap_or_default();
    if host.contains('@') {
        return Err(SessionError::invalid(
            "invalid_url",
            "a repository URL cannot contain credentials: store a secret and name it instead",
        ));
    }
    // Git remotes need none of these, tokens could hide in them, and URLs are stored in plain text.
    if rest.contains(['?', '#', '\\']) {
        return Err(SessionError::invalid(
            "invalid_url",
            "a repository URL cannot contain `?`, `#` or a backslash",
        ));
    }
    if host.is_empty() || rest.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
        return Err(SessionError::invalid("invalid_url", "invalid repository URL"));
    }
    Ok(())
}

pub(crate) fn repository_name(text: &str) -> Result<RepositoryName, SessionError> {
    text.parse().map_err(|invalid: InvalidRepositoryName| {
        SessionError::invalid("invalid_name", invalid.to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn url_with_credentials_is_refused() {
        assert!(check_url("https://user:token@example.org/a.git").is_err());
        assert!(check_url("https://example.org/a.git?access_token=secret").is_err());
        assert!(check_url("https://example.org/a.git#secret").is_err());
        assert!(check_url("file:///etc").is_err());
        assert!(check_url("https://example.org/a b").is_err());
        assert!(check_url("https://example.org/a.git").is_ok());
    }
}
