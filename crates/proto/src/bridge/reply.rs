//! What a request gives: a reply, or a fault.

use serde::{Deserialize, Serialize};

use super::{FileStat, Status};

/// What a request gave.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "reply", rename_all = "snake_case")]
pub enum Reply {
    /// Done, or accepted.
    Done,
    /// How things stand.
    Status(Status),
    /// The command runs.
    Started {
        /// Its pid inside.
        pid: u32,
        /// Whether it has the terminal it was to get; an older supervisor does not know what that is.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        terminal: bool,
    },
    /// What a path is.
    Stat(FileStat),
    /// What a folder holds, by name.
    List {
        /// The entries.
        entries: Vec<FileStat>,
        /// Whether there are more after the last of them.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        more: bool,
    },
    /// Where a symbolic link points.
    Link {
        /// As it is.
        target: String,
    },
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Fault {
    /// A word that programs may compare.
    pub code: FaultCode,
    /// In words.
    pub message: String,
    /// There is no room: the disk, a quota or a file is as large as it may become.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub full: bool,
}

impl Fault {
    /// A fault with its words.
    pub fn new(code: FaultCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), full: false }
    }
}

/// The kinds of [`Fault`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FaultCode {
    /// No such file, command or turn.
    NotFound,
    /// The file is there but may not be used so.
    Denied,
    /// The command's file is not a program.
    NotExecutable,
    /// Something else is in progress.
    Busy,
    /// `Boot` has not come, or has failed.
    NotReady,
    /// This connection's role does not allow it.
    NotOwner,
    /// The request makes no sense.
    Invalid,
    /// The machine said no: disk full, too many processes…
    System,
}
