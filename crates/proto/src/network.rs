//! The network policy of a session.

use crate::{Timestamp, text::word_enum};

word_enum!(
    /// Network policy of a session.
    #[derive(Default)]
    NetworkPolicy, "network policy" {
        /// The gateway's own names only: model and git.
        None = "none",
        /// In addition, the names that the operator trusts, such as package registries.
        #[default]
        Trusted = "trusted",
        /// In addition, every name with a public address.
        Full = "full",
    }
);

impl NetworkPolicy {
    /// The one of both that allows less.
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        let breadth = |policy| match policy {
            Self::None => 0,
            Self::Trusted => 1,
            Self::Full => 2,
        };
        if breadth(other) < breadth(self) { other } else { self }
    }
}

word_enum!(
    /// Whether a network rule allows or denies connections.
    RuleVerdict, "verdict of a rule" {
        /// Connections are allowed, unless another rule denies them.
        Allow = "allow",
        /// Connections are denied, whatever other rules allow.
        Deny = "deny",
    }
);

word_enum!(
    /// What was decided about a connection.
    #[derive(PartialOrd, Ord)]
    NetworkVerdict, "verdict" {
        /// The connection was opened.
        Allowed = "allowed",
        /// The connection or the look-up of its name was refused.
        Refused = "refused",
    }
);

word_enum!(
    /// Where a network rule applies.
    RuleScope, "scope of a rule" {
        /// In one session.
        Session = "session",
        /// In all sessions and builds of one repository.
        Repository = "repository",
        /// In all sessions and builds.
        Everywhere = "everywhere",
    }
);

/// Connections of a sandbox to one name and port with one verdict, and their bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrafficCount {
    /// The name that was asked for.
    pub name: String,
    /// The port; 0 for a refused look-up.
    pub port: u16,
    /// What was decided.
    pub verdict: NetworkVerdict,
    /// When the first of them was counted.
    pub at: Timestamp,
    /// Number of connections and refused look-ups.
    pub connections: u64,
    /// Bytes that left the sandbox.
    pub sent: u64,
    /// Bytes that came into the sandbox.
    pub received: u64,
}

/// The name and the ports of a rule, written as `NAME` or `NAME:PORT,PORT`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleTarget {
    /// A host name or `*.example.org`; not checked here.
    pub name: String,
    /// The ports; empty when none is given.
    pub ports: Vec<u16>,
}

/// A port of a rule is not a number from 1 to 65535.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a port; write NAME or NAME:PORT,PORT")]
pub struct InvalidPort(String);

impl std::str::FromStr for RuleTarget {
    type Err = InvalidPort;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some((name, ports)) = text.split_once(':') else {
            return Ok(Self { name: text.to_owned(), ports: Vec::new() });
        };
        let port = |text: &str| match text.parse() {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(InvalidPort(text.to_owned())),
        };
        let ports = ports.split(',').map(port).collect::<Result<_, _>>()?;
        Ok(Self { name: name.to_owned(), ports })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_of_a_rule_has_name_and_ports() {
        let target = |text: &str| text.parse::<RuleTarget>().map(|one| (one.name, one.ports));
        assert_eq!(target("example.org"), Ok(("example.org".to_owned(), vec![])));
        assert_eq!(
            target("*.example.org:22,8443"),
            Ok(("*.example.org".to_owned(), vec![22, 8443]))
        );
        for wrong in ["a.org:", "a.org:0", "a.org:65536", "a.org:80,", "a.org:http", "::1"] {
            assert!(target(wrong).is_err(), "{wrong}");
        }
    }
}
