//! What pid 1 and a launcher say to each other: orders one way as framed JSON with descriptors,
//! reports the other way as lines of JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// A command to start. The descriptors that come with it are stdin, stdout, stderr, and then the
/// cgroups to join first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) argv: Vec<String>,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) cwd: String,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// The size no file it writes may pass.
    pub(crate) file_bytes: Option<u64>,
    /// Its stdin is a terminal, which it gets as its own.
    pub(crate) terminal: bool,
}

/// What pid 1 says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToLauncher {
    /// Start this. Only after the launcher's birth or its last `Gone`.
    Run(Order),
    /// Kill the command and everything below the launcher.
    Kill,
}

/// What a launcher says.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromLauncher {
    /// It is born and waits for its first order.
    Waiting,
    /// The order has arrived; from here on it may have had an effect.
    Taken,
    /// The command runs.
    Started { pid: u32 },
    /// It could not be started; the launcher is free again.
    Failed { errno: i32, message: String },
    /// The command itself ended; what it started may live on.
    Exited(End),
    /// Nothing is left below the launcher, which is free again.
    Gone,
}

/// How a process ended, as the kernel says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    Code(i32),
    Signal(i32),
}
