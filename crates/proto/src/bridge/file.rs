//! File operations in a sandbox.

use serde::{Deserialize, Serialize};

use super::StreamId;
use crate::Timestamp;

/// A file operation. Paths are absolute paths in the sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum FileRequest {
    /// Send the file's bytes on `stream`, then `End`. The reply comes first, so that the dialer can
    /// wait for it. A read error midway closes the connection: an `End` would look like success.
    Read {
        /// The file.
        path: String,
        /// Stream to send on.
        stream: StreamId,
    },
    /// Write the bytes that arrive on `stream` until its `End`. The reply is sent when the file is
    /// on disk under its name.
    Write {
        /// The file.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Stream to read from.
        stream: StreamId,
    },
    /// Describe a path.
    Stat {
        /// The path.
        path: String,
        /// Follow a symbolic link instead of describing the link.
        follow: bool,
    },
    /// List a folder.
    List {
        /// The folder.
        path: String,
        /// Only entries after this name, as many as fit one reply. When absent: the whole folder,
        /// or a fault if it does not fit.
        after: Option<String>,
    },
    /// Create a folder. An existing folder is left as it is.
    Mkdir {
        /// The folder.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// Create a symbolic link; replaces a file or link of that name.
    Symlink {
        /// Path of the link.
        path: String,
        /// Target of the link, stored as given.
        target: String,
    },
    /// Remove a file or a link.
    Remove {
        /// The file or link.
        path: String,
        /// Remove a folder with everything in it, too.
        tree: bool,
    },
}

/// Description of a path.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileStat {
    /// The last part of the path.
    pub name: String,
    /// `file`, `folder`, `link` or `other`.
    pub kind: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Uid of the owner inside the sandbox.
    pub uid: u32,
    /// Time of the last modification.
    pub modified: Timestamp,
    /// Target of a symbolic link, as stored; missing when it is not UTF-8.
    pub target: Option<String>,
}

/// Type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link.
    Link,
    /// A socket, pipe or device.
    Other,
    /// Anything whose name is not UTF-8; in lists only. The name has replacements for the invalid
    /// bytes, so it names no file.
    NotUtf8,
}
