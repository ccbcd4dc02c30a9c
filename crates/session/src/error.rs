//! What went wrong, in words the server can pass on: each has a code for programs and a hint for people.

use harvest_proto::bridge::{Fault, FaultCode};
use harvest_store::StoreError;

use crate::{bridge::BridgeError, provider::ProviderError};

/// Why something asked of a session was not done.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// There is no such thing.
    #[error("there is no {what}")]
    NotFound {
        /// What was looked for.
        what: String,
    },
    /// It cannot be done as things stand.
    #[error("{what}")]
    Conflict {
        /// A word that programs may compare.
        code: &'static str,
        /// What stands in the way.
        what: String,
        /// What to do next.
        hint: &'static str,
    },
    /// The request makes no sense.
    #[error("{what}")]
    Invalid {
        /// A word that programs may compare.
        code: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// Another server has taken over, or this one is stopping.
    #[error("this server no longer drives the session")]
    Stopped,
    /// The store failed.
    #[error("the store failed")]
    Store(#[source] StoreError),
    /// The provider failed.
    #[error("the machine failed")]
    Provider(#[from] ProviderError),
    /// The sandbox could not be spoken with.
    #[error("the sandbox failed")]
    Bridge(#[from] BridgeError),
    /// A secret could not be sealed.
    #[error("the vault failed")]
    Vault(#[from] harvest_gateway::vault::VaultError),
}

impl SessionError {
    /// A word that programs may compare.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Conflict { code, .. } | Self::Invalid { code, .. } => code,
            Self::Stopped => "stopping",
            Self::Store(error) if error.is_full() => "no_room",
            Self::Store(_) => "store_failed",
            Self::Provider(ProviderError::ImageMissing { .. }) => "image_missing",
            Self::Provider(ProviderError::SnapshotMissing { .. }) => "snapshot_missing",
            Self::Provider(_) => "provider_failed",
            Self::Bridge(BridgeError::Outdated) => "supervisor_outdated",
            Self::Bridge(BridgeError::Fault(fault)) => fault_code(fault),
            Self::Bridge(_) => "sandbox_unreachable",
            Self::Vault(_) => "vault_failed",
        }
    }

    /// What to do next, where we know it.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Conflict { hint, .. } => Some(hint),
            Self::Stopped => Some("try again in a moment"),
            Self::Provider(ProviderError::ImageMissing { .. }) => {
                Some("build it with `harvest image build`")
            }
            Self::Bridge(BridgeError::Outdated) => Some(
                "pause the session and resume it: its next sandbox has this version's supervisor",
            ),
            Self::Bridge(BridgeError::Fault(fault)) if fault.full => {
                Some("make room in the sandbox: `harvest exec SESSION -- df -h` shows what is full")
            }
            Self::Store(error) if error.is_full() => Some(
                "nothing was changed; make room on the server's disk (`harvest df`, `harvest gc`), then try again",
            ),
            Self::Store(_) => Some("look for a full disk; `harvest doctor` shows it"),
            _ => None,
        }
    }

    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into() }
    }

    pub(crate) fn invalid(code: &'static str, what: impl Into<String>) -> Self {
        Self::Invalid { code, what: what.into() }
    }

    pub(crate) fn conflict(
        code: &'static str,
        what: impl Into<String>,
        hint: &'static str,
    ) -> Self {
        Self::Conflict { code, what: what.into(), hint }
    }
}

/// The word for what a supervisor refused.
pub(crate) fn fault_code(fault: &Fault) -> &'static str {
    match fault.code {
        _ if fault.full => "no_room",
        FaultCode::NotFound => "not_found",
        FaultCode::Denied => "denied",
        FaultCode::NotExecutable => "not_executable",
        FaultCode::Busy => "busy",
        FaultCode::NotReady => "not_ready",
        FaultCode::NotOwner => "not_owner",
        FaultCode::Invalid => "invalid",
        FaultCode::System => "system",
    }
}

impl From<StoreError> for SessionError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { what } => Self::NotFound { what },
            StoreError::Exists { what } => Self::Conflict {
                code: "exists",
                what: format!("{what} is there already"),
                hint: "use another name, or the one that is there",
            },
            StoreError::LeaseLost | StoreError::Closed => Self::Stopped,
            other => Self::Store(other),
        }
    }
}
