//! Removes unused sandboxes, snapshots, artifacts, state volumes and forge copies. The transaction
//! that deletes the last user of such an object also records its removal; after a crash, the next
//! server continues. Objects in use are never removed here.

use std::{sync::Arc, time::Duration};

use harvest_forge::Forge;
use harvest_proto::SecretOwner;
use harvest_store::{Lease, Removal, Store};
use tokio::{sync::Notify, time::Instant};

use crate::{
    artifacts::ArtifactFiles,
    error_chain::error_chain,
    jobs::{Job, JobError},
    sandbox_context::SandboxContext,
    sandboxes::SandboxError,
};

// From a removal to the attempt to free its space.
const RECLAIM_DELAY: Duration = Duration::from_secs(2);

/// Carries out removals.
pub(crate) struct Removals {
    pub(crate) store: Store,
    pub(crate) lease: Lease,
    pub(crate) artifacts: Arc<ArtifactFiles>,
    pub(crate) forge: Arc<dyn Forge>,
    pub(crate) sandboxes: Arc<SandboxContext>,
    /// Wakes the background job.
    pub(crate) wake: Arc<Notify>,
}

impl Removals {
    /// Starts the background job that works off recorded removals.
    pub(crate) fn spawn(self: &Arc<Self>) {
        let job = Job { name: "removals", period: None, wake: Arc::clone(&self.wake) };
        let removals = Arc::clone(self);
        job.spawn(&self.sandboxes.tasks, move || {
            let removals = Arc::clone(&removals);
            async move { remove_pending(&removals).await }
        });
    }

    /// Tries these removals now; the background job retries failures and frees the space.
    pub(crate) async fn remove_now(&self, removals: &[Removal]) {
        remove_all(self, removals).await;
        self.wake.notify_one();
    }
}

/// Tries every recorded removal once, then frees the space, including that left by a crashed
/// server.
async fn remove_pending(shared: &Removals) -> Result<(), JobError> {
    let removed = match shared.store.removal_list().await {
        Ok(removals) => match remove_all(shared, &removals).await {
            true => Ok(()),
            false => Err("some removals are not done".into()),
        },
        Err(error) => Err(error.into()),
    };
    if let Some(snapshots) = shared.sandboxes.provider.snapshots() {
        // Several removals in a row free their space together, and a start is not slowed down.
        tokio::time::sleep(RECLAIM_DELAY).await;
        let began = Instant::now();
        snapshots.reclaim().await?;
        // It reads the records of all snapshots: at most a tenth of the time.
        tokio::time::sleep(began.elapsed() * 9).await;
    }
    removed
}

async fn remove_all(shared: &Removals, removals: &[Removal]) -> bool {
    let mut all_done = true;
    for removal in removals {
        if let Err(error) = remove(shared, removal).await {
            tracing::warn!(?removal, error = error_chain(&error), "removal failed; retrying later");
            all_done = false;
        } else if let Err(error) = shared.store.removal_done(shared.lease, removal).await {
            // It is removed again later, which is harmless.
            tracing::debug!(?removal, %error, "cannot mark a removal as done");
            all_done = false;
        }
    }
    all_done
}

async fn remove(shared: &Removals, removal: &Removal) -> Result<(), SandboxError> {
    match removal {
        Removal::Sandbox(sandbox) => {
            shared.sandboxes.meter.end(sandbox).await;
            shared.sandboxes.provider.remove(sandbox).await
        }
        Removal::Snapshot(snapshot) => match shared.sandboxes.provider.snapshots() {
            Some(snapshots) => snapshots.remove(snapshot).await,
            None => Ok(()),
        },
        Removal::Artifact(sha256) => {
            shared.artifacts.remove(&shared.store, sha256).await.map_err(|source| {
                SandboxError::failed("cannot remove the content of an artifact", source)
            })
        }
        Removal::State(repository) => match shared.sandboxes.provider.host() {
            Some(host) => host.state_delete(repository).await,
            None => Ok(()),
        },
        Removal::ForgeCopy { url, secret } => {
            remove_forge_copy(shared, url, secret.as_deref()).await.map_err(|source| {
                SandboxError::failed(format!("cannot remove the forge's copy of {url}"), source)
            })
        }
    }
}

/// Removes the forge's copy unless another repository has the same URL. Registration is locked
/// meanwhile.
async fn remove_forge_copy(
    shared: &Removals,
    url: &str,
    secret: Option<&str>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _lock = shared.forge.try_lock()?;
    let others = shared.store.repository_remotes().await?;
    let lasting = |url: &str| shared.forge.stable_url(url);
    let in_use = others.iter().any(|(other, _)| lasting(other) == lasting(url));
    if in_use || !shared.forge.remove_repository(url).await? {
        return Ok(());
    }
    // The copy's secret goes with it, unless another repository uses it.
    let used = |name: &str| others.iter().any(|(_, secret)| secret.as_deref() == Some(name));
    if let Some(secret) = secret.filter(|name| !used(name)) {
        shared.store.secret_remove(&SecretOwner::Global, secret).await?;
    }
    Ok(())
}
