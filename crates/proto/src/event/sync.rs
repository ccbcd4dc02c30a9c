//! What a requested sync has done with each checkout, and what the end of a turn has saved.

use serde::{Deserialize, Serialize};

use crate::{RepositoryName, text::word_enum};

word_enum!(
    /// How a requested sync of a checkout ended.
    SyncOutcome, "outcome of a sync" {
        /// The base has no commit that the branch lacks.
        UpToDate = "up_to_date",
        /// The branch begins at the newest commit of the base now.
        Rebased = "rebased",
        /// A commit of the branch conflicts with the base; the branch is as before.
        Conflict = "conflict",
        /// The branch is as before; `error` says why.
        Failed = "failed",
    }
);

/// A checkout after a requested sync.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CheckoutSync {
    /// Its repository.
    pub repository: RepositoryName,
    /// How the sync ended.
    pub outcome: SyncOutcome,
    /// The branch that is checked out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch: Option<String>,
    /// What it follows: `origin/main`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
    /// The commit that was checked out before the rebase, with the work that was not committed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// The commit that is checked out now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
    /// The commit of the base that the branch begins at now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// The work that was not committed.
    #[serde(flatten)]
    pub work: CommittedWork,
    /// The local branch that keeps the commits as they were before the rebase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Files with conflicts, the first ones of many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<String>,
    /// The commit that does not apply: its short id and subject.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

impl CheckoutSync {
    /// Whether the checkout follows its base now.
    #[must_use]
    pub fn is_current(&self) -> bool {
        matches!(self.outcome, SyncOutcome::UpToDate | SyncOutcome::Rebased)
    }
}

/// Work that an agent left uncommitted and that Harvest committed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CommittedWork {
    /// The commit; absent when there was nothing to commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Number of files in it.
    #[serde(default)]
    pub files: u32,
    /// New files that were left out, the first ones of many: larger than 8 MiB, not readable, or
    /// repositories of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<String>,
    /// What the repository ignores and the commit leaves out, the first ones of many.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ignored: Vec<String>,
}

/// What the end of a turn has saved of a checkout for a pull request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SavedWork {
    /// Its repository.
    pub repository: RepositoryName,
    /// The work that the agent had not committed.
    #[serde(flatten)]
    pub work: CommittedWork,
    /// The commit that was pushed; absent when the agent had pushed everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pushed: Option<String>,
    /// Why it could not be committed or pushed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}
