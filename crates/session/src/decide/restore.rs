//! Going back to the state after an earlier turn, in place: the turn in progress is stopped, the
//! present state is kept like that of a pause, and only when the machine is ended the other one takes
//! its place. What is wanted is in the state from the first step on, so that a crash forgets nothing;
//! the snapshots and turns in between stay where they are.

use harvest_proto::SnapshotId;
use serde::{Deserialize, Serialize};

use super::{Action, Machine, Rest, step::Deciding};

/// What a session goes back to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restoring {
    /// The state after a turn.
    pub snapshot: SnapshotId,
    /// The turn's number.
    pub turn: u32,
}

impl Deciding<'_> {
    pub(super) fn restore(&mut self, snapshot: SnapshotId, turn: u32) {
        if self.state.rest == Rest::Archived {
            return;
        }
        self.state.restoring = Some(Restoring { snapshot, turn });
        // What had a machine gets another; what rested rests on, at another point.
        match &self.state.rest {
            Rest::Open if self.state.machine != Machine::Absent => self.state.wake = true,
            Rest::Open | Rest::Archived => {}
            Rest::Paused { .. } | Rest::Failed { .. } => self.rest("restored"),
        }
        self.state.failures.clear();
    }

    /// Nothing of the old machine is left to keep: the wanted state is the newest now.
    pub(super) fn put_back(&mut self) {
        if self.state.machine != Machine::Absent {
            return;
        }
        if let Some(Restoring { snapshot, turn }) = self.state.restoring.take() {
            self.state.disk = Some(snapshot.clone());
            // The snapshot of a turn holds the conversation up to there.
            self.state.conversed = true;
            self.actions.push(Action::Restored { snapshot, turn });
        }
    }
}
