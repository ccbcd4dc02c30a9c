//! The resolver of the HTTP client for git remotes: it returns only addresses that may be dialled,
//! so the address that was judged is the one that is dialled.

use std::{collections::HashSet, env, net::SocketAddr, sync::Arc};

use reqwest::{
    Url,
    dns::{Addrs, Name, Resolve, Resolving},
};

use super::{PRIVATE_ADDRESS, look_up, resolve};
use crate::{GatewayConfig, policy};

const PROXY_VARIABLES: [&str; 6] =
    ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"];

/// A name that resolves to private addresses only.
#[derive(Debug, thiserror::Error)]
#[error("{PRIVATE_ADDRESS}")]
pub(crate) struct PrivateAddress;

#[derive(Debug, Clone)]
pub(crate) struct PublicResolver {
    config: Arc<GatewayConfig>,
    /// The host's own proxies, which may have private addresses. They resolve the names of remotes
    /// themselves.
    proxies: Arc<HashSet<String>>,
}

impl PublicResolver {
    pub(crate) fn new(config: &GatewayConfig) -> Self {
        let proxies = PROXY_VARIABLES.iter().filter_map(|name| env::var(name).ok());
        let proxies = proxies.filter_map(|proxy| proxy_host(&proxy)).collect();
        Self { config: Arc::new(config.clone()), proxies: Arc::new(proxies) }
    }

    /// Whether a name is that of a proxy, whose address is not judged.
    pub(crate) fn is_proxy(&self, name: &str) -> bool {
        policy::normalize(name).is_some_and(|name| self.proxies.contains(&name))
    }

    async fn addresses(&self, name: &str) -> Result<Vec<SocketAddr>, crate::http::BodyError> {
        let name = policy::normalize(name).ok_or("not a valid host name")?;
        if self.proxies.contains(&name) {
            return Ok(look_up(&name, 0).await?);
        }
        resolve(&self.config, &name, 0, false).await.map_err(|reason| {
            if reason == PRIVATE_ADDRESS { PrivateAddress.into() } else { reason.into() }
        })
    }
}

impl Resolve for PublicResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let resolver = self.clone();
        Box::pin(async move {
            let found = resolver.addresses(name.as_str()).await?;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

// Proxies are also given without a scheme.
fn proxy_host(proxy: &str) -> Option<String> {
    let proxy = if proxy.contains("://") { proxy.to_owned() } else { format!("http://{proxy}") };
    policy::normalize(Url::parse(&proxy).ok()?.domain()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxy_is_found_with_and_without_scheme() {
        for proxy in ["http://Proxy.corp:3128", "proxy.corp:3128", "http://u:p@proxy.corp/"] {
            assert_eq!(proxy_host(proxy).as_deref(), Some("proxy.corp"), "{proxy}");
        }
        assert_eq!(proxy_host("10.0.0.1:3128"), None);
    }

    #[tokio::test]
    async fn only_public_addresses_are_returned() {
        let pinned = [
            ("public.example".to_owned(), "203.0.113.7:0".parse().unwrap()),
            ("private.example".to_owned(), "10.0.0.1:0".parse().unwrap()),
            ("allowed.example".to_owned(), "10.0.0.2:0".parse().unwrap()),
        ];
        let private_hosts = crate::PrivateHosts::new(vec!["allowed.example".to_owned()]);
        let config =
            GatewayConfig { pinned: pinned.into(), private_hosts, ..GatewayConfig::default() };
        let resolver = PublicResolver::new(&config);
        for (name, found) in [
            ("public.example", Some("203.0.113.7:0")),
            ("private.example", None),
            ("allowed.example", Some("10.0.0.2:0")),
        ] {
            let addresses = resolver.addresses(name).await.ok();
            assert_eq!(addresses, found.map(|found| vec![found.parse().unwrap()]), "{name}");
        }
        let refused = resolver.addresses("private.example").await.unwrap_err();
        assert!(refused.is::<PrivateAddress>(), "{refused}");
    }
}
