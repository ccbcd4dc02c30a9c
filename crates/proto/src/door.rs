//! Messages between the supervisor's end of the door and the gateway: per connection one line of
//! JSON each way, then bytes. The socket identifies the session, so no message carries an identity.

use serde::{Deserialize, Serialize};

use crate::{McpServerName, UpstreamName};

/// Host name of the model API inside a sandbox. Plain HTTP: the bytes do not leave the machine.
pub const MODEL_NAME: &str = "model.harvest.internal";
/// Host name of the git remotes inside a sandbox. Plain HTTP as well. Over HTTPS, the API of the
/// session's repositories for `gh`.
pub const GIT_NAME: &str = "git.harvest.internal";
/// Host name of the MCP servers behind the gateway, Harvest's own tools among them. Plain HTTP as
/// well.
pub const MCP_NAME: &str = "mcp.harvest.internal";

/// Base URL of a model service inside a sandbox, without `/v1`.
#[must_use]
pub fn model_url(upstream: &UpstreamName) -> String {
    format!("http://{MODEL_NAME}/{upstream}")
}

/// URL of an MCP server that the gateway adds a key for, inside a sandbox.
#[must_use]
pub fn mcp_url(server: &McpServerName) -> String {
    format!("http://{MCP_NAME}/{server}")
}

/// URL of a public git host's repositories inside a sandbox, without a slash at its end.
#[must_use]
pub fn public_git_url(host: &str) -> String {
    format!("http://{GIT_NAME}/public/{host}")
}

/// Maximum length of a message; a DNS name has at most 253 characters.
pub const MAX_LINE_BYTES: usize = 1024;

/// The first line of a connection, sent by the supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "request", rename_all = "snake_case")]
pub enum DoorRequest {
    /// Asks whether this name may be looked up. The connection closes after the reply.
    Lookup {
        /// Host name, lower case, without a trailing dot.
        name: String,
    },
    /// Connects to this name and port. After [`DoorReply::Open`] the connection carries the bytes.
    Connect {
        /// Host name the sandbox looked up.
        name: String,
        /// TCP port.
        port: u16,
    },
}

/// The gateway's reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum DoorReply {
    /// The name is allowed, or the connection is open.
    Open,
    /// The policy forbids it, or the destination cannot be reached.
    Refused {
        /// Reason, for the log.
        reason: String,
    },
}
