//! Commands and their exit status.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::StreamId;

/// A command to run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; looked up in the PATH of `env`.
    pub argv: Vec<String>,
    /// Environment variables in addition to the image's.
    pub env: BTreeMap<String, String>,
    /// Working folder; the image's when absent.
    pub cwd: Option<String>,
    /// `harvest` (uid 10001), `root`, or a number; the image's user when absent.
    pub user: Option<String>,
    /// The command is killed after this time; never when absent.
    pub timeout_millis: Option<u64>,
    /// Stream for stdin; without it stdin is empty.
    pub stdin: Option<StreamId>,
    /// Stream for stdout.
    pub stdout: StreamId,
    /// Stream for stderr.
    pub stderr: StreamId,
    /// Run the command in a new pseudo-terminal: `stdin` and `stdout` carry its input and output,
    /// `stderr` stays empty.
    pub terminal: Option<Terminal>,
    /// Keep the command running when the connection ends; output from then on is lost. Not allowed
    /// together with a terminal.
    pub detached: bool,
    /// Run the command in the agent's cgroup: it is killed when the agent's turn is stopped.
    pub with_agent: bool,
    /// Other processes of the user cannot trace the command or open its descriptors. This ends when
    /// it executes another program.
    pub undumpable: bool,
}

/// The pseudo-terminal of a command.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Terminal {
    /// Height in rows.
    pub rows: u16,
    /// Width in columns.
    pub cols: u16,
    /// Value of `TERM`.
    pub term: Option<String>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", content = "value", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Exit {
    /// The process exited with this code.
    Code(i32),
    /// The process was killed by this signal.
    Signal(i32),
    /// The process was killed because the sandbox exceeded its memory limit.
    Oom,
    /// The process was killed because it exceeded its time limit.
    Timeout,
    /// The process was killed on request.
    Killed,
}
