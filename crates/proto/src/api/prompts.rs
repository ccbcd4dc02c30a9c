//! Prompts in a session's queue, and the turns that run them.

use serde::{Deserialize, Serialize};

use crate::{
    AgentName, Effort, ModelRef, Money, PromptId, PromptText, SnapshotId, Timestamp, TurnId,
    TurnReason,
    api::DiffStat,
    bridge::Author,
    event::{TurnOutcome, Usage},
    image::ImageType,
};

/// An image for a new prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateAttachment {
    /// Its type, which must be that of the content.
    pub media_type: ImageType,
    /// The bytes in base64; at most 5 MB, and 8,000 pixels wide and high.
    pub data: String,
}

/// An image of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Attachment {
    /// Its type.
    pub media_type: ImageType,
    /// Its size.
    pub bytes: u64,
}

/// `POST /v1/sessions/{id}/prompts`: adds a prompt to the queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatePrompt {
    /// The task for the agent: not blank, at most 64,000 characters.
    pub text: PromptText,
    /// Stop the turn in progress and run this prompt next.
    #[serde(default)]
    pub now: bool,
    /// Author of the commits; the token's user when absent.
    pub author: Option<Author>,
    /// The agent that continues the session from the next turn on; the session's when absent.
    pub agent: Option<AgentName>,
    /// The model of this prompt, as in `POST /v1/sessions`; the session's when absent. With `agent`
    /// it becomes the session's.
    pub model: Option<ModelRef>,
    /// How much the model thinks about this prompt; the session's when absent. With `agent` it
    /// becomes the session's.
    pub effort: Option<Effort>,
    /// Images for the agent: at most 8, and 16 MB in all.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 8))]
    pub attachments: Vec<CreateAttachment>,
}

impl CreatePrompt {
    /// A prompt for the end of the queue, without options.
    #[must_use]
    pub const fn new(text: PromptText) -> Self {
        let (author, agent, model, effort) = (None, None, None, None);
        Self { text, now: false, author, agent, model, effort, attachments: Vec::new() }
    }
}

/// `PATCH /v1/sessions/{id}/prompts/{prompt}`: moves a prompt within the queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MovePrompt {
    /// The new position; 1 is next.
    pub position: u32,
}

/// A prompt and its status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prompt {
    /// Id of the prompt.
    pub id: PromptId,
    /// The task for the agent.
    pub text: String,
    /// Author of the prompt and of its commits.
    pub author: Author,
    /// The agent of this prompt; null for the session's.
    pub agent: Option<AgentName>,
    /// The model of this prompt; null for the session's, or with an agent for its default.
    pub model: Option<ModelRef>,
    /// How much the model thinks about this prompt; null as for the model.
    pub effort: Option<Effort>,
    /// Its images; `GET /v1/sessions/{id}/prompts/{prompt}/attachments/{number}` returns one. Those
    /// of a cancelled prompt are deleted.
    pub attachments: Vec<Attachment>,
    /// Whether the prompt waits, runs or has ended.
    pub status: PromptStatus,
    /// Position in the queue while it waits; 1 is next.
    pub position: Option<u32>,
    /// The turn that runs the prompt, once there is one.
    pub turn: Option<TurnId>,
    /// Number of the event that recorded the prompt.
    pub seq: u64,
    /// Time at which the server accepted the prompt.
    pub created_at: Timestamp,
}

/// Status of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PromptStatus {
    /// The prompt waits in the queue.
    Queued,
    /// The prompt has been sent to the sandbox, or is about to be.
    Dispatched,
    /// The turn completed.
    Completed,
    /// The turn failed.
    Failed,
    /// The turn was stopped by a user.
    Stopped,
    /// The sandbox was lost during the turn; the prompt is not run again automatically.
    Interrupted,
    /// The prompt was removed from the queue.
    Cancelled,
}

/// A turn: one run of a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Turn {
    /// Id of the turn.
    pub id: TurnId,
    /// Number of the turn in its session: 1, 2, 3…
    pub number: u32,
    /// The prompt this turn runs.
    pub prompt: PromptId,
    /// Text of the prompt; shortened in lists.
    pub text: String,
    /// The turn this one continues from, when it is not the previous one; 0 is the session's start.
    pub after: Option<u32>,
    /// Size of the turn's changes in the checkouts, if known.
    pub diff: Option<DiffStat>,
    /// Tokens used by the turn.
    pub usage: Usage,
    /// Cost of the turn in millionths of a US dollar, at list prices.
    pub spent_micros: Money,
    /// How the turn ended; null while it runs.
    pub outcome: Option<TurnOutcome>,
    /// Why it did not complete.
    pub reason: Option<TurnReason>,
    /// Snapshot of the sandbox after the turn.
    pub snapshot_id: Option<SnapshotId>,
    /// Why the snapshot no longer exists: `gone` from the disk, `archived`, or a retention rule.
    /// Such a turn can be neither restored nor forked.
    pub dropped: Option<String>,
    /// Start of the turn.
    pub started_at: Timestamp,
    /// End of the turn; null while it runs.
    pub ended_at: Option<Timestamp>,
}
