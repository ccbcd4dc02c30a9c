//! Replies to bridge requests, and faults.

use serde::{Deserialize, Serialize};

use super::{DiffStat, FileStat, Status, Truncation};

/// Result of a successful request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// The request is done or accepted.
    Done,
    /// Reply to `Status`.
    Status(Status),
    /// The command has started.
    Started {
        /// Pid inside the sandbox.
        pid: u32,
    },
    /// Reply to `Stat`.
    Stat(FileStat),
    /// Reply to `List`: the folder's entries, sorted by name.
    List {
        /// The entries.
        entries: Vec<FileStat>,
        /// True when there are more entries after the last one.
        more: bool,
    },
    /// Reply to `ReadLink`.
    Link {
        /// Target of the link, as stored.
        target: String,
    },
    /// Reply to `Head`.
    Head {
        /// The commit that is checked out; absent without a commit or a checkout.
        commit: Option<String>,
        /// The remote's default branch, as of the last fetch.
        default_branch: Option<String>,
    },
    /// Reply to `CheckOut`.
    CheckedOut {
        /// True when the folder `.harvest` differs from the one checked out before.
        changed_harvest_folder: bool,
    },
    /// Reply to `SaveTree`.
    SavedTree {
        /// Full id of the tree.
        tree: String,
        /// Changes since the tree or commit of the request; zero without one.
        stat: DiffStat,
    },
    /// Reply to `Query`.
    Queried {
        /// Why the output is incomplete; absent when it is complete.
        truncated: Option<Truncation>,
    },
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// Kind of the fault.
    pub code: FaultCode,
    /// Error message for people.
    pub message: String,
    /// True when space ran out: the disk or a quota is full, or a file has its maximum size.
    pub full: bool,
}

impl Fault {
    /// Creates a fault; `full` is false.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), full: false }
    }
}

/// Kinds of [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultCode {
    /// No such file, command or turn.
    NotFound,
    /// The file exists, but permissions forbid the operation.
    Denied,
    /// The file of the command is not executable.
    NotExecutable,
    /// Another operation is in progress.
    Busy,
    /// The sandbox has not booted, or its boot failed.
    NotReady,
    /// The connection's role does not allow the request.
    NotOwner,
    /// The request is invalid.
    Invalid,
    /// A system call failed: disk full, too many processes…
    System,
}
