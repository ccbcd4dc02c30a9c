//! Waiting for a slot, and giving one up.

use harvest_proto::StateReason;
use serde::{Deserialize, Serialize};

use super::{Action, Activity, Mode, SandboxState, decider::Decider};

/// An entry in the slot queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiting {
    /// The smallest is served first.
    pub sequence: u64,
    pub limit: Limit,
    /// 1 is the next; 0 is not known yet.
    pub position: u32,
}

/// Why there is no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// The sandbox limit of the server, this many, is reached.
    Sandboxes(usize),
    /// The sandbox limit of the user, this many, is reached.
    User(usize),
    /// The server is starting or shutting down.
    Closed,
}

impl Limit {
    #[must_use]
    pub const fn reason(self) -> StateReason {
        match self {
            Self::Sandboxes(_) => StateReason::LimitSandboxes,
            Self::User(_) => StateReason::LimitUser,
            Self::Closed => StateReason::ServerBusy,
        }
    }

    /// Why one more sandbox waits.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::Sandboxes(limit) => format!("{limit} of {limit} sandboxes in use"),
            Self::User(limit) => format!("{limit} of {limit} sandboxes of this user in use"),
            Self::Closed => "the server is starting or shutting down".to_owned(),
        }
    }

    /// Why any number of sandboxes is refused.
    #[must_use]
    pub fn describe_refusal(self) -> String {
        match self {
            Self::Sandboxes(limit) => format!("sandbox limit reached: {limit}"),
            Self::User(limit) => format!("sandbox limit of this user reached: {limit}"),
            Self::Closed => "the server is starting or shutting down".to_owned(),
        }
    }
}

/// The answer to a session that wants a slot now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlotClaim {
    /// The session has the slot.
    Granted,
    /// No slot is free: the session waits at this position.
    Queued { limit: Limit, position: u32 },
}

impl Decider<'_> {
    /// A sandbox is wanted and there is none.
    pub(super) fn start_or_wait(&mut self) {
        if self.has_slot {
            return self.start();
        }
        if self.state.waiting.is_some() {
            return;
        }
        match (self.context.claim_slot)() {
            (SlotClaim::Granted, _) => self.start(),
            (SlotClaim::Queued { limit, position }, sequence) => {
                self.state.waiting = Some(Waiting { sequence, limit, position });
                self.actions.push(Action::ReportPosition { position });
            }
        }
    }

    pub(super) fn slot_granted(&mut self, sequence: u64) {
        self.has_slot |= self.state.waiting.is_some_and(|waiting| waiting.sequence == sequence);
    }

    pub(super) fn slot_queued(&mut self, sequence: u64, limit: Limit, position: u32) {
        if let Some(waiting) =
            self.state.waiting.as_mut().filter(|waiting| waiting.sequence == sequence)
        {
            if waiting.position != position {
                self.actions.push(Action::ReportPosition { position });
            }
            (waiting.limit, waiting.position) = (limit, position);
        }
    }

    /// Another session waits for a slot: an idle session is paused, any other keeps its slot.
    pub(super) fn slot_release_requested(&mut self) {
        if self.state.idle_since(self.context.busy).is_some() {
            self.state.yielding_slot = true;
            self.pause(StateReason::SlotNeeded);
        }
    }

    /// The server shuts down: a turn in progress continues under the next server, where queued
    /// prompts run, too. Any other sandbox is saved.
    pub(super) fn suspend(&mut self) {
        self.state.suspending = true;
        self.hand_over();
    }

    /// Leaves a turn in progress to the next server, once the supervisor has its prompt.
    pub(super) fn hand_over(&mut self) {
        if self.state.suspending
            && let SandboxState::Ready { sandbox, activity: Activity::Turn(turn), .. } =
                &self.state.sandbox
            && turn.prompt_accepted
            && turn.stopping.is_none()
        {
            self.actions.push(Action::HandOver { sandbox: sandbox.clone() });
        }
    }

    /// While the server shuts down, only turns that it leaves to the next one keep their sandbox.
    pub(super) fn pause_if_suspending(&mut self) {
        let turn = self.state.turn().is_some_and(|turn| turn.stopping.is_none());
        if !self.state.suspending || turn {
            return;
        }
        self.state.yielding_slot = self.state.sandbox != SandboxState::Absent;
        if self.state.mode == Mode::Active {
            self.pause(StateReason::ServerShutdown);
        }
    }

    /// A session that the last server suspended with prompts queued becomes active again.
    pub(super) fn resume_suspended(&mut self) {
        self.state.yielding_slot = false;
        if self.state.mode.is_suspended() && !self.state.queue.is_empty() {
            self.state.mode = Mode::Active;
        }
    }
}
