//! Hosts with private addresses that the operator allows: an internal package mirror, a git server
//! of the company. Everything else with a private address is refused, so that no sandbox reaches
//! the machine's own network.

use std::net::IpAddr;

use crate::policy;

/// Names, `*.example.org` included, and IP addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PrivateHosts(Vec<String>);

impl PrivateHosts {
    #[must_use]
    pub fn new(entries: Vec<String>) -> Self {
        Self(entries)
    }

    pub(crate) fn allows_name(&self, name: &str) -> bool {
        let name = policy::normalize(name);
        name.is_some_and(|name| self.0.iter().any(|entry| policy::matches(entry, &name)))
    }

    pub(crate) fn allows_address(&self, address: IpAddr) -> bool {
        self.0.iter().any(|entry| entry.parse() == Ok(address))
    }
}

/// How to allow a private host.
pub(crate) fn hint(host: &str) -> String {
    format!(
        "to allow it, add \"{host}\" to the key `private_hosts` in harvest.toml and restart the \
         server"
    )
}
