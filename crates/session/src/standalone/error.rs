//! Errors of sandbox host operations, each with a code for programs and, where known, a hint.

use std::borrow::Cow;

use harvest_proto::Hint;

use crate::{admission::SlotRefusal, decide::Limit};

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("{what}")]
    Missing { code: &'static str, what: String, hint: String },
    #[error("{what}")]
    Conflict { code: &'static str, what: String, hint: String },
    #[error("{what}")]
    Invalid { code: &'static str, what: String, hint: Option<String> },
    #[error("{what}")]
    NoSpace { what: String, hint: String },
    /// A sandbox limit is reached.
    #[error("{}", limit.describe())]
    LimitReached {
        limit: Limit,
        hint: &'static str,
        /// An idle session is about to free a slot.
        releasing: bool,
    },
    #[error("{doing}")]
    Failed { doing: String, hint: Option<String>, source: Box<dyn std::error::Error + Send + Sync> },
}

impl HostError {
    /// A stable code for programs.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Missing { code, .. }
            | Self::Conflict { code, .. }
            | Self::Invalid { code, .. } => code,
            Self::NoSpace { .. } => "no_room",
            Self::LimitReached { limit, .. } => limit.reason().as_str(),
            Self::Failed { .. } => "host_failed",
        }
    }

    #[must_use]
    pub fn invalid(code: &'static str, what: impl Into<String>) -> Self {
        Self::Invalid { code, what: what.into(), hint: None }
    }
}

impl Hint for HostError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Missing { hint, .. }
            | Self::Conflict { hint, .. }
            | Self::NoSpace { hint, .. } => Some(hint.into()),
            Self::LimitReached { hint, .. } => Some((*hint).into()),
            Self::Invalid { hint, .. } | Self::Failed { hint, .. } => {
                hint.as_deref().map(Cow::Borrowed)
            }
        }
    }
}

impl From<SlotRefusal> for HostError {
    fn from(SlotRefusal { limit, releasing }: SlotRefusal) -> Self {
        let hint = match limit {
            Limit::Closed => "try again in a moment",
            _ if releasing => "an idle session is freeing its slot: try again in a moment",
            Limit::Sandboxes => {
                "stop one with `harvest sandbox stop SANDBOX` or `harvest pause SESSION` \
                 (`harvest sandbox ls` lists them), or raise `limits.sandboxes`"
            }
            Limit::User => {
                "stop one with `harvest sandbox stop SANDBOX` or `harvest pause SESSION` \
                 (`harvest sandbox ls` lists them), or raise `limits.sandboxes_per_user`"
            }
        };
        Self::LimitReached { limit, hint, releasing }
    }
}
