//! What a repository declares about itself in `.harvest/config.toml`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Money, NetworkPolicy};

/// The content of `.harvest/config.toml` on the base branch. What it asks for is granted within
/// the limits of the server and its admins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RepositoryConfig {
    /// Image that builds start from, unless an admin has set one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Debian packages that are installed before the dependencies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub packages: Vec<String>,
    /// Environment variables of hooks, agents and commands. Never a secret.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Command that runs after the installation, if there is no `.harvest/setup.sh`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setup: Option<String>,
    /// Command that runs the tests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test: Option<String>,
    /// Command that checks a pushed commit, if there is no `.harvest/check.sh`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub check: Option<String>,
    /// Ports that the repository's servers listen on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
    /// The network that the repository needs.
    pub policy: RepositoryPolicy,
    /// What a session may spend, in millionths of a US dollar, unless it is created with a budget.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_micros: Option<Money>,
}

/// The network that a repository asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RepositoryPolicy {
    /// Policy of sessions that are created without one, if it is stricter than the server's
    /// default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkPolicy>,
    /// Names that the repository needs. Rules of an admin allow them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<String>,
}
