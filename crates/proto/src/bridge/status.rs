//! Status of a supervisor: boot phase, known prompts, and its outbox of events.

use serde::{Deserialize, Serialize};

use crate::{
    PromptId, Timestamp, TurnId,
    event::{BootPhase, EventBody},
};

/// Status of a supervisor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The boot phase reached; absent before `Boot`.
    pub phase: Option<BootPhase>,
    /// True when that phase failed.
    pub failed: bool,
    /// Prompts accepted in this sandbox, oldest first.
    pub prompts: Vec<(PromptId, PromptProgress)>,
    /// The highest outbox number assigned.
    pub last_event: u64,
    /// Number of running detached commands.
    pub detached: u32,
}

/// Progress of an accepted prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptProgress {
    /// The turn is in progress.
    Running,
    /// The turn has ended; `TurnEnded` is in the outbox or stored.
    Ended,
}

/// An event in the supervisor's outbox. Numbers are 1, 2, 3… per epoch, without gaps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxEvent {
    /// Outbox number.
    pub number: u64,
    /// Time of the event by the sandbox's clock.
    pub at: Timestamp,
    /// The turn the event belongs to.
    pub turn: Option<TurnId>,
    /// The event.
    pub body: EventBody,
}
