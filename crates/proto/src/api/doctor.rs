//! Checks of the machine, as `harvest doctor` shows them.

use serde::{Deserialize, Serialize};

/// Result of one check of the machine (`harvest doctor`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Finding {
    /// Id of the check; the same in every release.
    pub id: String,
    /// Severity of the finding.
    pub level: FindingLevel,
    /// What was found, in one line.
    pub found: String,
    /// How to fix it, in one line.
    pub fix: Option<String>,
}

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum FindingLevel {
    /// Nothing to fix.
    Ok,
    /// Sandboxes run, but without a feature.
    Warn,
    /// No sandbox can run.
    Fail,
}
