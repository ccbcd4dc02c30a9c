//! What changed between the turns of a session: lines, files of the checkout, files of the machine; and
//! what sessions hold on the disk.

use serde::{Deserialize, Serialize};

use crate::{SessionId, SnapshotId};

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

/// `GET` and `POST /v1/retention`: what sessions hold on the disk, and what goes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Retained {
    /// Each session.
    pub items: Vec<Held>,
    /// What all of their snapshots take together, what several share once.
    pub snapshots_bytes: u64,
    /// What the rules have go: with `GET` what would, with `POST` what did.
    pub dropped: Vec<Dropped>,
}

/// What a session holds on the disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Held {
    /// Which.
    pub session: SessionId,
    /// What it is called.
    pub title: String,
    /// How many snapshots.
    pub snapshots: u64,
    /// How many of them are pinned.
    pub pinned: u64,
    /// What they added, each to what it stands on.
    pub bytes: u64,
}

/// Something the rules have go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Dropped {
    /// Of which session.
    pub session: SessionId,
    /// Which snapshot; absent when the whole session goes.
    pub snapshot: Option<SnapshotId>,
    /// Why: `archived`, `archived_long_ago`, `too_many` or `quota`.
    pub why: String,
    /// What it added to what it stands on.
    pub bytes: u64,
}

/// `PUT /v1/sessions/{id}/snapshots/{snapshot}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PinSnapshot {
    /// Whether it is kept whatever the rules say.
    pub pinned: bool,
}
