//! Commands in a sandbox.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::CreateSandbox;

/// A command: the body of `POST /v1/sessions/{session}/exec`, `POST /v1/sandboxes/{sandbox}/exec`
/// and `POST /v1/exec`, which respond with JSON lines of [`ExecLine`], and the first frame of the
/// WebSocket at these paths.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecRequest {
    /// Program and arguments; with `code`, only the arguments.
    #[serde(default)]
    pub argv: Vec<String>,
    /// Program text to run instead of a program; `lang` is its language.
    pub code: Option<String>,
    /// Language of `code`.
    pub lang: Option<Language>,
    /// Environment variables in addition to the sandbox's.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Working folder; the first checkout of a session, otherwise the image's, when absent.
    pub cwd: Option<String>,
    /// User to run as: `harvest` (default in sessions), `root` or a uid; the image's when absent.
    pub user: Option<String>,
    /// The command and all its processes are killed after this time; 30 minutes when absent, never
    /// when 0.
    pub timeout_millis: Option<u64>,
    /// Standard input in base64; empty when absent.
    pub stdin: Option<String>,
    /// Keep the command running when the client or the server is gone; output from then on is lost.
    /// The session is not idle while such a command runs.
    #[serde(default)]
    pub detach: bool,
    /// The sandbox to create for the command; only for `POST /v1/exec`.
    pub sandbox: Option<Box<CreateSandbox>>,
}

/// Language of a program text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Language {
    /// `python3`.
    Python,
    /// `node`.
    Node,
    /// `bash`.
    Bash,
}

/// One line of the response to a command.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ExecLine {
    /// The sandbox for the command has started. First line, and only of `POST /v1/exec`.
    Started {
        /// Id of the sandbox, which is removed when the command ends.
        sandbox: crate::SandboxId,
        /// Features this machine cannot give the sandbox.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        warnings: Vec<String>,
    },
    /// Output of the command on stdout.
    Stdout {
        /// The bytes in base64.
        data: String,
    },
    /// Output of the command on stderr.
    Stderr {
        /// The bytes in base64.
        data: String,
    },
    /// The command ended. Last line.
    Exited {
        /// Exit status.
        exit: crate::bridge::Exit,
        /// Duration of the command.
        millis: u64,
        /// Explanation, when the exit status alone is not enough.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The command could not be started, or its result is unknown. Last line.
    Failed {
        /// Error code for programs.
        code: String,
        /// Error message for people.
        message: String,
    },
}
