//! The protocol between pid 1 and a launcher: requests as framed JSON with descriptors, reports as
//! lines of JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A process to start. The attached descriptors are stdin, stdout, stderr, and then the cgroups to
/// join first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessSpec {
    pub(crate) argv: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// `RLIMIT_FSIZE`.
    pub(crate) file_bytes: Option<u64>,
    /// The CPUs to run on by default; all if empty.
    pub(crate) cpus: Vec<u32>,
    /// Stdin is a terminal, which becomes the controlling terminal.
    pub(crate) terminal: bool,
    /// Other processes of the user cannot trace it or open its descriptors.
    pub(crate) undumpable: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToLauncher {
    /// Sent only after `Ready` or `Idle`.
    Run(ProcessSpec),
    /// Kill the command and all its descendants.
    Kill,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromLauncher {
    /// The launcher has started and waits for its first request.
    Ready,
    /// The request has arrived; from here on it may have had an effect.
    Accepted,
    /// The command runs.
    Started { pid: u32 },
    /// The command could not be started; the launcher is free again.
    Failed { errno: i32, message: String },
    /// The command has exited; its descendants may still run.
    Exited(ProcessExit),
    /// No descendant is left; the launcher is free again.
    Idle,
}

/// How a process ended, as reported by the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ProcessExit {
    Code(i32),
    Signal(i32),
}
