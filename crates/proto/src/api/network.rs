//! Network rules: the names a sandbox may connect to.

use serde::{Deserialize, Serialize};

use crate::{NetworkPolicy, text::word_enum};

/// The network rules of a sandbox. The model and the session's own repositories are reachable with
/// every policy, through doors of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkRules {
    /// Network policy: `none` or `trusted`.
    pub policy: NetworkPolicy,
    /// The names the sandbox may connect to on ports 80 and 443; empty with `none`.
    pub names: Vec<AllowedName>,
}

/// A name that sandboxes with the network policy `trusted` may connect to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AllowedName {
    /// A host name, or `*.example.org` for every name below `example.org`.
    pub name: String,
    /// Where the name comes from.
    pub source: NameSource,
    /// The package client that uses the name, such as `pip`; absent for names of the setting.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool: Option<String>,
}

word_enum!(
    /// Where an allowed name comes from.
    NameSource, "source of a name" {
        /// The default of a common package client.
        BuiltIn = "built_in",
        /// The configuration of a package client on the server's host.
        Host = "host",
        /// The setting `trusted`.
        Config = "config",
    }
);
