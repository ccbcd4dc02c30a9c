//! Saves each checkout as a git tree at the end of a turn, so that any two turns can be compared
//! later. The supervisor stores the objects in the agent's home, outside the repository.

use harvest_proto::{
    RepositoryName, SessionId, SnapshotId, TurnId,
    bridge::{DiffStat, FaultCode, GitQuery, Truncation},
};
use harvest_store::Write;

use crate::{
    bridge::{Bridge, BridgeError, QueryOutput},
    checkout,
    context::Shared,
    error_chain::error_chain,
};

// The largest pack copied between two sandboxes for a comparison.
const MAX_PACK_BYTES: usize = 64 << 20;

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TreeComparison {
    Diff {
        text: Vec<u8>,
        truncated: bool,
    },
    /// One of the two trees is not in this sandbox.
    Missing,
}

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
    fn of(error: BridgeError, repository: &RepositoryName) -> Self {
        match error {
            BridgeError::Fault(fault) => {
                Self::Git { folder: checkout::folder(repository), tail: fault.message }
            }
            other => Self::Bridge(other),
        }
    }

    fn timed_out(repository: &RepositoryName) -> Self {
        let tail = "git was killed by the time limit".to_owned();
        Self::Git { folder: checkout::folder(repository), tail }
    }
}

/// Saves the current state of a checkout; returns the tree and its diffstat against the tree or
/// commit `against`.
pub(crate) async fn save(
    bridge: &Bridge,
    repository: &RepositoryName,
    against: Option<&str>,
) -> Result<(String, DiffStat), TreeError> {
    let saved = bridge.git_save_tree(repository, against).await;
    saved.map_err(|error| TreeError::of(error, repository))
}

/// Runs a comparison; the output is truncated at `limit` bytes.
pub(crate) async fn compare(
    bridge: &Bridge,
    repository: &RepositoryName,
    comparison: GitQuery,
    limit: usize,
) -> Result<TreeComparison, TreeError> {
    match bridge.git_query(repository, comparison, limit).await {
        Ok(QueryOutput { truncated: Some(Truncation::Timeout), .. }) => {
            Err(TreeError::timed_out(repository))
        }
        Ok(QueryOutput { bytes, truncated }) => {
            Ok(TreeComparison::Diff { text: bytes, truncated: truncated.is_some() })
        }
        Err(BridgeError::Fault(fault)) if fault.code == FaultCode::NotFound => {
            Ok(TreeComparison::Missing)
        }
        Err(error) => Err(TreeError::of(error, repository)),
    }
}

/// Copies a tree from one sandbox to another. Both have `base`.
pub(crate) async fn copy_tree(
    from: &Bridge,
    to: &Bridge,
    repository: &RepositoryName,
    tree: &str,
    base: Option<&str>,
) -> Result<(), TreeError> {
    let pack = GitQuery::Pack { tree: tree.to_owned(), base: base.map(str::to_owned) };
    let packed = from.git_query(repository, pack, MAX_PACK_BYTES).await;
    let QueryOutput { bytes, truncated } =
        packed.map_err(|error| TreeError::of(error, repository))?;
    match truncated {
        Some(Truncation::Limit) => return Err(TreeError::TooLarge),
        Some(Truncation::Timeout) => return Err(TreeError::timed_out(repository)),
        None => {}
    }
    let unpacked = to.git_unpack_tree(repository, &bytes).await;
    unpacked.map_err(|error| TreeError::of(error, repository))
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
    for repository in record.repositories() {
        let previous = trees.iter().find(|tree| repository == tree.repository.as_str());
        let previous = previous.map(|tree| tree.tree.as_str()).or(record.base_commit(&repository));
        match save(bridge, &repository, Some(previous.unwrap_or(checkout::EMPTY_TREE))).await {
            Ok((tree, stat)) => {
                let (turn, repository) = (turn.clone(), repository.to_string());
                writes.push(Write::TurnTree { turn, after, repository, tree, stat });
            }
            Err(error) => {
                tracing::debug!(%session, %repository, error = error_chain(&error), "cannot save the tree of a turn");
            }
        }
    }
    writes
}
