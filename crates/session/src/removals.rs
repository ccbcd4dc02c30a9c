//! Removes what nobody uses any more. What it is was written by whoever forgot its last user, in the same
//! transaction; so a crash at any moment leaves it to be removed by the next server, and nothing that has
//! a user is ever removed here.

use std::{sync::Arc, time::Duration};

use harvest_store::Removal;

use crate::{
    provider::ProviderError,
    wiring::{Shared, words},
};

// What the machine refuses now it may do soon, a volume in use or a full disk apart: those take longer.
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(300);

/// Removes whatever is to be removed, from now until the server ends.
pub(crate) fn spawn(shared: &Arc<Shared>) {
    let own = Arc::clone(shared);
    shared.spawn(async move {
        let mut wait = FIRST_WAIT;
        loop {
            let all_done = round(&own).await;
            let woken = own.removals.notified();
            if all_done {
                wait = FIRST_WAIT;
                woken.await;
            } else {
                let _ = tokio::time::timeout(wait, woken).await;
                wait = (wait * 2).min(LONGEST_WAIT);
            }
        }
    });
}

/// Everything the store says is to be removed, once; then the room is freed, also of what a server that
/// died in between has left.
async fn round(shared: &Shared) -> bool {
    let mut all_done = match shared.store.removal_list().await {
        Ok(removals) => attempt(shared, &removals).await,
        Err(error) => {
            tracing::warn!(%error, "what is to be removed cannot be read");
            false
        }
    };
    if let Some(disks) = shared.provider.disks()
        && let Err(error) = disks.sweep().await
    {
        tracing::warn!(error = words(&error), "the room of what was removed cannot be freed");
        all_done = false;
    }
    all_done
}

/// Removes these now, as far as that works; the rest, and freeing their room, is done in the background.
pub(crate) async fn carry_out(shared: &Shared, removals: &[Removal]) {
    attempt(shared, removals).await;
    shared.removals.notify_one();
}

async fn attempt(shared: &Shared, removals: &[Removal]) -> bool {
    let mut all_done = true;
    for removal in removals {
        if let Err(error) = remove(shared, removal).await {
            tracing::warn!(
                ?removal,
                error = words(&error),
                "cannot be removed yet; it is tried again"
            );
            all_done = false;
        } else if let Err(error) = shared.store.removal_done(shared.lease, removal).await {
            // It is removed again then, which changes nothing.
            tracing::debug!(?removal, %error, "a removal cannot be forgotten");
            all_done = false;
        }
    }
    all_done
}

async fn remove(shared: &Shared, removal: &Removal) -> Result<(), ProviderError> {
    match removal {
        Removal::Sandbox(sandbox) => shared.provider.end(sandbox).await,
        Removal::Snapshot(snapshot) => match shared.provider.snapshots() {
            Some(snapshots) => snapshots.remove(snapshot).await,
            None => Ok(()),
        },
        Removal::State(repository) => match shared.provider.disks() {
            Some(disks) => disks.state_remove(repository).await,
            None => Ok(()),
        },
        Removal::Copy { url, secret } => {
            forget_copy(shared, url, secret.as_deref()).await.map_err(|source| {
                ProviderError::Machine {
                    doing: format!("cannot remove what the forge holds of {url}"),
                    source,
                }
            })
        }
    }
}

/// Nobody else may know the copy by another name, nor be about to register it again.
async fn forget_copy(
    shared: &Shared,
    url: &str,
    secret: Option<&str>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let _held = shared.pulls.hold()?;
    let others = shared.store.repository_list().await?;
    let lasting = |url: &str| shared.pulls.lasting(url);
    let known = others.iter().any(|other| lasting(&other.url) == lasting(url));
    if known || !shared.pulls.forget(url).await? {
        return Ok(());
    }
    // The key to what is no more.
    let used = |name: &str| others.iter().any(|other| other.secret.as_deref() == Some(name));
    if let Some(secret) = secret.filter(|name| !used(name)) {
        shared.store.secret_remove(secret).await?;
    }
    Ok(())
}
