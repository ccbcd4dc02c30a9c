//! The commits of a session's branch as a git bundle, so that a user can take them home without a
//! push. Git runs in the session's sandbox or, when it has none, in an ephemeral one without
//! network that starts from the session's last snapshot; nothing of the repository is read on the
//! host.

use std::sync::{Arc, LazyLock};

use harvest_proto::{
    BranchName, RepositoryName, RepositoryRef, SandboxId, SessionId,
    bridge::{FaultCode, GitQuery, Truncation},
};
use harvest_store::{CheckoutRecord, SessionRecord};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::{Sessions, diffs::not_started, sandbox::ready_bridge};
use crate::{
    bridge::{Bridge, BridgeError, QueryOutput},
    checkout,
    compute_meter::compute_owner,
    ephemeral::EphemeralSandbox,
    error::SessionError,
    error_chain::error_chain,
    sandboxes::StartFrom,
    trees,
};

// Commits of a session, without those of its base.
const MAX_BUNDLE_BYTES: usize = 64 << 20;

// Each is held in memory until it was sent, and may start a sandbox.
static CONCURRENT_BUNDLES: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(2)));

/// The commits of a session's branch that its base lacks.
#[derive(Debug)]
pub struct SessionBundle {
    pub repository: RepositoryName,
    pub branch: BranchName,
    /// The number of files with changes that are in no commit.
    pub uncommitted: u64,
    pub content: BundleBytes,
}

/// A bundle as `git bundle create` writes it, with one reference: the branch. It counts as one of
/// the concurrent ones until it is dropped.
#[derive(Debug)]
pub struct BundleBytes {
    bytes: Vec<u8>,
    _permit: OwnedSemaphorePermit,
}

impl AsRef<[u8]> for BundleBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Sessions {
    /// The commits of a session's branch in one of its repositories; in the only one by default.
    ///
    /// # Errors
    /// When the session has no such repository, or the branch has no commits of its own.
    pub async fn bundle(
        &self,
        session: &SessionId,
        repository: Option<&RepositoryRef>,
    ) -> Result<SessionBundle, SessionError> {
        let record = self.shared.store.session_get(session).await?;
        let checkout = chosen(&record, repository)?;
        let permit = Arc::clone(&CONCURRENT_BUNDLES).acquire_owned().await;
        let permit = permit.map_err(|_| SessionError::Stopped)?;
        let handle = self.handle(session).await?;
        // Marked busy first, so that a frozen sandbox is thawed by the time it is used.
        let _busy = handle.busy();
        if let Some(bridge) = ready_bridge(&handle).await {
            return read(&bridge, &record, checkout, permit).await;
        }
        let snapshot = record.session.snapshot_id.clone().ok_or_else(|| {
            let hint = "`harvest resume SESSION` starts its sandbox";
            SessionError::conflict("no_snapshot", "the session has no snapshot yet", hint)
        })?;
        let (id, owner) = (SandboxId::random(), compute_owner(&record));
        let (sandboxes, from) = (&self.shared.sandboxes, StartFrom::Snapshot(snapshot));
        let started = EphemeralSandbox::start(sandboxes, id, from, None, owner).await;
        let sandbox = started.map_err(|error| not_started("bundle_failed", error))?;
        let bundle = read(&sandbox.bridge, &record, checkout, permit).await;
        sandbox.remove().await;
        bundle
    }
}

fn chosen<'a>(
    record: &'a SessionRecord,
    repository: Option<&RepositoryRef>,
) -> Result<&'a CheckoutRecord, SessionError> {
    let id = &record.session.id;
    let fits =
        |one: &&CheckoutRecord| repository.is_none_or(|wanted| wanted.matches(&one.repository));
    let mut found = record.checkouts.iter().filter(fits);
    match (found.next(), found.next(), repository) {
        (Some(only), None, _) => Ok(only),
        (Some(_), Some(_), _) => {
            let what = format!("session {id} has several repositories");
            let hint = "name one: `-r OWNER/NAME`";
            Err(SessionError::conflict("ambiguous_name", what, hint))
        }
        (None, _, Some(wanted)) => {
            Err(SessionError::missing(format!("repository `{wanted}` in {id}")))
        }
        (None, _, None) => {
            let hint = "`harvest cp -r SESSION:/workspace FOLDER` copies files";
            let what = "the session has no repository";
            Err(SessionError::conflict("no_repository", what, hint))
        }
    }
}

async fn read(
    bridge: &Bridge,
    record: &SessionRecord,
    checkout: &CheckoutRecord,
    permit: OwnedSemaphorePermit,
) -> Result<SessionBundle, SessionError> {
    let (folder, branch) = (&checkout.folder, &record.session.branch);
    let query = GitQuery::Bundle { branch: branch.clone(), base: checkout.base.clone() };
    let output = bridge.git_query(folder, query, MAX_BUNDLE_BYTES).await;
    let QueryOutput { bytes, truncated } = output.map_err(|error| match error {
        BridgeError::Fault(fault) if fault.code == FaultCode::NotFound => SessionError::conflict(
            "no_branch",
            format!("{} has no branch {branch}", folder.path()),
            "`harvest shell SESSION` shows which branches it has",
        ),
        error => failed(error_chain(&error)),
    })?;
    let push = "`harvest send SESSION \"commit and push\"` brings its work to the remote";
    match truncated {
        Some(Truncation::Limit) => {
            let what = format!("the commits are larger than {} MiB", MAX_BUNDLE_BYTES >> 20);
            return Err(SessionError::conflict("too_large", what, push));
        }
        Some(Truncation::Timeout) => {
            return Err(failed("git was killed by the time limit".to_owned()));
        }
        None => {}
    }
    let head = checkout::head(bridge, folder).await.map_err(|error| failed(error_chain(&error)))?;
    let against = head.commit.as_deref();
    let (_, stat) = trees::save(bridge, folder, Some(against.unwrap_or(checkout::EMPTY_TREE)))
        .await
        .map_err(|error| failed(error_chain(&error)))?;
    if bytes.is_empty() {
        let hint = match stat.files {
            0 => "`harvest diff SESSION` shows what it changed".to_owned(),
            files => {
                let files = if files == 1 { "1 file".to_owned() } else { format!("{files} files") };
                format!(
                    "{files} with uncommitted changes: `harvest send SESSION \"commit your work\"`"
                )
            }
        };
        let what = format!("the branch {branch} has no commits of its own");
        return Err(SessionError::conflict("nothing_committed", what, hint));
    }
    Ok(SessionBundle {
        repository: checkout.repository.clone(),
        branch: branch.clone(),
        uncommitted: stat.files,
        content: BundleBytes { bytes, _permit: permit },
    })
}

fn failed(what: String) -> SessionError {
    let hint = "inspect the checkout with `harvest exec`";
    SessionError::conflict("bundle_failed", what, hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundle_counts_until_it_is_dropped() {
        let concurrent = Arc::new(Semaphore::new(1));
        let permit = Arc::clone(&concurrent).try_acquire_owned().unwrap();
        let content = BundleBytes { bytes: b"# v2 git bundle".to_vec(), _permit: permit };
        let body: Box<dyn AsRef<[u8]> + Send> = Box::new(content);
        assert!(body.as_ref().as_ref().starts_with(b"# v2") && concurrent.available_permits() == 0);
        drop(body);
        assert_eq!(concurrent.available_permits(), 1);
    }
}
