//! Budgets: limits of the money that model calls may cost.

use serde::{Deserialize, Serialize};

use crate::{Money, SpendingScope, event::Usage};

/// A limit, and what was spent of it. The amounts are millionths of a US dollar, at list prices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Budget {
    /// What it limits: `session`, `repository`, `user` or `day`.
    pub scope: SpendingScope,
    /// The session's id, the repository's name, the user's e-mail address, or the date in UTC.
    pub name: String,
    /// The limit; null for none.
    pub budget_micros: Option<Money>,
    /// Cost of the calls that have ended.
    pub spent_micros: Money,
    /// Reserved for calls in progress.
    pub held_micros: Money,
}

/// `PUT …/budget`: sets or removes a limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetBudget {
    /// The limit in millionths of a US dollar; null for none.
    #[serde(deserialize_with = "Option::deserialize")]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub budget_micros: Option<Money>,
}

/// What model calls used and cost, of one session, repository, user or day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Spending {
    /// The session's id, the repository's name, the user's e-mail address, or the date in UTC;
    /// empty for calls that belong to none.
    pub name: String,
    /// Number of calls.
    pub calls: u64,
    /// Tokens they used.
    pub usage: Usage,
    /// What they cost in millionths of a US dollar, at list prices.
    pub spent_micros: Money,
    /// Number of calls of models without a known price, which count as free.
    pub unpriced_calls: u64,
    /// CPU time of sandboxes in milliseconds, from the beginning of the hour that `since` is in.
    #[serde(default)]
    pub cpu_millis: u64,
    /// Memory of sandboxes in MiB times seconds, from the beginning of the same hour.
    #[serde(default)]
    pub memory_mib_seconds: u64,
}
