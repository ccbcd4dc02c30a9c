//! What the inside end of the door says to the gateway: one line of JSON each way per connection,
//! then bytes. The gateway knows the session by the socket, so no line carries an identity.

use serde::{Deserialize, Serialize};

/// The gateway's own names, reached over plain HTTP because the bytes never leave the machine.
pub const MODEL_NAME: &str = "model.harvest.internal";
/// The name under which a session's repositories answer to git.
pub const GIT_NAME: &str = "git.harvest.internal";

/// The longest line either side sends; a DNS name has at most 253 characters.
pub const MAX_LINE_BYTES: usize = 1024;

/// What a connection is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ask", rename_all = "snake_case")]
pub enum Ask {
    /// May this name be looked up? Answered, then the connection closes.
    Lookup {
        /// The name, lower case, without a final dot.
        name: String,
    },
    /// Carry bytes to this name and port. After [`Answer::Open`] the connection is the stream.
    Connect {
        /// The name the sandbox looked up.
        name: String,
        /// The port it asked for.
        port: u16,
    },
}

/// The gateway's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "snake_case")]
pub enum Answer {
    /// The name is allowed; or the stream is open.
    Open,
    /// Policy says no, or the other end could not be reached.
    Refused {
        /// In words, for the log.
        reason: String,
    },
}
