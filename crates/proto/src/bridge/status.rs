//! How things stand inside: prompts seen and events on their way out.

use serde::{Deserialize, Serialize};

use crate::{
    PromptId, Timestamp, TurnId,
    event::{BootPhase, EventBody},
};

/// How things stand inside.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The boot phase reached, once `Boot` has arrived.
    pub phase: Option<BootPhase>,
    /// Whether that phase failed.
    pub failed: bool,
    /// Prompts seen in this sandbox, oldest first.
    pub prompts: Vec<(PromptId, PromptProgress)>,
    /// The highest outbox number given out.
    pub last_event: u64,
    /// How many detached commands run, whoever started them; an older supervisor does not say.
    #[serde(default, skip_serializing_if = "is_none")]
    pub detached: u32,
}

/// Nothing to tell.
pub(super) const fn is_none(count: &u32) -> bool {
    *count == 0
}

/// How far a prompt has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PromptProgress {
    /// Its turn is in progress.
    Running,
    /// Its turn has ended; `TurnEnded` is in the outbox or stored.
    Ended,
}

/// An event on its way out, with the supervisor's own number: 1, 2, 3… without a gap per epoch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OutboxEvent {
    /// The outbox number.
    pub number: u64,
    /// When it happened, by the sandbox's clock.
    pub at: Timestamp,
    /// The turn it belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub turn: Option<TurnId>,
    /// What happened.
    pub body: EventBody,
}
