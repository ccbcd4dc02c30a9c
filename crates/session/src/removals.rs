//! Removes unused sandboxes, snapshots, state volumes and forge copies. The transaction that
//! deletes the last user of such an object also records its removal; after a crash, the next server
//! continues. Objects in use are never removed here.

use std::{sync::Arc, time::Duration};

use harvest_store::Removal;

use crate::{
    context::{Shared, error_chain},
    provider::ProviderError,
};

// Most failures are brief; a volume in use or a full disk takes longer.
const FIRST_RETRY: Duration = Duration::from_secs(1);
const MAX_RETRY: Duration = Duration::from_secs(300);

/// Starts the background task that works off recorded removals.
pub(crate) fn spawn(shared: &Arc<Shared>) {
    let own = Arc::clone(shared);
    shared.spawn(async move {
        let mut wait = FIRST_RETRY;
        loop {
            let all_done = remove_pending(&own).await;
            let notified = own.removals.notified();
            if all_done {
                wait = FIRST_RETRY;
                notified.await;
            } else {
                let _ = tokio::time::timeout(wait, notified).await;
                wait = (wait * 2).min(MAX_RETRY);
            }
        }
    });
}

/// Tries every recorded removal once, then frees the space, including that left by a crashed
/// server.
async fn remove_pending(shared: &Shared) -> bool {
    let mut all_done = match shared.store.removal_list().await {
        Ok(removals) => remove_all(shared, &removals).await,
        Err(error) => {
            tracing::warn!(%error, "cannot read the pending removals");
            false
        }
    };
    if let Some(disks) = shared.provider.disks()
        && let Err(error) = disks.reclaim().await
    {
        tracing::warn!(error = error_chain(&error), "cannot free the space of removed snapshots");
        all_done = false;
    }
    all_done
}

/// Tries these removals now; the background task retries failures and frees the space.
pub(crate) async fn remove_now(shared: &Shared, removals: &[Removal]) {
    remove_all(shared, removals).await;
    shared.removals.notify_one();
}

async fn remove_all(shared: &Shared, removals: &[Removal]) -> bool {
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

async fn remove(shared: &Shared, removal: &Removal) -> Result<(), ProviderError> {
    match removal {
        Removal::Sandbox(sandbox) => shared.provider.remove(sandbox).await,
        Removal::Snapshot(snapshot) => match shared.provider.snapshots() {
            Some(snapshots) => snapshots.snapshot_remove(snapshot).await,
            None => Ok(()),
        },
        Removal::State(repository) => match shared.provider.disks() {
            Some(disks) => disks.state_remove(repository).await,
            None => Ok(()),
        },
        Removal::ForgeCopy { url, secret } => remove_forge_copy(shared, url, secret.as_deref())
            .await
            .map_err(|source| ProviderError::Failed {
                doing: format!("cannot remove the forge's copy of {url}"),
                source,
            }),
    }
}

/// Removes the forge's copy unless another repository has the same URL. Registration is locked
/// meanwhile.
async fn remove_forge_copy(
    shared: &Shared,
    url: &str,
    secret: Option<&str>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _lock = shared.forge.try_lock()?;
    let others = shared.store.repository_list().await?;
    let lasting = |url: &str| shared.forge.stable_url(url);
    let in_use = others.iter().any(|other| lasting(&other.url) == lasting(url));
    if in_use || !shared.forge.remove_repository(url).await? {
        return Ok(());
    }
    // The copy's secret goes with it, unless another repository uses it.
    let used = |name: &str| others.iter().any(|other| other.secret.as_deref() == Some(name));
    if let Some(secret) = secret.filter(|name| !used(name)) {
        shared.store.secret_remove(secret).await?;
    }
    Ok(())
}
