//! Commands, and how they end.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::StreamId;

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; looked up in the PATH of `env`.
    pub argv: Vec<String>,
    /// Variables on top of the image's.
    pub env: BTreeMap<String, String>,
    /// Working folder; the image's when absent.
    pub cwd: Option<String>,
    /// `harvest` (uid 10001), `root`, or a number; the image's user when absent.
    pub user: Option<String>,
    /// Killed after this.
    pub timeout_millis: Option<u64>,
    /// Carries stdin when given; else the command reads from an empty one.
    pub stdin: Option<StreamId>,
    /// Carries stdout.
    pub stdout: StreamId,
    /// Carries stderr.
    pub stderr: StreamId,
    /// Gives it a terminal of its own: `stdin` and `stdout` carry what is typed and shown, `stderr` nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub terminal: Option<Terminal>,
    /// It goes on when the connection ends, and what it says then is thrown away; not with a terminal. An older
    /// supervisor ends it with the connection.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub detached: bool,
}

/// The terminal a command gets.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Its height.
    pub rows: u16,
    /// Its width.
    pub cols: u16,
    /// What it understands: the command's `TERM`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub term: Option<String>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", content = "value", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Exit {
    /// By itself, with this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
    /// The memory limit.
    Oom,
    /// The time limit.
    Timeout,
    /// Somebody asked for it.
    Killed,
}
