//! Errors of sandboxes, images, volumes and snapshots, each with a code for programs and, where
//! known, a hint.

use std::{borrow::Cow, fmt};

use harvest_proto::{
    Hint, SandboxId, SnapshotId,
    bridge::{Fault, FaultCode},
};

use super::admission::{Claimant, SlotRefusal};
use crate::{
    bridge::{BridgeError, fault_code},
    decide::Limit,
};

#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    #[error("there is no {0}")]
    Missing(MissingObject),
    /// The sandbox is unknown or has exited.
    #[error("{sandbox} is not running")]
    NotRunning { sandbox: SandboxId },
    #[error("{what}")]
    Conflict { code: &'static str, what: String, hint: String },
    #[error("{what}")]
    Invalid { code: &'static str, what: String, hint: Option<String> },
    /// Beyond what this user may do.
    #[error("{what}")]
    NotAllowed { code: &'static str, what: String, hint: String },
    #[error("{what}")]
    NoSpace { what: String, hint: String },
    /// A sandbox limit is reached.
    #[error("{}", limit.describe_refusal())]
    LimitReached {
        limit: Limit,
        hint: &'static str,
        /// An idle session is about to free a slot.
        releasing: bool,
    },
    /// The supervisor refused a request, or the connection to it was lost.
    #[error("the request to the sandbox failed")]
    Bridge(#[from] BridgeError),
    #[error("{doing}")]
    Failed { doing: String, hint: Option<String>, source: Box<dyn std::error::Error + Send + Sync> },
}

/// An object that does not exist.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MissingObject {
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
    Image(String),
    Recipe {
        name: String,
        /// The names of the built-in recipes.
        known: Vec<String>,
    },
    Volume(String),
}

impl fmt::Display for MissingObject {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sandbox(id) => write!(out, "sandbox {id}"),
            Self::Snapshot(id) => write!(out, "snapshot {id}"),
            Self::Image(name) => write!(out, "image `{name}`"),
            Self::Recipe { name, .. } => write!(out, "recipe `{name}`"),
            Self::Volume(name) => write!(out, "volume `{name}`"),
        }
    }
}

impl MissingObject {
    const fn code(&self) -> &'static str {
        match self {
            Self::Sandbox(_) => "not_found",
            Self::Snapshot(_) => "snapshot_missing",
            Self::Image(_) => "image_missing",
            Self::Recipe { .. } => "recipe_missing",
            Self::Volume(_) => "volume_missing",
        }
    }

    fn hint(&self) -> Cow<'_, str> {
        match self {
            Self::Sandbox(_) => "`harvest sandbox ls` lists the sandboxes".into(),
            Self::Snapshot(_) => "`harvest snapshot ls` lists the snapshots".into(),
            Self::Image(_) => {
                "`harvest image ls` lists the images; `harvest image build FILE.toml` builds one"
                    .into()
            }
            Self::Recipe { known, .. } => {
                format!("recipes: {}; or give a file that ends in .toml", known.join(", ")).into()
            }
            Self::Volume(name) => format!(
                "`harvest volume ls` lists the volumes; `harvest volume create {name}` creates it"
            )
            .into(),
        }
    }
}

impl SandboxError {
    /// A stable code for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Missing(object) => object.code(),
            Self::Bridge(BridgeError::Fault(fault)) => fault_code(fault),
            Self::Bridge(_) => "sandbox_unreachable",
            Self::NotRunning { .. } => "not_running",
            Self::Conflict { code, .. }
            | Self::Invalid { code, .. }
            | Self::NotAllowed { code, .. } => code,
            Self::NoSpace { .. } => "no_room",
            Self::LimitReached { limit, .. } => limit.reason().as_str(),
            Self::Failed { .. } => "provider_failed",
        }
    }

    #[must_use]
    pub fn invalid(code: &'static str, what: impl Into<String>) -> Self {
        Self::Invalid { code, what: what.into(), hint: None }
    }

    #[must_use]
    pub fn conflict(code: &'static str, what: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Conflict { code, what: what.into(), hint: hint.into() }
    }

    /// A failure without a known remedy.
    #[must_use]
    pub fn failed(
        doing: impl Into<String>,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::Failed { doing: doing.into(), hint: None, source: source.into() }
    }

    #[must_use]
    pub fn no_sandbox(sandbox: &SandboxId) -> Self {
        Self::Missing(MissingObject::Sandbox(sandbox.clone()))
    }

    #[must_use]
    pub fn no_snapshot(snapshot: &SnapshotId) -> Self {
        Self::Missing(MissingObject::Snapshot(snapshot.clone()))
    }
}

impl Hint for SandboxError {
    fn hint(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Missing(object) => Some(object.hint()),
            Self::NotRunning { sandbox } => Some(
                format!("`harvest sandbox start {sandbox}` starts it again with its disk").into(),
            ),
            Self::Conflict { hint, .. }
            | Self::NotAllowed { hint, .. }
            | Self::NoSpace { hint, .. } => Some(hint.into()),
            Self::LimitReached { hint, .. } => Some((*hint).into()),
            Self::Bridge(BridgeError::Fault(fault)) if fault.full => Some(
                "free disk space in the sandbox: `harvest exec SESSION -- df -h` shows what is full"
                    .into(),
            ),
            Self::Bridge(BridgeError::Fault(Fault { code: FaultCode::Denied, .. })) => Some(
                "act as a user with more access: `--user root`, or `user=root` in the API".into(),
            ),
            Self::Bridge(_) => None,
            Self::Invalid { hint, .. } | Self::Failed { hint, .. } => {
                hint.as_deref().map(Cow::Borrowed)
            }
        }
    }
}

impl SlotRefusal {
    /// The error for a claimant whose claim was refused.
    pub(super) fn for_claimant(self, claimant: Claimant<'_>) -> SandboxError {
        let Self { limit, releasing, .. } = self;
        let hint = match limit {
            Limit::User(_) if claimant.own_limit.is_some() => {
                "`harvest sandbox ls` lists your sandboxes and `harvest sandbox rm` removes one; an \
                 admin allows more with `harvest user set`"
            }
            Limit::Closed => "try again in a moment",
            _ if releasing => "an idle session is freeing its slot: try again in a moment",
            Limit::Sandboxes(_) => {
                "`harvest sandbox ls` lists them: stop one with `harvest sandbox stop` or \
                 `harvest pause`, or raise `limits.sandboxes`"
            }
            Limit::User(_) => {
                "`harvest sandbox ls` lists them: stop one with `harvest sandbox stop` or \
                 `harvest pause`, or raise `limits.sandboxes_per_user`"
            }
        };
        SandboxError::LimitReached { limit, hint, releasing }
    }
}
