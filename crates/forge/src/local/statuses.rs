//! Statuses of commits: one file for each commit, newest status last.

use std::path::{Path, PathBuf};

use harvest_proto::Timestamp;
use serde::{Deserialize, Serialize};

use super::{
    ForgeError, LocalForge,
    storage::{read_json, write_json},
};

// GitHub's limit for one commit and context; here for all contexts together.
const MAX_STATUSES: usize = 1000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CommitState {
    Error,
    Failure,
    Pending,
    Success,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct CommitStatus {
    pub(super) id: u64,
    pub(super) state: CommitState,
    pub(super) context: String,
    pub(super) description: Option<String>,
    pub(super) target_url: Option<String>,
    pub(super) author: String,
    pub(super) created_at: Timestamp,
}

/// A status to add.
#[derive(Debug)]
pub(super) struct NewStatus {
    pub(super) state: CommitState,
    pub(super) context: String,
    pub(super) description: Option<String>,
    pub(super) target_url: Option<String>,
    pub(super) author: String,
}

impl LocalForge {
    /// Adds a status to a commit; `None` when it has too many. `sha` must be a full object id.
    pub(super) async fn add_status(
        &self,
        name: &str,
        sha: &str,
        new: NewStatus,
    ) -> Result<Option<CommitStatus>, ForgeError> {
        let path = path(&self.existing_folder(name)?, sha);
        let _guard = self.shared.writing.lock().await;
        let mut all: Vec<CommitStatus> = read_json(&path)?.unwrap_or_default();
        if all.len() >= MAX_STATUSES {
            return Ok(None);
        }
        let NewStatus { state, context, description, target_url, author } = new;
        let (id, created_at) = (self.next_id()?, self.shared.clock.now());
        let status =
            CommitStatus { id, state, context, description, target_url, author, created_at };
        all.push(status.clone());
        write_json(&path, &all)?;
        self.tell_status_soon(name, sha, &status);
        Ok(Some(status))
    }

    /// The statuses of a commit, newest first.
    pub(super) fn statuses(&self, name: &str, sha: &str) -> Result<Vec<CommitStatus>, ForgeError> {
        let mut all: Vec<CommitStatus> =
            read_json(&path(&self.existing_folder(name)?, sha))?.unwrap_or_default();
        all.reverse();
        Ok(all)
    }
}

/// The newest status of each context, given newest first, and what they amount to.
pub(super) fn combined(all: Vec<CommitStatus>) -> (CommitState, Vec<CommitStatus>) {
    let mut latest: Vec<CommitStatus> = Vec::new();
    for status in all {
        if !latest.iter().any(|other| other.context == status.context) {
            latest.push(status);
        }
    }
    let any = |state| latest.iter().any(|status: &CommitStatus| status.state == state);
    let state = if any(CommitState::Error) || any(CommitState::Failure) {
        CommitState::Failure
    } else if latest.is_empty() || any(CommitState::Pending) {
        CommitState::Pending
    } else {
        CommitState::Success
    };
    (state, latest)
}

fn path(folder: &Path, sha: &str) -> PathBuf {
    folder.join("statuses").join(format!("{sha}.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_status_of_each_context_counts() {
        use CommitState::{Error, Failure, Pending, Success};
        let status = |context: &str, state| CommitStatus {
            id: 1,
            state,
            context: context.to_owned(),
            description: None,
            target_url: None,
            author: "local".to_owned(),
            created_at: Timestamp::from_millis(0),
        };
        for (statuses, expected) in [
            (vec![], Pending),
            (vec![status("a", Success), status("a", Failure)], Success),
            (vec![status("a", Success), status("b", Pending)], Pending),
            (vec![status("a", Pending), status("b", Error)], Failure),
        ] {
            assert_eq!(combined(statuses).0, expected);
        }
    }
}
