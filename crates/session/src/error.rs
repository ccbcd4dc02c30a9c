//! Errors of session operations, with a code for programs and a hint for people.

use std::borrow::Cow;

use harvest_proto::Hint;
use harvest_store::StoreError;

use crate::{
    bridge::BridgeError,
    sandboxes::{MissingObject, SandboxError},
};

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
        hint: Cow<'static, str>,
    },
    #[error("{what}")]
    Invalid { code: &'static str, what: String, hint: Option<String> },
    /// Another server has taken over, or this one is stopping.
    #[error("this server is shutting down, or another one has taken over its database")]
    Stopped,
    #[error("the database failed")]
    Store(#[source] StoreError),
    #[error(transparent)]
    Sandbox(#[from] SandboxError),
    #[error("cannot use the stored secrets")]
    Vault(#[from] harvest_gateway::vault::VaultError),
    #[error(transparent)]
    Secrets(#[from] harvest_gateway::ledger::SecretsUnavailable),
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
            Self::Store(error) if error.is_busy() => "database_busy",
            Self::Store(_) | Self::Secrets(_) => "store_failed",
            Self::Sandbox(error) => error.code(),
            Self::Vault(_) => "vault_failed",
        }
    }

    pub(crate) fn missing(what: impl Into<String>) -> Self {
        Self::NotFound { what: what.into() }
    }

    pub(crate) fn invalid(code: &'static str, what: impl Into<String>) -> Self {
        Self::Invalid { code, what: what.into(), hint: None }
    }

    /// Sets what to do about an invalid request.
    pub(crate) fn with_hint(self, next: impl Into<String>) -> Self {
        match self {
            Self::Invalid { code, what, .. } => {
                Self::Invalid { code, what, hint: Some(next.into()) }
            }
            other => other,
        }
    }

    pub(crate) fn conflict(
        code: &'static str,
        what: impl Into<String>,
        hint: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self::Conflict { code, what: what.into(), hint: hint.into() }
    }
}

impl Hint for SessionError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        let hint = match self {
            Self::NotFound { what } => listing_hint(what),
            Self::Conflict { hint, .. } => hint.as_ref(),
            Self::Stopped => "try again in a moment",
            Self::Sandbox(SandboxError::Missing(MissingObject::Snapshot(_))) => {
                "choose another turn; `harvest turns SESSION` lists them"
            }
            Self::Sandbox(error) => return error.hint(),
            Self::Store(error) if error.is_disk_full() => {
                "nothing was changed; free disk space on the server (`harvest df`, `harvest gc`), then try again"
            }
            Self::Store(error) if error.is_busy() => "try again in a moment",
            Self::Store(error) => {
                let default = "`harvest doctor` shows whether the disk is full";
                return error.hint().or(Some(default.into()));
            }
            Self::Secrets(_) => "try again in a moment; the log of the server says why",
            Self::Vault(error) => return error.hint(),
            Self::Invalid { hint, .. } => return hint.as_deref().map(Cow::Borrowed),
        };
        Some(hint.into())
    }
}

/// The command that lists resources of the missing kind.
fn listing_hint(what: &str) -> &'static str {
    match what.split_whitespace().next() {
        Some("repository") => "`harvest repo ls` lists repositories",
        Some("image") => "`harvest image ls` lists images, `harvest image build` makes one",
        Some("snapshot") => "`harvest snapshot ls` lists snapshots",
        Some("secret") => "`harvest secret ls` lists secrets",
        Some("token") => "`harvest token ls` lists tokens",
        Some("prompt") => "`harvest queue ls SESSION` lists prompts",
        Some("network") => "`harvest net ls SESSION` lists the rules",
        Some("turn") => "`harvest turns SESSION` lists turns",
        _ => "`harvest ls` lists sessions",
    }
}

impl From<BridgeError> for SessionError {
    fn from(error: BridgeError) -> Self {
        Self::Sandbox(error.into())
    }
}

impl From<StoreError> for SessionError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound { what } => Self::NotFound { what },
            StoreError::Exists { what } => Self::Conflict {
                code: "exists",
                what: format!("{what} already exists"),
                hint: "use another name, or the existing one".into(),
            },
            StoreError::TooLarge { what } => Self::invalid("too_large", what),
            StoreError::LeaseLost | StoreError::Closed => Self::Stopped,
            other => Self::Store(other),
        }
    }
}
