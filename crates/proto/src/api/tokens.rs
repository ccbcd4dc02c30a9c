//! Tokens: who may ask, and as whom.

use serde::{Deserialize, Serialize};

use crate::{Timestamp, bridge::Author};

/// What the user of a token may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Role {
    /// Everything.
    Admin,
    /// Create and see sessions; change and delete their own.
    Member,
}

impl Role {
    /// The word users and programs see.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Member => "member",
        }
    }
}

/// A token, its value apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Token {
    /// What it is called.
    #[cfg_attr(feature = "openapi", schema(example = "laptop"))]
    pub name: String,
    /// Whose it is.
    pub user: Author,
    /// What they may do.
    pub role: Role,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last shown, to about ten minutes.
    pub last_used: Option<Timestamp>,
}

/// `POST /v1/tokens`. Only admins make tokens for others.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateToken {
    /// What to call it: letters, digits, `.`, `_` and `-`.
    #[cfg_attr(
        feature = "openapi",
        schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", example = "laptop")
    )]
    pub name: String,
    /// Whose it is; the asker's when absent.
    #[serde(default)]
    pub user: Option<Author>,
    /// What they may do; `member` when absent and it is for somebody else, the asker's own otherwise.
    #[serde(default)]
    pub role: Option<Role>,
}

/// A token with its value, which is shown this once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedToken {
    /// The token.
    #[serde(flatten)]
    pub token: Token,
    /// What to send as `authorization: Bearer …`. Only a hash of it is kept.
    pub value: String,
}

/// `GET /v1/me`: who asks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Me {
    /// The user of the token.
    pub user: Author,
    /// What they may do.
    pub role: Role,
    /// What the token is called.
    pub token: String,
}
