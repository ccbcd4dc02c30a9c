//! What a sandbox gets ready for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::SessionId;

/// What a sandbox gets ready for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// The session.
    pub session: SessionId,
    /// The session's count of sandboxes.
    pub epoch: u64,
    /// What the disk holds already.
    pub start: BootStart,
    /// The checkouts; the first is the primary one and the agent's working folder.
    pub repositories: Vec<Checkout>,
    /// The agent; a repository build has none.
    pub agent: Option<AgentLaunch>,
    /// Variables for hooks, agent and commands. Never a secret.
    pub env: BTreeMap<String, String>,
    /// How long a hook may take before it is killed; half an hour when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hook_millis: Option<u64>,
}

/// What the disk of a booting sandbox holds already.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BootStart {
    /// A base image: clone, `setup.sh`, then `start.sh`.
    Fresh,
    /// A repository image: fetch, start the session's branch from the newest base, `start.sh`.
    Image,
    /// An earlier state of this session or of the one it was forked from: the checkout stays as it
    /// is, `start.sh`.
    Restore,
    /// A repository build: clone or fetch, `setup.sh`. The builder then runs the check once.
    Build,
}

/// One repository inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkout {
    /// Lives in `/workspace/{name}`.
    pub name: String,
    /// The remote as the sandbox sees it: a URL of the door, without a credential.
    pub remote: String,
    /// The branch work starts from; the remote's default when absent.
    pub base: Option<String>,
    /// The branch the session works on; a build stays on the base.
    pub branch: Option<String>,
    /// Clone it when a restored disk does not hold it. Otherwise its absence is the work of a turn.
    #[serde(default)]
    pub clone_missing: bool,
}

/// Which agent, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentLaunch {
    /// One of [`crate::agents::NAMES`].
    pub name: String,
    /// The agent's own id of the conversation, chosen by us (a UUID).
    pub conversation: String,
    /// Whether the disk holds that conversation already.
    pub resume: bool,
    /// The model to ask for; the agent's default when absent.
    pub model: Option<String>,
    /// What becomes of it when it crashes.
    #[serde(default)]
    pub restarts: Restarts,
}

/// How often and when a crashed agent is started again. A turn that ends well starts the count anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restarts {
    /// So many crashes are followed by a start.
    pub times: u32,
    /// Waited after the first crash, and twice as long after each further one.
    pub first_millis: u64,
    /// The longest that is waited.
    pub longest_millis: u64,
}

impl Default for Restarts {
    fn default() -> Self {
        Self { times: 5, first_millis: 2_000, longest_millis: 60_000 }
    }
}
