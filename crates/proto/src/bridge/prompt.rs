//! Prompts on their way in.

use serde::{Deserialize, Serialize};

use crate::{PromptId, TurnId};

/// A prompt to carry out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptOrder {
    /// The prompt.
    pub prompt: PromptId,
    /// The turn that carries it out.
    pub turn: TurnId,
    /// The turn's number in its session.
    pub number: u32,
    /// What it says.
    pub text: String,
    /// Whose name commits get: `"{name} (Harvest)" <email>`.
    pub author: Author,
}

/// The person behind a prompt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Author {
    /// Their name.
    pub name: String,
    /// Their e-mail address.
    pub email: String,
}
