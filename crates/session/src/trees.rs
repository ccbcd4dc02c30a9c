//! Saves each checkout as a git tree at the end of a turn, so that any two turns can be compared
//! later. The supervisor stores the objects in the agent's home, outside the repository.

use harvest_proto::{
    CheckoutFolder, SessionId, SnapshotId, TurnId,
    bridge::{DiffStat, FaultCode, GitQuery, Truncation},
};
use harvest_store::{CheckoutRecord, Write};

use crate::{
    bridge::{Bridge, BridgeError, QueryOutput},
    checkout,
    context::Shared,
    error_chain::error_chain,
};

// The largest pack copied between two sandboxes for a comparison.
const MAX_PACK_BYTES: usize = 64 << 20;

/// The text of a diff, and whether it was truncated.
pub(crate) type Diff = (Vec<u8>, bool);

#[derive(Debug, thiserror::Error)]
pub(crate) enum TreeError {
    #[error("cannot run git in the sandbox")]
    Bridge(#[from] BridgeError),
    #[error("git failed in {folder}: {tail}")]
    Git { folder: String, tail: String },
    #[error("the differences exceed {} MiB", MAX_PACK_BYTES >> 20)]
    TooLarge,
}

impl TreeError {
    fn of(error: BridgeError, folder: &CheckoutFolder) -> Self {
        match error {
            BridgeError::Fault(fault) => Self::Git { folder: folder.path(), tail: fault.message },
            other => Self::Bridge(other),
        }
    }

    fn timed_out(folder: &CheckoutFolder) -> Self {
        let tail = "git was killed by the time limit".to_owned();
        Self::Git { folder: folder.path(), tail }
    }
}

/// Saves the current state of a checkout; returns the tree and its diffstat against the tree or
/// commit `against`.
pub(crate) async fn save(
    bridge: &Bridge,
    folder: &CheckoutFolder,
    against: Option<&str>,
) -> Result<(String, DiffStat), TreeError> {
    let saved = bridge.git_save_tree(folder, against).await;
    saved.map_err(|error| TreeError::of(error, folder))
}

/// Runs a comparison; the output is truncated at `limit` bytes. `None` when one of the two trees is
/// not in this sandbox.
pub(crate) async fn compare(
    bridge: &Bridge,
    folder: &CheckoutFolder,
    comparison: GitQuery,
    limit: usize,
) -> Result<Option<Diff>, TreeError> {
    match bridge.git_query(folder, comparison, limit).await {
        Ok(QueryOutput { truncated: Some(Truncation::Timeout), .. }) => {
            Err(TreeError::timed_out(folder))
        }
        Ok(QueryOutput { bytes, truncated }) => Ok(Some((bytes, truncated.is_some()))),
        Err(BridgeError::Fault(fault)) if fault.code == FaultCode::NotFound => Ok(None),
        Err(error) => Err(TreeError::of(error, folder)),
    }
}

/// Copies a tree from one sandbox to another. Both have `base`.
pub(crate) async fn copy_tree(
    from: &Bridge,
    to: &Bridge,
    folder: &CheckoutFolder,
    tree: &str,
    base: Option<&str>,
) -> Result<(), TreeError> {
    let pack = GitQuery::Pack { tree: tree.to_owned(), base: base.map(str::to_owned) };
    let packed = from.git_query(folder, pack, MAX_PACK_BYTES).await;
    let QueryOutput { bytes, truncated } = packed.map_err(|error| TreeError::of(error, folder))?;
    match truncated {
        Some(Truncation::Limit) => return Err(TreeError::TooLarge),
        Some(Truncation::Timeout) => return Err(TreeError::timed_out(folder)),
        None => {}
    }
    let unpacked = to.git_unpack_tree(folder, &bytes).await;
    unpacked.map_err(|error| TreeError::of(error, folder))
}

/// The writes that save the trees of a turn that has just ended. Best effort: failures are only
/// logged.
pub(crate) async fn turn_tree_writes(
    shared: &Shared,
    session: &SessionId,
    bridge: &Bridge,
    turn: &TurnId,
    started_from: Option<&SnapshotId>,
) -> Vec<Write> {
    let store = &shared.store;
    let Ok(record) = store.session_get(session).await else { return Vec::new() };
    let after = match started_from {
        Some(snapshot) => store.turn_before(session, turn, snapshot).await.unwrap_or_default(),
        None => 0,
    };
    let trees = store.tree_list_of(session, after).await.unwrap_or_default();
    let mut writes = Vec::new();
    for CheckoutRecord { repository, folder, base_commit, .. } in &record.checkouts {
        let previous = trees.iter().find(|tree| tree.repository == *repository);
        let previous = previous.map(|tree| tree.tree.as_str()).or(base_commit.as_deref());
        match save(bridge, folder, Some(previous.unwrap_or(checkout::EMPTY_TREE))).await {
            Ok((tree, stat)) => {
                let (turn, repository) = (turn.clone(), repository.clone());
                writes.push(Write::TurnTree { turn, after, repository, tree, stat });
            }
            Err(error) => {
                tracing::debug!(%session, %repository, error = error_chain(&error), "cannot save the tree of a turn");
            }
        }
    }
    writes
}
