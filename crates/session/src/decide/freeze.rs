//! Freezes a sandbox that has been idle for a while, and thaws it before the next use.

use harvest_proto::Timestamp;
use serde::{Deserialize, Serialize};

use super::{Action, Activity, SandboxState, decider::Decider};

/// Whether the processes of an idle sandbox are frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FreezeState {
    Running,
    Freezing,
    Frozen,
    /// Nothing is sent before it runs.
    Thawing {
        since: Timestamp,
    },
    /// It runs, and no freeze is tried before it was used again.
    FreezeFailed,
}

impl FreezeState {
    pub(super) const fn is_running(&self) -> bool {
        matches!(self, Self::Running)
    }
}

impl Decider<'_> {
    /// `None` unless the sandbox is idle.
    fn freeze_state(&mut self) -> Option<&mut FreezeState> {
        match &mut self.state.sandbox {
            SandboxState::Ready { activity: Activity::Idle { freeze, .. }, .. } => Some(freeze),
            _ => None,
        }
    }

    pub(super) fn freeze(&mut self) {
        if let Some(freeze) = self.freeze_state() {
            *freeze = FreezeState::Freezing;
            self.act_on_sandbox(|sandbox| Action::Freeze { sandbox });
        }
    }

    pub(super) fn frozen(&mut self) {
        if let Some(freeze @ FreezeState::Freezing) = self.freeze_state() {
            *freeze = FreezeState::Frozen;
        }
        self.handed_over();
    }

    pub(super) fn freeze_failed(&mut self) {
        if let Some(freeze @ (FreezeState::Freezing | FreezeState::Frozen)) = self.freeze_state() {
            *freeze = FreezeState::FreezeFailed;
        }
        // The turn runs on without a server, as after a crash.
        self.handed_over();
    }

    fn handed_over(&mut self) {
        if self.state.suspending
            && let SandboxState::Ready { activity: Activity::Turn(turn), .. } =
                &mut self.state.sandbox
        {
            turn.handed_over = Some(self.context.now);
        }
    }

    /// The sandbox is needed. After the thaw it counts as just used.
    pub(super) fn thaw(&mut self) {
        let now = self.context.now;
        match self.freeze_state() {
            Some(freeze @ (FreezeState::Freezing | FreezeState::Frozen)) => {
                *freeze = FreezeState::Thawing { since: now };
                self.act_on_sandbox(|sandbox| Action::Thaw { sandbox });
            }
            Some(freeze @ FreezeState::FreezeFailed) => *freeze = FreezeState::Running,
            _ => {}
        }
    }

    pub(super) fn thawed(&mut self) {
        let now = self.context.now;
        if let SandboxState::Ready {
            activity: Activity::Idle { since, freeze: freeze @ FreezeState::Thawing { .. } },
            ..
        } = &mut self.state.sandbox
        {
            (*since, *freeze) = (now, FreezeState::Running);
        }
    }

    /// After a restart: freezes or thaws the sandbox as the stored state says.
    pub(super) fn reapply_freeze(&mut self) {
        let wanted = match self.freeze_state() {
            Some(freeze @ (FreezeState::Freezing | FreezeState::Frozen)) => {
                *freeze = FreezeState::Freezing;
                true
            }
            // Also when it is stored as running: the last server may have died during a snapshot.
            _ => false,
        };
        match wanted {
            true => self.act_on_sandbox(|sandbox| Action::Freeze { sandbox }),
            false => self.act_on_sandbox(|sandbox| Action::Thaw { sandbox }),
        }
    }

    fn act_on_sandbox(&mut self, make: impl FnOnce(harvest_proto::SandboxId) -> Action) {
        if let Some(sandbox) = self.state.sandbox_id().cloned() {
            self.actions.push(make(sandbox));
        }
    }
}
