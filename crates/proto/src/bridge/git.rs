//! Git operations on a checkout. They run as the agent's user, without hooks.

use serde::{Deserialize, Serialize};

use crate::{BranchName, RepositoryName};

/// A git operation on the checkout `/workspace/{checkout}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum GitRequest {
    /// Describe what is checked out; the reply is [`Reply::Head`](super::Reply::Head).
    Head {
        /// Name of the repository.
        checkout: RepositoryName,
    },
    /// Put the checkout on a branch: rename the branch of another session, or create the branch at
    /// the checked-out commit. A missing checkout is left missing.
    SetBranch {
        /// Name of the repository.
        checkout: RepositoryName,
        /// Name of the branch.
        branch: BranchName,
    },
    /// Fetch a branch and check out a commit of it; the reply is
    /// [`Reply::CheckedOut`](super::Reply::CheckedOut).
    CheckOut {
        /// Name of the repository.
        checkout: RepositoryName,
        /// The remote's branch.
        branch: BranchName,
        /// Full id of the commit.
        commit: String,
    },
}
