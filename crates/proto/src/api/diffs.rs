//! Diffs between turns of a session: of its checkouts (by git) and of all files in its sandbox.

use serde::{Deserialize, Serialize};

use crate::RepositoryName;
pub use crate::bridge::DiffStat;

/// `GET /v1/sessions/{id}/diff/files`: the changed files of the session's checkouts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiffFiles {
    /// One entry per changed file.
    pub items: Vec<FileDiff>,
    /// Totals over all changed files, including those left out of `items`.
    pub total: DiffStat,
    /// True when `items` was cut because there are too many files.
    pub cut: bool,
}

/// A changed file of a checkout.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileDiff {
    /// Name of the repository.
    pub repository: RepositoryName,
    /// Path inside the repository; bytes that are not UTF-8 are replaced by U+FFFD.
    pub path: String,
    /// Number of added lines; null for a binary file.
    pub insertions: Option<u64>,
    /// Number of removed lines; null for a binary file.
    pub deletions: Option<u64>,
}

/// `GET /v1/sessions/{id}/diff/sandbox`: every file of the sandbox that differs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileChanges {
    /// The first differences, folder by folder.
    pub items: Vec<FileChange>,
    /// Number of files that exist only after.
    pub added: u64,
    /// Number of files that exist on both sides and differ.
    pub changed: u64,
    /// Number of files that exist only before.
    pub removed: u64,
    /// True when `items` was cut because there are too many files.
    pub cut: bool,
}

/// A file, folder or link of the sandbox that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileChange {
    /// Absolute path in the sandbox; bytes that are not UTF-8 are replaced by U+FFFD.
    pub path: String,
    /// The exact bytes of the path in base64, when `path` had to be altered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// Whether the file was added, changed or removed.
    pub change: ChangeKind,
    /// `file`, `folder`, `link` or `other`.
    pub kind: String,
    /// Size of the file before; null for anything but a regular file.
    pub before_bytes: Option<u64>,
    /// Size of the file after; null for anything but a regular file.
    pub after_bytes: Option<u64>,
}

/// How a file differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ChangeKind {
    /// The file exists only after.
    Added,
    /// Content, kind, owner or mode differs.
    Changed,
    /// The file exists only before.
    Removed,
}
