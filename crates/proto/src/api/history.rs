//! What changed between the turns of a session: lines, files of the checkout, files of the machine.

use serde::{Deserialize, Serialize};

/// How much changed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiffStat {
    /// Files.
    pub files: u64,
    /// Lines that are new.
    pub insertions: u64,
    /// Lines that are gone.
    pub deletions: u64,
}

/// `GET /v1/sessions/{id}/diff?view=stat`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct DiffFiles {
    /// Each file that differs.
    pub items: Vec<FileDiff>,
    /// All of them together.
    pub total: DiffStat,
    /// Whether some were left out.
    pub cut: bool,
}

/// A file of a checkout that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileDiff {
    /// The repository it is of.
    pub repository: String,
    /// Where in it; bytes that are no text are replaced.
    pub path: String,
    /// Lines that are new; absent for what is not text.
    pub insertions: Option<u64>,
    /// Lines that are gone; absent for what is not text.
    pub deletions: Option<u64>,
}

/// `GET /v1/sessions/{id}/diff?view=machine`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineChanges {
    /// The first of them, folder by folder.
    pub items: Vec<MachineChange>,
    /// How many there are only after.
    pub added: u64,
    /// How many differ.
    pub changed: u64,
    /// How many there were only before.
    pub removed: u64,
    /// Whether some were left out.
    pub cut: bool,
}

/// A file, folder or other name of the machine that differs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MachineChange {
    /// Where; bytes that are no text are replaced.
    pub path: String,
    /// The same in base64, exactly, where bytes were replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// How it differs.
    pub change: ChangeKind,
    /// `file`, `folder`, `link` or `other`.
    pub kind: String,
    /// The size of the file before.
    pub before_bytes: Option<u64>,
    /// The size of the file after.
    pub after_bytes: Option<u64>,
}

/// How a name differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum ChangeKind {
    /// It is new.
    Added,
    /// Its content, kind, owner or mode is another.
    Changed,
    /// It is gone.
    Removed,
}
