//! Repositories: registered by URL, prebuilt into a snapshot that sessions start from. A build is
//! published only after a sandbox has started from it; a failed one leaves the older build in place.

use std::{sync::Arc, time::Duration};

use futures_util::stream::{self, BoxStream, StreamExt};
use harvest_proto::{
    SandboxId, SessionId, SnapshotId,
    api::{AddRepository, Build, BuildLine, Repository},
    bridge::BootStart,
};
use tokio::sync::mpsc;

use crate::{
    Sessions, check, checkout,
    error::SessionError,
    hidden::{Hidden, HiddenError},
    provider::StartFrom,
    wiring::{PassOrder, Shared, now, words},
};

impl Sessions {
    /// Registers a repository.
    ///
    /// # Errors
    /// When the URL or the name makes no sense, or the name is taken.
    pub async fn repository_add(&self, add: AddRepository) -> Result<Repository, SessionError> {
        let url = add.url.trim().trim_end_matches('/').to_owned();
        check_url(&url)?;
        if let Some(image) = &add.image
            && !self.shared.provider.holds(&StartFrom::Image(image.clone())).await?
        {
            return Err(SessionError::missing(format!("image `{image}`")));
        }
        let name = match add.name {
            Some(name) => name,
            None => url.rsplit('/').next().unwrap_or_default().trim_end_matches(".git").to_owned(),
        };
        check_name(&name)?;
        if let Some(base) = &add.base {
            check_branch(base)?;
        }
        let repository = Repository {
            name,
            url: self.shared.pulls.lasting(&url),
            base: add.base,
            secret: add.secret,
            image: add.image.unwrap_or_else(|| self.shared.config.image.clone()),
            build: None,
            created_at: now(),
        };
        self.shared.store.repository_insert(&repository).await?;
        Ok(Repository { url, ..repository })
    }

    /// All repositories, by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn repositories(&self) -> Result<Vec<Repository>, SessionError> {
        let mut all = self.shared.store.repository_list().await?;
        all.iter_mut().for_each(|one| one.url = self.shared.pulls.current(&one.url));
        Ok(all)
    }

    /// A repository.
    ///
    /// # Errors
    /// When there is none of this name.
    pub async fn repository(&self, name: &str) -> Result<Repository, SessionError> {
        let one = self.shared.store.repository_get(name).await?;
        Ok(Repository { url: self.shared.pulls.current(&one.url), ..one })
    }

    /// Forgets a repository that no session uses, and with it what the local forge was made to hold of it.
    ///
    /// # Errors
    /// When there is none of this name, or a session uses it.
    pub async fn repository_delete(&self, name: &str) -> Result<(), SessionError> {
        let deleted = self.shared.store.repository_delete(name, now()).await;
        let removals = deleted.map_err(|error| match error {
            harvest_store::StoreError::Exists { what } => {
                SessionError::conflict("in_use", what, "delete its sessions first")
            }
            other => other.into(),
        })?;
        crate::removals::carry_out(&self.shared, &removals).await;
        Ok(())
    }

    /// Prebuilds a repository. It goes on when nobody listens any more.
    ///
    /// # Errors
    /// When there is no such repository, or it is being built already.
    pub async fn repository_build(
        &self,
        name: &str,
    ) -> Result<BoxStream<'static, BuildLine>, SessionError> {
        let repository = self.repository(name).await?;
        let (snapshot, sandbox) = (SnapshotId::random(), SandboxId::random());
        let lease = self.shared.lease;
        self.shared.store.build_begin(lease, name, &snapshot, &sandbox, now()).await.map_err(
            |error| match error {
                harvest_store::StoreError::Exists { what } => {
                    SessionError::conflict("building", what, "wait for it to end")
                }
                other => other.into(),
            },
        )?;
        let (tell, told) = mpsc::unbounded_channel();
        let shared = Arc::clone(&self.shared);
        self.shared.spawn(async move {
            let last = build_to_the_end(&shared, &repository, &snapshot, sandbox, &tell).await;
            let _ = tell.send(last);
        });
        Ok(stream::unfold(told, async |mut told| told.recv().await.map(|line| (line, told)))
            .boxed())
    }
}

type Tell = mpsc::UnboundedSender<BuildLine>;

async fn build_to_the_end(
    shared: &Arc<Shared>,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    tell: &Tell,
) -> BuildLine {
    let limit = shared.config.clocks.build;
    let built = match shared.room_for_check().await {
        // Waiting for room does not count.
        Ok(_room) => {
            tokio::time::timeout(limit, build(shared, repository, snapshot, sandbox, tell))
                .await
                .unwrap_or(Err(HiddenError::TimedOut { limit }))
        }
        Err(error) => Err(error),
    };
    let failed = |code: &str, message: String| BuildLine::Failed { code: code.to_owned(), message };
    let build = match built {
        Ok(build) => build,
        Err(error) => {
            let message = words(&error);
            let _ = shared.store.build_fail(shared.lease, snapshot, &message, now()).await;
            if let Some(snapshots) = shared.provider.snapshots() {
                let _ = snapshots.remove(snapshot).await;
            }
            return failed("build_failed", message);
        }
    };
    match shared.store.build_publish(shared.lease, &build).await {
        Ok(()) => {
            forget_outdated(shared, &repository.name).await;
            BuildLine::Built { build }
        }
        Err(error) => failed("store_failed", words(&error)),
    }
}

/// Snapshot first: what a crash leaves between the two is found again after the next build.
async fn forget_outdated(shared: &Shared, repository: &str) {
    let Some(snapshots) = shared.provider.snapshots() else { return };
    for snapshot in shared.store.build_outdated(repository).await.unwrap_or_default() {
        match snapshots.remove(&snapshot).await {
            Ok(()) => {
                let _ = shared.store.build_forget(shared.lease, &snapshot).await;
            }
            Err(error) => {
                tracing::warn!(%snapshot, error = words(&error), "an outdated build cannot be removed")
            }
        }
    }
}

async fn build(
    shared: &Arc<Shared>,
    repository: &Repository,
    snapshot: &SnapshotId,
    sandbox: SandboxId,
    tell: &Tell,
) -> Result<Build, HiddenError> {
    let say = |message: &str| {
        let _ = tell.send(BuildLine::Progress { message: message.to_owned() });
    };
    let began = shared.steady.now();
    let order = PassOrder {
        // No session's: what passes this door is written down nowhere but in the log.
        session: SessionId::random(),
        network: "trusted".to_owned(),
        model: Some("scripted".to_owned()),
        branch: None,
    };
    let pass = shared.pass(std::slice::from_ref(repository), order).await;
    say("starting a sandbox");
    let from = StartFrom::Image(repository.image.clone());
    let mut hidden = Hidden::start(shared, sandbox, from, Some(pass)).await?;
    hidden.boot(&repository.name, repository.base.clone(), BootStart::Build, &say).await?;
    let folder = checkout::folder(&repository.name);
    let commit = checkout::head(&hidden.bridge, &folder).await?;
    let commit =
        commit.ok_or_else(|| HiddenError::Other("the repository has no commit".to_owned()))?;
    say("running the check");
    let limit: Duration = shared.config.clocks.warm;
    let evidence = check::run(&hidden.bridge, &folder, commit.clone(), limit).await?;
    say("keeping its disk");
    hidden.keep(snapshot).await?;
    say("starting a sandbox from it");
    let proof =
        Hidden::start(shared, SandboxId::random(), StartFrom::Snapshot(snapshot.clone()), None)
            .await?;
    proof.end().await?;
    Ok(Build {
        snapshot: snapshot.clone(),
        commit,
        check: Some(evidence).filter(|evidence| evidence.check == check::CHECK),
        millis: u64::try_from(shared.steady.now().since(began).as_millis()).unwrap_or(u64::MAX),
        built_at: now(),
    })
}

fn check_url(url: &str) -> Result<(), SessionError> {
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    let Some(rest) = rest else {
        return Err(SessionError::invalid(
            "invalid_url",
            "a repository's URL begins with http:// or https://",
        ));
    };
    let host = rest.split('/').next().unwrap_or_default();
    if host.contains('@') {
        return Err(SessionError::invalid(
            "invalid_url",
            "a repository's URL holds no credential: set a secret and name it instead",
        ));
    }
    // What git remotes do without is where tokens hide, and a URL is stored as it is.
    if rest.contains(['?', '#', '\\']) {
        return Err(SessionError::invalid(
            "invalid_url",
            "a repository's URL has no `?`, `#` or backslash",
        ));
    }
    if host.is_empty() || rest.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
        return Err(SessionError::invalid("invalid_url", "that is not a repository's URL"));
    }
    Ok(())
}

/// Names become folders inside and paths of URLs.
pub(crate) fn check_name(name: &str) -> Result<(), SessionError> {
    let sound = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
    if name.is_empty()
        || name.len() > 100
        || name.starts_with('.')
        || name.starts_with('-')
        || !name.chars().all(sound)
    {
        return Err(SessionError::invalid(
            "invalid_name",
            "a repository's name is letters, digits, `-`, `_` and `.`, at most 100",
        ));
    }
    Ok(())
}

/// What git takes for a branch, and a little less.
pub(crate) fn check_branch(branch: &str) -> Result<(), SessionError> {
    let sound =
        |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.' | '/');
    let bad = branch.is_empty()
        || branch.len() > 200
        || branch.starts_with(['-', '/', '.'])
        || branch.ends_with(['/', '.'])
        || branch.ends_with(".lock")
        || branch.contains("..")
        || branch.contains("//")
        || !branch.chars().all(sound);
    if bad {
        return Err(SessionError::invalid(
            "invalid_branch",
            format!("`{branch}` is not a branch's name"),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_with_a_credential_is_refused() {
        assert!(check_url("https://user:token@example.org/a.git").is_err());
        assert!(check_url("https://example.org/a.git?access_token=secret").is_err());
        assert!(check_url("https://example.org/a.git#secret").is_err());
        assert!(check_url("file:///etc").is_err());
        assert!(check_url("https://example.org/a b").is_err());
        assert!(check_url("https://example.org/a.git").is_ok());
    }

    #[test]
    fn a_name_cannot_leave_its_folder() {
        for bad in ["", "..", ".git", "a/b", "-rf", "a b"] {
            assert!(check_name(bad).is_err(), "{bad}");
        }
        assert!(check_name("next.js").is_ok());
    }

    #[test]
    fn a_branch_cannot_be_an_option_or_a_range() {
        for bad in ["", "-x", "a..b", "/a", "a/", "x.lock", "a b", "a~1"] {
            assert!(check_branch(bad).is_err(), "{bad}");
        }
        assert!(check_branch("release/1.0").is_ok());
    }
}
