//! Errors of session operations, with a code for programs and a hint for people.

use harvest_proto::bridge::{Fault, FaultCode};
use harvest_store::StoreError;

use crate::{bridge::BridgeError, provider::ProviderError};

#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    #[error("there is no {what}")]
    NotFound { what: String },
    /// The session's state does not allow it.
    #[error("{what}")]
    Conflict {
        code: &'static str,
        what: String,
        /// What to do next.
        hint: &'static str,
    },
    #[error("{what}")]
    Invalid { code: &'static str, what: String },
    /// Another server has taken over, or this one is stopping.
    #[error("this server no longer drives the session")]
    Stopped,
    #[error("the store failed")]
    Store(#[source] StoreError),
    #[error("the sandbox provider failed")]
    Provider(#[from] ProviderError),
    #[error("the request to the sandbox failed")]
    Bridge(#[from] BridgeError),
    #[error("the vault failed")]
    Vault(#[from] harvest_gateway::vault::VaultError),
}

impl SessionError {
    /// The error code of the API.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotFound { .. } => "not_found",
            Self::Conflict { code, .. } | Self::Invalid { code, .. } => code,
            Self::Stopped => "stopping",
            Self::Store(error) if error.is_disk_full() => "no_room",
            Self::Store(_) => "store_failed",
            Self::Provider(ProviderError::ImageMissing { .. }) => "image_missing",
            Self::Provider(ProviderError::SnapshotMissing { .. }) => "snapshot_missing",
            Self::Provider(_) => "provider_failed",
            Self::Bridge(BridgeError::Fault(fault)) => fault_code(fault),
            Self::Bridge(_) => "sandbox_unreachable",
            Self::Vault(_) => "vault_failed",
        }
    }

    /// What to do next, if known.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Conflict { hint, .. } => Some(hint),
            Self::Stopped => Some("try again in a moment"),
            Self::Provider(ProviderError::ImageMissing { .. }) => {
                Some("build it with `harvest image build`")
            }
            Self::Bridge(BridgeError::Fault(fault)) if fault.full => Some(
                "free disk space in the sandbox: `harvest exec SESSION -- df -h` shows what is full",
            ),
            Self::Store(error) if error.is_disk_full() => Some(
                "nothing was changed; free disk space on the server (`harvest df`, `harvest gc`), then try again",
            ),
            Self::Store(_) => Some("`harvest doctor` shows whether the disk is full"),
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

/// The error code for a refusal of the supervisor.
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
                what: format!("{what} already exists"),
                hint: "use another name, or the existing one",
            },
            StoreError::LeaseLost | StoreError::Closed => Self::Stopped,
            other => Self::Store(other),
        }
    }
}
