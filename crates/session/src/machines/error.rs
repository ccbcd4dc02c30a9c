//! Why a machine did not do it, each with a code for programs and, where we know it, what to do next.

use crate::{decide::Limit, places::Refusal};

/// Why something asked of a machine was not done.
#[derive(Debug, thiserror::Error)]
pub enum MachineError {
    /// There is no such thing.
    #[error("{what}")]
    Missing {
        /// A word that programs may compare.
        code: &'static str,
        /// What is missing.
        what: String,
        /// What to do next.
        hint: String,
    },
    /// It cannot be done as things stand.
    #[error("{what}")]
    Conflict {
        /// A word that programs may compare.
        code: &'static str,
        /// What stands in the way.
        what: String,
        /// What to do next.
        hint: String,
    },
    /// The request makes no sense.
    #[error("{what}")]
    Invalid {
        /// A word that programs may compare.
        code: &'static str,
        /// What is wrong with it.
        what: String,
        /// What to do next, where we know it.
        hint: Option<String>,
    },
    /// The disk is too full.
    #[error("{what}")]
    NoRoom {
        /// What was to be made, and what it needs.
        what: String,
        /// What to do next.
        hint: String,
    },
    /// As many sandboxes run as may.
    #[error("{}", limit.words())]
    Full {
        /// Which limit is reached.
        limit: Limit,
        /// What to do next.
        hint: &'static str,
        /// A place that would help is being given up.
        soon: bool,
    },
    /// The machine failed.
    #[error("{doing}")]
    Failed {
        /// What was being done.
        doing: String,
        /// What to do next, where we know it.
        hint: Option<String>,
        /// What it said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl MachineError {
    /// A word that programs may compare.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Missing { code, .. }
            | Self::Conflict { code, .. }
            | Self::Invalid { code, .. } => code,
            Self::NoRoom { .. } => "no_room",
            Self::Full { limit, .. } => limit.as_str(),
            Self::Failed { .. } => "machine_failed",
        }
    }

    /// What to do next, where we know it.
    #[must_use]
    pub fn hint(&self) -> Option<&str> {
        match self {
            Self::Missing { hint, .. }
            | Self::Conflict { hint, .. }
            | Self::NoRoom { hint, .. } => Some(hint),
            Self::Full { hint, .. } => Some(hint),
            Self::Invalid { hint, .. } | Self::Failed { hint, .. } => hint.as_deref(),
        }
    }

    /// The request makes no sense.
    #[must_use]
    pub fn invalid(code: &'static str, what: impl Into<String>) -> Self {
        Self::Invalid { code, what: what.into(), hint: None }
    }
}

impl From<Refusal> for MachineError {
    fn from(Refusal { limit, soon }: Refusal) -> Self {
        let hint = match limit {
            Limit::Closed => "try again in a moment",
            _ if soon => "an idle session is giving up its place: try again in a moment",
            Limit::Sandboxes => {
                "`harvest sandbox ls` shows what runs; `harvest sandbox stop SANDBOX` or `harvest pause SESSION` makes \
                 room, and `limits.sandboxes` says how many may run"
            }
            Limit::User => {
                "`harvest sandbox ls` shows what runs; `harvest sandbox stop SANDBOX` or `harvest pause SESSION` makes \
                 room, and `limits.sandboxes_per_user` says how many of one user may run"
            }
        };
        Self::Full { limit, hint, soon }
    }
}
