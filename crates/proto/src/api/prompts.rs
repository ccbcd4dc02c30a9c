//! Prompts in the queue and the turns that carry them out.

use serde::{Deserialize, Serialize};

use crate::{
    PromptId, SnapshotId, Timestamp, TurnId,
    api::DiffStat,
    bridge::Author,
    event::{TurnOutcome, Usage},
};

/// `POST /v1/sessions/{id}/prompts`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatePrompt {
    /// What to do.
    pub text: String,
    /// Stop the turn in progress and do this next.
    #[serde(default)]
    pub now: bool,
    /// Whose name commits get; the token's user when absent.
    #[serde(default)]
    pub author: Option<Author>,
}

/// `PATCH /v1/sessions/{id}/prompts/{prompt}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MovePrompt {
    /// Its new place in the queue, 1 being the next.
    pub position: u32,
}

/// A prompt as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prompt {
    /// Its id.
    pub id: PromptId,
    /// What it says.
    pub text: String,
    /// Who wrote it.
    pub author: Author,
    /// Where it stands.
    pub status: PromptStatus,
    /// Its place in the queue while it waits, 1 being the next.
    pub position: Option<u32>,
    /// The turn that carries it out, once there is one.
    pub turn: Option<TurnId>,
    /// The event that recorded it.
    pub seq: u64,
    /// When it came.
    pub created_at: Timestamp,
}

/// Where a prompt stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PromptStatus {
    /// It waits.
    Queued,
    /// It was given to the sandbox, or is about to be.
    Dispatched,
    /// Its turn ended well.
    Completed,
    /// Its turn failed.
    Failed,
    /// Its turn was stopped.
    Stopped,
    /// Its sandbox was lost; it is not run again by itself.
    Interrupted,
    /// It was taken out of the queue.
    Cancelled,
}

/// A turn as it stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Turn {
    /// Its id.
    pub id: TurnId,
    /// Its number in the session.
    pub number: u32,
    /// The prompt it carries out.
    pub prompt: PromptId,
    /// What that says; in lists the beginning of it.
    #[serde(default)]
    pub text: String,
    /// The turn it went on from, when that is not the one before; 0 for the session's beginning.
    #[serde(default)]
    pub after: Option<u32>,
    /// What it changed in the checkout, where that is known.
    #[serde(default)]
    pub diff: Option<DiffStat>,
    /// The tokens it used.
    #[serde(default)]
    pub usage: Usage,
    /// How it ended, once it has.
    pub outcome: Option<TurnOutcome>,
    /// The snapshot of the machine after it.
    pub snapshot: Option<SnapshotId>,
    /// Why that is there no longer: `gone` from the machine, `archived`, or a rule of retention. Such a turn
    /// can be neither restored nor forked.
    #[serde(default)]
    pub dropped: Option<String>,
    /// When it began.
    pub started_at: Timestamp,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
}
