//! A machine that is idle for a while stands still; whoever needs it has it going again first.

use harvest_proto::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Action, Machine, Work, step::Deciding};

/// Whether what runs in an idle machine stands still.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Still {
    /// It runs.
    #[default]
    Awake,
    /// It is to stand still.
    Freezing,
    /// It stands still.
    Frozen,
    /// It is to go on; nothing is sent before it does.
    Thawing {
        /// Since when.
        since: Timestamp,
    },
    /// It could not be made to stand still, and is left alone until it was used again.
    Restless,
}

impl Still {
    pub(super) const fn is_awake(&self) -> bool {
        matches!(self, Self::Awake)
    }
}

impl Deciding<'_> {
    /// The idle machine and whether it stands still.
    fn still(&mut self) -> Option<&mut Still> {
        match &mut self.state.machine {
            Machine::Ready { work: Work::Idle { still, .. }, .. } => Some(still),
            _ => None,
        }
    }

    /// Nobody has used the machine for a while.
    pub(super) fn freeze(&mut self) {
        if let Some(still) = self.still() {
            *still = Still::Freezing;
            self.act_on_sandbox(|sandbox| Action::Freeze { sandbox });
        }
    }

    pub(super) fn froze(&mut self) {
        if let Some(still @ Still::Freezing) = self.still() {
            *still = Still::Frozen;
        }
    }

    pub(super) fn freeze_failed(&mut self) {
        if let Some(still @ (Still::Freezing | Still::Frozen)) = self.still() {
            *still = Still::Restless;
        }
    }

    /// The machine is needed: it goes on, and is as good as just used.
    pub(super) fn thaw(&mut self) {
        let now = self.moment.now;
        match self.still() {
            Some(still @ (Still::Freezing | Still::Frozen)) => {
                *still = Still::Thawing { since: now };
                self.act_on_sandbox(|sandbox| Action::Thaw { sandbox });
            }
            Some(still @ Still::Restless) => *still = Still::Awake,
            _ => {}
        }
    }

    pub(super) fn thawed(&mut self) {
        let now = self.moment.now;
        if let Machine::Ready {
            work: Work::Idle { since, still: still @ Still::Thawing { .. } },
            ..
        } = &mut self.state.machine
        {
            (*since, *still) = (now, Still::Awake);
        }
    }

    /// After a restart: what stood still does so still, and what did not does not.
    pub(super) fn still_as_before(&mut self) {
        let wanted = match self.still() {
            Some(still @ (Still::Freezing | Still::Frozen)) => {
                *still = Still::Freezing;
                true
            }
            // Also where it is believed awake: the last server may have died while it took a snapshot.
            _ => false,
        };
        match wanted {
            true => self.act_on_sandbox(|sandbox| Action::Freeze { sandbox }),
            false => self.act_on_sandbox(|sandbox| Action::Thaw { sandbox }),
        }
    }

    fn act_on_sandbox(&mut self, make: impl FnOnce(harvest_proto::SandboxId) -> Action) {
        if let Some(sandbox) = self.state.sandbox().cloned() {
            self.actions.push(make(sandbox));
        }
    }
}
