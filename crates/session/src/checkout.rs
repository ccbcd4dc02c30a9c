//! Prepares and inspects a session's checkouts over the bridge.

use harvest_proto::{
    BranchName, CheckoutFolder,
    bridge::{Checkout, Command, DiffStat, GitQuery, GitRequest, Reply, ToSupervisor, Truncation},
    names::InvalidBranchName,
};
use harvest_store::{CheckoutRecord, SessionRecord, Write};

use crate::{
    bridge::{Bridge, BridgeError},
    git_remote::remote,
};

// Enough for a person to read; generated files may exceed it.
const DIFF_BYTES: usize = 1024 * 1024;

// Git's hash of the empty tree.
pub(crate) const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";

#[derive(Debug, thiserror::Error)]
pub(crate) enum PrepareError {
    #[error("cannot run git in the sandbox")]
    Bridge(#[from] BridgeError),
    #[error("cannot create branch `{branch}`: {tail}")]
    Branch { branch: BranchName, tail: String },
}

/// A command run as the agent's user, so that it has no more rights than the agent.
pub(crate) fn command(argv: &[&str], folder: &str, timeout_millis: u64) -> Command {
    Command {
        argv: argv.iter().map(|&part| part.to_owned()).collect(),
        cwd: Some(folder.to_owned()),
        user: Some("harvest".to_owned()),
        timeout_millis: Some(timeout_millis),
        ..Command::default()
    }
}

/// A checkout of a session as its supervisor knows it. With `clones`, a missing one is cloned.
pub(crate) fn bridge_checkout(
    record: &SessionRecord,
    of: &CheckoutRecord,
    clones: bool,
) -> Checkout {
    Checkout {
        name: of.repository.clone(),
        folder: of.folder.clone(),
        remote: remote(&of.repository),
        url: None,
        base: of.base.clone(),
        branch: Some(record.session.branch.clone()),
        clone_missing: clones,
    }
}

/// What is checked out.
pub(crate) struct Head {
    pub(crate) commit: Option<String>,
    /// Of the remote.
    default_branch: Option<String>,
    has_setup: bool,
}

pub(crate) async fn head(bridge: &Bridge, folder: &CheckoutFolder) -> Result<Head, BridgeError> {
    let request = GitRequest::Head { checkout: folder.clone() };
    match bridge.request(|id| ToSupervisor::Git { id, request }).await? {
        Reply::Head { commit, default_branch, has_setup } => {
            Ok(Head { commit, default_branch, has_setup })
        }
        _ => Err(BridgeError::UnexpectedReply),
    }
}

/// A commit that is checked out to be checked.
pub(crate) struct CheckedOut {
    /// What was checked out before.
    pub(crate) base: Option<String>,
    /// The check in `.harvest/config.toml` of the base.
    pub(crate) declared: Option<String>,
    /// The first files below `.harvest` that the commit changes.
    pub(crate) changed: Vec<String>,
    pub(crate) changed_count: u64,
}

// Names in evidence, each of this many characters at most.
const MAX_CHANGED: usize = 20;
const MAX_CHANGED_CHARACTERS: usize = 200;

/// Fetches a commit, of this branch if it is known, and checks it out.
pub(crate) async fn check_out(
    bridge: &Bridge,
    folder: &CheckoutFolder,
    branch: Option<&BranchName>,
    commit: &str,
) -> Result<CheckedOut, BridgeError> {
    let (checkout, branch) = (folder.clone(), branch.cloned());
    let request = GitRequest::CheckOut { checkout, branch, commit: commit.to_owned() };
    match bridge.request(|id| ToSupervisor::Git { id, request }).await? {
        Reply::CheckedOut { base, declared, changed, changed_count } => {
            let changed = changed.iter().take(MAX_CHANGED).map(|name| printable(name)).collect();
            Ok(CheckedOut { base, declared, changed, changed_count })
        }
        _ => Err(BridgeError::UnexpectedReply),
    }
}

// The supervisor is no part of the sandbox's trust, but the names are a repository's.
fn printable(name: &str) -> String {
    name.chars().filter(|c| !c.is_control()).take(MAX_CHANGED_CHARACTERS).collect()
}

/// Puts each checkout on `branch`, if given. With `record_base`, also records the base commits that
/// are not yet known.
pub(crate) async fn prepare(
    bridge: &Bridge,
    checkouts: &[CheckoutRecord],
    branch: Option<&BranchName>,
    record_base: bool,
) -> Result<Vec<Write>, PrepareError> {
    let mut writes = Vec::new();
    for checkout in checkouts {
        if let Some(branch) = branch {
            let (checkout, branch) = (checkout.folder.clone(), branch.clone());
            let request = GitRequest::SetBranch { checkout, branch: branch.clone() };
            let set = bridge.request(|id| ToSupervisor::Git { id, request }).await;
            set.map_err(|error| match error {
                BridgeError::Fault(fault) => PrepareError::Branch { branch, tail: fault.message },
                other => PrepareError::Bridge(other),
            })?;
        }
        if record_base && checkout.base_commit.is_none() {
            // The disk of another session is no result of setup.
            let set_up = branch.is_none();
            writes.extend(base_writes(bridge, checkout, set_up).await?);
        }
    }
    Ok(writes)
}

/// Records where the session's changes begin and the remote's default branch.
async fn base_writes(
    bridge: &Bridge,
    checkout: &CheckoutRecord,
    set_up: bool,
) -> Result<Vec<Write>, BridgeError> {
    let Head { commit, default_branch: base, has_setup } = head(bridge, &checkout.folder).await?;
    let repository = &checkout.repository;
    let commit = match commit {
        Some(commit) if has_setup && set_up => {
            Some(after_setup(bridge, &checkout.folder, commit).await?)
        }
        other => other,
    };
    let commit = commit.map(|commit| Write::BaseCommit { repository: repository.clone(), commit });
    let base = base.and_then(|base| match base.parse() {
        Ok(base) => Some(Write::DefaultBase { repository: repository.clone(), base }),
        Err(error) => {
            let error: InvalidBranchName = error;
            tracing::warn!(%repository, %error, "cannot record the default branch");
            None
        }
    });
    Ok(commit.into_iter().chain(base).collect())
}

/// The tree that setup left, or the commit if setup changed nothing. What setup leaves behind is
/// no change of the session. Best effort: a tree that cannot be saved only widens the first diff.
async fn after_setup(
    bridge: &Bridge,
    folder: &CheckoutFolder,
    commit: String,
) -> Result<String, BridgeError> {
    match bridge.git_save_tree(folder, Some(&commit)).await {
        Ok((_, DiffStat { files: 0, .. })) => Ok(commit),
        Ok((tree, _)) => Ok(tree),
        Err(BridgeError::Fault(fault)) => {
            tracing::debug!(%folder, fault.message, "cannot save the tree after setup");
            Ok(commit)
        }
        Err(lost) => Err(lost),
    }
}

/// The diff of each checkout against its base commit. With several checkouts, paths start with the
/// checkout's folder, so that one patch in `/workspace` applies them all.
pub(crate) async fn diff(
    bridge: &Bridge,
    checkouts: &[CheckoutRecord],
) -> Result<String, BridgeError> {
    let mut whole = String::new();
    for checkout in checkouts {
        let base = checkout.base_commit.as_deref().unwrap_or(EMPTY_TREE).to_owned();
        let query = GitQuery::Diff { base, prefixed: checkouts.len() > 1 };
        let output = match bridge.git_query(&checkout.folder, query, DIFF_BYTES).await {
            Ok(output) => output,
            // The other checkouts still have a diff.
            Err(BridgeError::Fault(fault)) => {
                whole += &format!("\n… git failed in {}: {}\n", checkout.folder, fault.message);
                continue;
            }
            Err(error) => return Err(error),
        };
        whole += &String::from_utf8_lossy(&output.bytes);
        whole += match output.truncated {
            None => "",
            Some(Truncation::Limit) => "\n… the rest of the diff is left out\n",
            // An empty diff would look like no changes.
            Some(Truncation::Timeout) => "\n… git timed out: the diff is incomplete\n",
        };
    }
    Ok(whole)
}
