//! Turn requests: prompts on their way to the supervisor.

use serde::{Deserialize, Serialize};

use crate::{PromptId, TurnId};

/// A prompt to run as a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnRequest {
    /// Id of the prompt.
    pub prompt: PromptId,
    /// Id of the turn.
    pub turn: TurnId,
    /// Number of the turn in its session.
    pub number: u32,
    /// Text of the prompt.
    pub text: String,
    /// Author of the turn's commits: `"{name} (Harvest)" <email>`.
    pub author: Author,
}

/// A user: author of prompts and commits, owner of tokens and sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Author {
    /// Name of the user.
    pub name: String,
    /// E-mail address of the user.
    pub email: String,
}
