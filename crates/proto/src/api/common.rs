//! Bodies every resource uses: lists and errors.

use serde::{Deserialize, Serialize};

/// One page of a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Page<T> {
    /// The entries of this page.
    pub items: Vec<T>,
    /// Pass this as `cursor` to get the next page; null on the last one.
    pub next_cursor: Option<String>,
}

/// An error (RFC 9457, `application/problem+json`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Problem {
    /// Always `about:blank`; `code` tells errors apart.
    #[serde(rename = "type")]
    pub kind: String,
    /// The HTTP status in words.
    pub title: String,
    /// The HTTP status.
    pub status: u16,
    /// What failed and why.
    pub detail: String,
    /// Error code for programs. New codes may be added.
    pub code: String,
    /// Suggested next step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// Id of the request; the server's log has the same id.
    pub request_id: String,
}
