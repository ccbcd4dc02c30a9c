//! The MCP servers besides Harvest's own tools, as data: URL and the secret with the key of each.
//! Knows no request.

use std::collections::BTreeMap;

use harvest_proto::{
    McpServerName, SecretOwner,
    api::{KeySource, McpService},
};

use crate::{PrivateHosts, UpstreamError, ledger::Ledger, model::check_service_url};

/// How the gateway serves an MCP server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum McpServerKind {
    /// The service speaks MCP over HTTP and takes a bearer token.
    Remote,
    /// The Gemini API, which speaks no MCP: the gateway has the tools.
    Gemini,
}

/// An MCP server outside of this installation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct McpServer {
    pub kind: McpServerKind,
    /// The MCP endpoint; of Gemini, the model.
    pub url: String,
    /// Name of the secret with the key; none when the server needs none.
    pub secret: Option<String>,
}

/// All servers by name: the built-in ones and those of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct McpServers(BTreeMap<McpServerName, McpServer>);

/// Name, kind, URL and secret of each server that needs no configuration but its key.
const BUILT_IN: [(&str, McpServerKind, &str, &str); 4] = [
    (
        "gemini",
        McpServerKind::Gemini,
        "https://generativelanguage.googleapis.com/v1beta/models/gemini-2.5-pro",
        "GEMINI_API_KEY",
    ),
    ("github", McpServerKind::Remote, "https://api.githubcopilot.com/mcp", "GITHUB_TOKEN"),
    ("linear", McpServerKind::Remote, "https://mcp.linear.app/mcp", "LINEAR_API_KEY"),
    ("sentry", McpServerKind::Remote, "https://mcp.sentry.dev/mcp", "SENTRY_AUTH_TOKEN"),
];

impl Default for McpServers {
    fn default() -> Self {
        let server = |(name, kind, url, secret): (&str, McpServerKind, &str, &str)| {
            let name = name.parse().expect("a built-in name is valid");
            (name, McpServer { kind, url: url.to_owned(), secret: Some(secret.to_owned()) })
        };
        Self(BUILT_IN.into_iter().map(server).collect())
    }
}

impl McpServers {
    /// Adds a server, or replaces the one of that name.
    #[must_use]
    pub fn with(mut self, name: McpServerName, server: McpServer) -> Self {
        self.0.insert(name, server);
        self
    }

    /// Leaves out the server of that name.
    #[must_use]
    pub fn without(mut self, name: &McpServerName) -> Self {
        self.0.remove(name);
        self
    }

    #[must_use]
    pub fn get(&self, name: &McpServerName) -> Option<&McpServer> {
        self.0.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&McpServerName, &McpServer)> {
        self.0.iter()
    }
}

impl McpServer {
    /// Checks the URL. A key travels unencrypted only to this machine and to private hosts.
    ///
    /// # Errors
    /// When the URL is invalid, or plain http to a host that may be public.
    pub fn check_url(&self, private_hosts: &PrivateHosts) -> Result<(), UpstreamError> {
        check_service_url(&self.url, private_hosts)
    }

    /// The server as the API lists it.
    pub(crate) async fn service(
        &self,
        name: &McpServerName,
        ledger: &dyn Ledger,
        owners: &[SecretOwner],
    ) -> McpService {
        let key = match &self.secret {
            Some(secret) => ledger.secret_source(owners, secret).await,
            None => KeySource::NotNeeded,
        };
        McpService { name: name.clone(), secret: self.secret.clone(), key }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_servers_are_encrypted_and_need_keys() {
        for (name, server) in McpServers::default().iter() {
            assert_eq!(server.check_url(&PrivateHosts::default()), Ok(()), "{name}");
            assert!(server.url.starts_with("https://") && server.secret.is_some(), "{name}");
        }
    }
}
