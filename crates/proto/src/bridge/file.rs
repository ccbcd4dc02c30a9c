//! Files inside: what to do with them and what they are.

use serde::{Deserialize, Serialize};

use super::StreamId;
use crate::Timestamp;

/// What to do with a file. Paths are absolute, inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
pub enum FileRequest {
    /// Send the file's bytes on `stream`, then `End`. The reply comes first, so that a dialer may wait
    /// for it; when reading fails midway the connection closes, since an `End` would look like the file's.
    Read {
        /// Which.
        path: String,
        /// Where to.
        stream: StreamId,
    },
    /// Write what comes on `stream` until its `End`; the reply comes when it is on disk under its name.
    Write {
        /// Which.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Owner, as in [`Command::user`].
        user: Option<String>,
        /// Where from.
        stream: StreamId,
    },
    /// What is it?
    Stat {
        /// Which.
        path: String,
        /// What a symbolic link leads to, rather than the link. An older supervisor describes the link.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        follow: bool,
    },
    /// What is in it?
    List {
        /// Which.
        path: String,
        /// Only what comes after this name, and no more than fits a reply; all of it or a fault when absent.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        after: Option<String>,
    },
    /// Make a folder. One that is there already is left as it is.
    Mkdir {
        /// Which.
        path: String,
        /// Permission bits.
        mode: u32,
        /// Owner, as in [`Command::user`].
        user: Option<String>,
    },
    /// Make a symbolic link, in the place of a file or link of that name.
    Symlink {
        /// Which.
        path: String,
        /// What it points to, as it is.
        target: String,
        /// Owner, as in [`Command::user`].
        user: Option<String>,
    },
    /// Where does a symbolic link point?
    ReadLink {
        /// Which.
        path: String,
    },
    /// Remove a file or a link.
    Remove {
        /// Which.
        path: String,
        /// A folder as well, with all that is in it. An older supervisor refuses folders.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        tree: bool,
    },
    /// What a later version asks for; answered with a fault.
    #[serde(other)]
    Unknown,
}

/// What a path is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileStat {
    /// The last part of the path.
    pub name: String,
    /// `file`, `folder`, `link` or `other`.
    pub kind: FileKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// Owner inside.
    pub uid: u32,
    /// When it was last written.
    pub modified: Timestamp,
    /// Where a link points, as it is; an older supervisor does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
}

/// What kind of thing a path is.
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
    /// A socket, a pipe, a device.
    Other,
}
