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
