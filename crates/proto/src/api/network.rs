//! Network rules: the names a sandbox may connect to.

use serde::{Deserialize, Serialize};

use crate::{NetworkPolicy, NetworkVerdict, RuleScope, RuleVerdict, Timestamp, text::word_enum};

/// The network rules of a sandbox. The model and the session's own repositories are reachable with
/// every policy, through doors of their own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkRules {
    /// Network policy: `none`, `trusted` or `full`.
    pub policy: NetworkPolicy,
    /// The names that the policy allows on ports 80 and 443; empty with `none`, and with `full`,
    /// which allows every name with a public address.
    pub names: Vec<AllowedName>,
    /// The rules in addition to the policy.
    pub rules: Vec<NetworkRule>,
}

/// Allows or denies connections to a name. A rule that denies wins over all that allow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkRule {
    /// A host name, or `*.example.org` for every name below `example.org`.
    pub name: String,
    /// `allow` or `deny`.
    pub verdict: RuleVerdict,
    /// The ports; empty for all, which only a rule that denies can have.
    pub ports: Vec<u16>,
    /// Whether the name may have an address of a private network or of the server's machine.
    pub private: bool,
    /// Where the rule applies: `session`, `repository` or `everywhere`.
    pub scope: RuleScope,
}

/// Connections of a session to one name and port in one turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NetworkLogEntry {
    /// Number of the turn; 0 for connections outside of turns.
    pub turn: u32,
    /// The name; `*` for those beyond the log's limit.
    pub name: String,
    /// The port; 0 with the name `*`, and for a look-up that was refused.
    pub port: u16,
    /// `allowed` or `refused`.
    pub verdict: NetworkVerdict,
    /// Number of connections and refused look-ups.
    pub connections: u64,
    /// Bytes that left the sandbox.
    pub sent: u64,
    /// Bytes that came into the sandbox.
    pub received: u64,
    /// Time of the first connection.
    pub first_at: Timestamp,
    /// Time of the last change.
    pub last_at: Timestamp,
}

/// `PUT …/network/rules/{host}`: adds a network rule, or ports to an earlier one for the name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SetNetworkRule {
    /// `allow` or `deny`.
    pub verdict: RuleVerdict,
    /// The ports; when empty, a rule allows 80 and 443, or denies all.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(max_items = 32))]
    pub ports: Vec<u16>,
    /// Allow addresses of private networks and of the server's machine. Not for the rules of a
    /// session, and only for a whole name.
    #[serde(default)]
    pub private: bool,
}

impl SetNetworkRule {
    /// The ports with the default filled in, sorted and without repetition.
    #[must_use]
    pub fn effective_ports(&self) -> Vec<u16> {
        let ports = match (self.verdict, self.ports.is_empty()) {
            (RuleVerdict::Allow, true) => vec![80, 443],
            _ => self.ports.clone(),
        };
        ports.into_iter().collect::<std::collections::BTreeSet<_>>().into_iter().collect()
    }
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
    /// Ports besides 80 and 443.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<u16>,
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
