//! What every list and every error has.

use serde::{Deserialize, Serialize};

/// A list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Page<T> {
    /// What there is.
    pub items: Vec<T>,
    /// Give this back as `cursor` for more; absent at the end.
    pub next_cursor: Option<String>,
}

/// What went wrong: RFC 9457, `application/problem+json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// `about:blank`: the code says it all.
    #[serde(rename = "type")]
    pub kind: String,
    /// The status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What failed and why.
    pub detail: String,
    /// A word that programs may compare; an open set.
    pub code: String,
    /// What to do next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Look for this in the log.
    pub request_id: String,
}
