//! The boot request: what the supervisor prepares a sandbox for.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::Author;
use crate::{
    AgentName, BranchName, CheckoutFolder, Effort, McpServerName, RepositoryName, SessionId,
    UpstreamName,
};

/// What the supervisor prepares a sandbox for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boot {
    /// The session the sandbox is for.
    pub session: SessionId,
    /// Number of the session's sandbox: 1, 2, 3…
    pub epoch: u64,
    /// What the disk contains.
    pub start: BootStart,
    /// Author of the commits made before the first turn: the session's. Without one git refuses to
    /// commit.
    pub author: Option<Author>,
    /// The checkouts; the agent works in the first one.
    pub repositories: Vec<Checkout>,
    /// The agent to start; absent for a repository build.
    pub agent: Option<AgentLaunch>,
    /// The MCP servers at the door besides Harvest's own tools.
    pub mcp_servers: Vec<McpServerName>,
    /// Hosts whose public repositories git fetches at the door.
    #[serde(default)]
    pub git_hosts: Vec<String>,
    /// Environment variables for hooks, agent and commands. Never a secret.
    pub env: BTreeMap<String, String>,
    /// A hook is killed after this time; 30 minutes when absent.
    pub hook_millis: Option<u64>,
    /// The sandbox waits in the pool: its agent starts, and everything else waits for a second boot
    /// order of the same session, which has its author. Only on the disk of a repository image.
    #[serde(default)]
    pub standby: bool,
}

/// What the disk of a booting sandbox contains, and so which steps are left.
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
    /// An earlier build of the repository: fetch; install and run `setup.sh` only if files that
    /// decide about dependencies moved. Fails where the build has to begin with the image.
    Rebuild,
}

/// A repository in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Checkout {
    /// Name of the repository.
    pub name: RepositoryName,
    /// Folder of the checkout below `/workspace`.
    pub folder: CheckoutFolder,
    /// URL of the remote at the door, without a credential.
    pub remote: String,
    /// URL of the repository outside the sandbox, which URLs of submodules are compared with.
    pub url: Option<String>,
    /// Branch to start from; the remote's default branch when absent.
    pub base: Option<BranchName>,
    /// Branch the session works on; absent for a build, which stays on the base.
    pub branch: Option<BranchName>,
    /// Clone the repository when a restored disk does not contain it. False when a turn may have
    /// removed it on purpose.
    pub clone_missing: bool,
}

/// The agent to start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentLaunch {
    /// Name of the agent.
    pub name: AgentName,
    /// The program of a configured agent; the built-in ones know theirs.
    pub program: Option<AgentProgram>,
    /// Id of the conversation, a UUID chosen by the server, for agents that take one. The others
    /// choose their own id, which the supervisor keeps on the sandbox's disk.
    pub conversation: String,
    /// True when the disk contains that conversation.
    pub resume: bool,
    /// Model to request; the agent's default when absent.
    pub model: Option<String>,
    /// How much the model thinks; the agent's default when absent.
    pub effort: Option<Effort>,
    /// The service that serves the model.
    pub upstream: UpstreamName,
    /// Protocol of the model service, for agents that speak several.
    pub protocol: ModelProtocol,
    /// Whether the agent may ask the user.
    pub questions: bool,
    /// A turn ends when neither the agent nor the model writes anything for this long.
    pub silence_millis: u64,
    /// When to restart the agent after a crash.
    pub restarts: RestartPolicy,
}

/// A program and its environment.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentProgram {
    /// The program and its arguments.
    pub command: Vec<String>,
    /// Additional environment variables. Never a secret.
    pub env: BTreeMap<String, String>,
}

/// A protocol of model services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelProtocol {
    /// Anthropic Messages.
    Messages,
    /// OpenAI Responses.
    Responses,
    /// OpenAI Chat Completions.
    Chat,
}

/// How often and when a crashed agent is restarted. A completed turn resets the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartPolicy {
    /// Maximum number of restarts.
    pub times: u32,
    /// Delay after the first crash; doubled after each further one.
    pub first_millis: u64,
    /// Maximum delay.
    pub longest_millis: u64,
}

impl Default for RestartPolicy {
    fn default() -> Self {
        Self { times: 5, first_millis: 2_000, longest_millis: 60_000 }
    }
}
