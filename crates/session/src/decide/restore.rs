//! Restores a session to the state after an earlier turn: the turn in progress is stopped, the
//! sandbox is saved and stopped as for a pause, and only then the older snapshot becomes the
//! latest. The wanted snapshot is in the state from the first step on, so a crash does not lose it.
//! The snapshots and turns in between stay.

use harvest_proto::{SnapshotId, StateReason};
use serde::{Deserialize, Serialize};

use super::{Action, Mode, SandboxState, SyncState, decider::Decider};

/// What to restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restoring {
    /// The repository's image when absent.
    pub snapshot: Option<SnapshotId>,
    /// Absent for a snapshot that no turn left.
    pub turn: Option<u32>,
}

impl Decider<'_> {
    pub(super) fn restore(&mut self, snapshot: Option<SnapshotId>, turn: Option<u32>) {
        if self.state.mode == Mode::Archived {
            return;
        }
        self.state.restoring = Some(Restoring { snapshot, turn });
        // A session that has a sandbox gets a new one; a paused session stays paused.
        match &self.state.mode {
            Mode::Active if self.state.sandbox != SandboxState::Absent => {
                self.state.start_requested = true
            }
            Mode::Active | Mode::Archived => {}
            Mode::Paused { .. } | Mode::Failed { .. } => self.pause(StateReason::Restored),
        }
        self.state.start_failures.clear();
    }

    /// Once the old sandbox is saved and gone, the restored snapshot becomes the latest.
    pub(super) fn apply_restore(&mut self) {
        if self.state.sandbox != SandboxState::Absent {
            return;
        }
        if let Some(Restoring { snapshot, turn }) = self.state.restoring.take() {
            // The snapshot of a turn holds the conversation up to there.
            self.state.has_conversation = snapshot.is_some();
            self.state.latest_snapshot = snapshot.clone();
            (self.state.blocked, self.state.over_budget) = (false, false);
            let ended = self.state.syncs.ended;
            self.state.syncs = SyncState { ended, ..SyncState::default() };
            self.actions.push(Action::Restored { snapshot, turn });
        }
    }
}
