//! What an agent's adapter says about its tools, its plan and its MCP servers, in words that are
//! the same for every agent.

use serde::{Deserialize, Serialize};

use crate::text::word_enum;

word_enum!(
    /// What a tool does. The agent's adapter sets it, since each agent names its tools differently.
    #[derive(Default)]
    ToolKind, "tool kind" {
        /// Reads files or lists folders.
        Read = "read",
        /// Changes files.
        Edit = "edit",
        /// Runs a command.
        Execute = "execute",
        /// Searches files.
        Search = "search",
        /// Fetches from the network.
        Fetch = "fetch",
        /// Plans, or delegates to a sub-agent.
        Think = "think",
        /// Anything else.
        #[default]
        Other = "other",
    }
);

word_enum!(
    /// Progress of a step of a plan.
    #[derive(Default)]
    StepStatus, "step status" {
        /// Not started.
        #[default]
        Pending = "pending",
        /// Being done now.
        InProgress = "in_progress",
        /// Nothing is left to do.
        Completed = "completed",
    }
);

word_enum!(
    /// State of an MCP server as its agent reports it.
    #[derive(Default)]
    McpState, "state of an MCP server" {
        /// Offered to an agent that does not report states.
        Offered = "offered",
        /// Started, its tools are not known yet.
        #[default]
        Starting = "starting",
        /// Its tools can be used.
        Connected = "connected",
        /// Not usable.
        Failed = "failed",
    }
);

/// A step of an agent's plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PlanStep {
    /// What is to be done.
    pub text: String,
    /// Progress of the step.
    pub status: StepStatus,
}

/// An MCP server of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServer {
    /// Name of the server.
    pub name: String,
    /// State of the server.
    pub state: McpState,
}
