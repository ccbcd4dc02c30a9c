//! What the gateway asks of the rest of the product. It holds no state of its own about sessions:
//! who may do what, what a secret is and what has been used is the ledger's.

use async_trait::async_trait;
use harvest_proto::{EventBody, Secret, SessionId, event::Usage};

/// Knows passes and secrets, and keeps the books.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// A secret's value, for the gateway's own use; it never goes into a sandbox.
    async fn secret(&self, name: &str) -> Option<Secret<String>>;

    /// May this session call a model now? Asked before every call.
    async fn reserve(&self, session: &SessionId) -> Result<(), Refusal>;

    /// A model call ended and used this much.
    async fn settle(&self, session: &SessionId, usage: Usage);

    /// Something passed the door, or was refused: stored before anyone sees it.
    async fn log(&self, session: &SessionId, event: EventBody);
}

/// Why a call is refused, in words for the agent and the person.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct Refusal {
    /// In words.
    pub reason: String,
}

/// What one sandbox may do at the door. Made by `session` when it opens the door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pass {
    /// Whose door it is.
    pub session: SessionId,
    /// Which names it may reach.
    pub policy: Policy,
    /// Who answers its model calls.
    pub upstream: Upstream,
    /// The repositories it may fetch from and push to.
    pub repositories: Vec<GitAccess>,
}

/// Which names a sandbox may reach, the gateway's own apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Policy {
    /// None at all.
    None,
    /// These, on ports 80 and 443. `*.example.org` stands for every name below it.
    Trusted(Vec<String>),
}

/// Who answers model calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Upstream {
    /// The Anthropic API, with the secret `ANTHROPIC_API_KEY`.
    Anthropic,
    /// Our own stand-in, which plays the script it finds in the prompt. No model, no key, no cost.
    Scripted,
}

/// One repository behind the git door.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GitAccess {
    /// Its name: `http://git.harvest.internal/{name}.git` inside.
    pub name: String,
    /// Where it really is.
    pub url: String,
    /// The secret that opens it, sent as HTTP basic authentication (user `x-access-token`).
    pub secret: Option<String>,
    /// The one branch the session may create and update, never delete or force; `None` reads only.
    pub branch: Option<String>,
}
