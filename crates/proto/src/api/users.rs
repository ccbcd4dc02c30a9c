//! Users, and what members may use of the machine for sandboxes of their own.

use serde::{Deserialize, Serialize};

use super::Role;
use crate::bridge::Author;

/// What a member may use for standalone sandboxes and one-shot commands. Admins have no such
/// limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct UserLimits {
    /// Sandboxes at once, stopped ones included; 0 allows none.
    pub sandboxes: u32,
    /// Memory of each, including swap.
    pub memory_bytes: u64,
    /// CPU time of each in milliseconds per second; 1000 is one core.
    pub cpu_millis_per_second: u32,
    /// Bytes that each may write to its own disk.
    pub writable_bytes: u64,
    /// Each is stopped after this time.
    pub lifetime_secs: u64,
}

impl UserLimits {
    /// The limits of a user for whom no others are set.
    #[must_use]
    pub const fn default_with(sandboxes: u32) -> Self {
        Self {
            sandboxes,
            memory_bytes: 2 << 30,
            cpu_millis_per_second: 2000,
            writable_bytes: 4 << 30,
            lifetime_secs: 3600,
        }
    }
}

/// `PATCH /v1/users/{email}/limits`: changes what a member may use. An absent field stays as it is,
/// null restores the default.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetUserLimits {
    /// Sandboxes at once, stopped ones included; 0 allows none.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>, maximum = 100000))]
    pub sandboxes: Option<Option<u32>>,
    /// Memory of each, including swap.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>, minimum = 1048576,
        maximum = 1125899906842624_i64))]
    pub memory_bytes: Option<Option<u64>>,
    /// CPU time of each in milliseconds per second; 1000 is one core.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u32>, minimum = 10,
        maximum = 4096000))]
    pub cpu_millis_per_second: Option<Option<u32>>,
    /// Bytes that each may write to its own disk.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>, minimum = 4096,
        maximum = 1125899906842624_i64))]
    pub writable_bytes: Option<Option<u64>>,
    /// Each is stopped after this time.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>, minimum = 1,
        maximum = 315360000))]
    pub lifetime_secs: Option<Option<u64>>,
}

/// Tells null from an absent field.
fn present<'de, T: Deserialize<'de>, D: serde::Deserializer<'de>>(
    from: D,
) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(from).map(Some)
}

/// A person with a token or with limits of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct User {
    /// Name and e-mail address; the address identifies the user.
    pub user: Author,
    /// The highest role among the user's tokens; null without a token.
    pub role: Option<Role>,
    /// Limits of requests with a member's token.
    pub limits: UserLimits,
}
