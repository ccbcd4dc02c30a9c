//! Access tokens, their users and roles.

use serde::{Deserialize, Serialize};

use super::UserLimits;
use crate::{Timestamp, bridge::Author};

/// Permissions of a token's user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Role {
    /// May do everything.
    Admin,
    /// May create and see sessions, and have a few sandboxes; may change and delete only their own.
    Member,
}

impl Role {
    /// The role's name in the API.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Admin => "admin",
            Self::Member => "member",
        }
    }
}

/// An access token, without its value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Token {
    /// Name of the token.
    #[cfg_attr(feature = "openapi", schema(example = "laptop"))]
    pub name: String,
    /// User the token belongs to.
    pub user: Author,
    /// Permissions of the user.
    pub role: Role,
    /// Time of creation.
    pub created_at: Timestamp,
    /// Time of the last request with this token, accurate to about ten minutes.
    pub last_used: Option<Timestamp>,
}

/// `POST /v1/tokens`: creates a token. Only admins create tokens for other users.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreateToken {
    /// Name of the token: letters, digits, `.`, `_` and `-`.
    #[cfg_attr(
        feature = "openapi",
        schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", example = "laptop")
    )]
    pub name: String,
    /// User the token belongs to; the requesting user when absent.
    pub user: Option<Author>,
    /// Permissions. When absent: `member` for another user, the requester's own role otherwise.
    pub role: Option<Role>,
}

/// A new token with its value. No later request returns the value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CreatedToken {
    /// The token, without its value.
    #[serde(flatten)]
    pub token: Token,
    /// Value for the header `authorization: Bearer …`. The server stores only a hash of it.
    pub value: String,
}

/// `GET /v1/me`: the user of the request's token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Me {
    /// User the token belongs to.
    pub user: Author,
    /// Permissions of the user.
    pub role: Role,
    /// Name of the token.
    pub token: String,
    /// What a member may use for sandboxes of their own; absent for admins.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<UserLimits>,
}
