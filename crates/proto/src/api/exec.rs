//! Commands in a sandbox.

use serde::{Deserialize, Serialize};

/// `POST /v1/sessions/{id}/exec`, where the answer is JSON lines of [`ExecLine`], and the first frame of the
/// socket at the same place.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables on top of the image's.
    #[serde(default)]
    pub env: std::collections::BTreeMap<String, String>,
    /// Working folder; the primary checkout when absent.
    #[serde(default)]
    pub cwd: Option<String>,
    /// `harvest`, the default, or `root`.
    #[serde(default)]
    pub user: Option<String>,
    /// Killed after this many milliseconds; 30 minutes when absent.
    #[serde(default)]
    pub timeout_millis: Option<u64>,
    /// What the command reads, base64; nothing when absent.
    #[serde(default)]
    pub stdin: Option<String>,
    /// It goes on when the client is gone, or the server, and what it says then is thrown away. While it runs
    /// its session is not idle.
    #[serde(default)]
    pub detach: bool,
}

/// One line of an exec's answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ExecLine {
    /// A fresh sandbox for the command has started; comes first, and only where one was asked for.
    Started {
        /// Its id; it is gone when the command is.
        sandbox: crate::SandboxId,
        /// What it has to do without, in words.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        warnings: Vec<String>,
    },
    /// Bytes of stdout.
    Stdout {
        /// Base64.
        data: String,
    },
    /// Bytes of stderr.
    Stderr {
        /// Base64.
        data: String,
    },
    /// The command ended; nothing follows.
    Exited {
        /// How.
        exit: crate::bridge::Exit,
        /// From start to end.
        millis: u64,
        /// Why, where the way it ended cannot say it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The command could not be run, or we lost sight of it; nothing follows.
    Failed {
        /// What happened.
        code: String,
        /// In words.
        message: String,
    },
}
