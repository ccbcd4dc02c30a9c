//! Git operations on a checkout. They run as the agent's user, without hooks.

use serde::{Deserialize, Serialize};

use super::{Author, Checkout, StreamId};
use crate::{BranchName, CheckoutFolder};

/// A sync of all checkouts: commit, fetch, rebase.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncRequest {
    /// Author of the commits of uncommitted work.
    pub author: Author,
    /// The checkouts, the primary one first.
    pub checkouts: Vec<SyncTarget>,
}

/// A checkout to sync.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncTarget {
    /// The checkout.
    pub checkout: Checkout,
    /// Full id of the commit that the session's changes began at, which a base that was rewritten
    /// no longer has; may be a tree.
    pub began: Option<String>,
}

/// A git operation on the checkout `/workspace/{checkout}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum GitRequest {
    /// Describe what is checked out; the reply is [`Reply::Head`](super::Reply::Head).
    Head {
        /// Folder of the checkout.
        checkout: CheckoutFolder,
    },
    /// Put the checkout on a branch: rename the branch of another session, or create the branch at
    /// the checked-out commit. A missing checkout is left missing.
    SetBranch {
        /// Folder of the checkout.
        checkout: CheckoutFolder,
        /// Name of the branch.
        branch: BranchName,
    },
    /// Fetch a commit and check it out in place of the base, with the submodules that the base
    /// has; the reply is [`Reply::CheckedOut`](super::Reply::CheckedOut).
    CheckOut {
        /// Folder of the checkout.
        checkout: CheckoutFolder,
        /// The remote's branch that has the commit; the commit itself is fetched without one.
        branch: Option<BranchName>,
        /// Full id of the commit.
        commit: String,
    },
    /// Save the files of the checkout as a git tree, in the agent's home; the reply is
    /// [`Reply::SavedTree`](super::Reply::SavedTree). Ignored files and untracked files over 8 MiB
    /// are left out.
    SaveTree {
        /// Name of the repository.
        checkout: CheckoutFolder,
        /// Full id of the tree or commit to compare the tree with.
        against: Option<String>,
    },
    /// Send the output of a query on `stream`. The reply, [`Reply::Queried`](super::Reply::Queried)
    /// or a fault, follows the `End`.
    Query {
        /// Name of the repository.
        checkout: CheckoutFolder,
        /// The query.
        query: GitQuery,
        /// The most bytes to send.
        limit: u64,
        /// Stream to send on.
        stream: StreamId,
    },
    /// Add the objects of the pack that arrives on `stream` to the saved trees.
    UnpackTree {
        /// Name of the repository.
        checkout: CheckoutFolder,
        /// Stream to read from.
        stream: StreamId,
    },
}

/// A git command that only reads. Ids are full ids of commits or trees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "query", rename_all = "snake_case")]
pub enum GitQuery {
    /// The patch from `base` to the files of the checkout, untracked ones included. Empty for a
    /// missing checkout.
    Diff {
        /// Where the patch starts.
        base: String,
        /// Paths start with the name of the repository.
        prefixed: bool,
    },
    /// The differences between two trees. The fault `NotFound` means that objects of one of them
    /// are missing here.
    Compare {
        /// The earlier tree.
        from: String,
        /// The later tree.
        to: String,
        /// Format of the output.
        format: DiffFormat,
        /// Paths start with the name of the repository.
        prefixed: bool,
    },
    /// A bundle with the commits of a branch that `origin`'s base branch lacks; empty if there are
    /// none. The fault `NotFound` means that there is no such branch.
    Bundle {
        /// The local branch.
        branch: BranchName,
        /// The base branch of the remote.
        base: Option<BranchName>,
    },
    /// A pack with the objects of a saved tree.
    Pack {
        /// The tree.
        tree: String,
        /// A commit whose objects are left out.
        base: Option<String>,
    },
}

/// Output format of a comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiffFormat {
    /// A patch.
    Patch,
    /// Line counts per file, ended by NUL, without renames (`git diff --numstat -z`).
    Numstat,
}

/// Why the output of a query is incomplete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Truncation {
    /// The output exceeded the limit of the request.
    Limit,
    /// Git exceeded its time limit.
    Timeout,
}

/// Totals of a diff.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiffStat {
    /// Number of files that differ.
    pub files: u64,
    /// Number of added lines.
    pub insertions: u64,
    /// Number of removed lines.
    pub deletions: u64,
}
