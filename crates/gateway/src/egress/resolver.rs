//! The resolver of the HTTP client for git remotes: it returns only addresses that may be dialled,
//! so the address that was judged is the one that is dialled.

use std::{collections::BTreeSet, net::SocketAddr, sync::Arc};

use reqwest::{
    Url,
    dns::{Addrs, Name, Resolve, Resolving},
};

use super::{Lookups, PRIVATE_ADDRESS, refuse_known_private, resolve};
use crate::{GatewayConfig, policy};

/// A name that resolves to private addresses only.
#[derive(Debug, thiserror::Error)]
#[error("{PRIVATE_ADDRESS}")]
pub(crate) struct PrivateAddress;

#[derive(Debug, Clone)]
pub(crate) struct PublicResolver {
    config: Arc<GatewayConfig>,
    /// The host's own proxies, which may have private addresses. They resolve the names of remotes
    /// themselves.
    proxies: Arc<BTreeSet<String>>,
    lookups: Lookups,
}

impl PublicResolver {
    pub(crate) fn new(config: &GatewayConfig) -> Self {
        let proxies = Arc::new(config.proxies.names());
        Self { config: Arc::new(config.clone()), proxies, lookups: Lookups::default() }
    }

    /// Whether a name is that of a proxy, whose address is not judged.
    pub(crate) fn is_proxy(&self, name: &str) -> bool {
        policy::normalize(name).is_some_and(|name| self.proxies.contains(&name))
    }

    /// The proxies of the client: those by which requests are judged, not what the client would
    /// read from the environment.
    pub(crate) fn proxies(&self) -> reqwest::Proxy {
        let config = Arc::clone(&self.config);
        reqwest::Proxy::custom(move |url| config.proxies.of_url(url))
    }

    /// Refuses the host of a request that goes through a proxy, if it is known here and private.
    pub(crate) async fn judge_proxied(&self, url: &Url) -> Result<(), PrivateAddress> {
        let Some(name) = url.domain().and_then(policy::normalize) else { return Ok(()) };
        let port = url.port_or_known_default().unwrap_or_default();
        if self.config.proxies.of_url(url).is_none() {
            return Ok(());
        }
        let judged = refuse_known_private(&self.config, &self.lookups, &name, port, false).await;
        judged.map_err(|_| PrivateAddress)
    }

    async fn addresses(&self, name: &str) -> Result<Vec<SocketAddr>, crate::http::BodyError> {
        let name = policy::normalize(name).ok_or("not a valid host name")?;
        if self.proxies.contains(&name) {
            return Ok(self.lookups.look_up(&name, 0).await?);
        }
        resolve(&self.config, &self.lookups, &name, 0, false).await.map_err(|reason| {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostProxies;

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
        let url = |name: &str| Url::parse(&format!("https://{name}/a.git")).unwrap();
        assert!(resolver.judge_proxied(&url("private.example")).await.is_ok(), "without a proxy");
        let proxies = HostProxies::from_variables(|_| Some("http://proxy.example".to_owned()));
        let proxied = PublicResolver::new(&GatewayConfig { proxies, ..config });
        assert!(proxied.judge_proxied(&url("private.example")).await.is_err());
        assert!(proxied.judge_proxied(&url("allowed.example")).await.is_ok());
        let only_http = |name: &str| (name == "http_proxy").then(|| "proxy.example".to_owned());
        let proxies = HostProxies::from_variables(only_http);
        let proxied = PublicResolver::new(&GatewayConfig { proxies, ..(*proxied.config).clone() });
        let unusual_port = Url::parse("http://private.example:8080/a.git").unwrap();
        assert!(proxied.judge_proxied(&unusual_port).await.is_err());
        let refused = resolver.addresses("private.example").await.unwrap_err();
        assert!(refused.is::<PrivateAddress>(), "{refused}");
    }
}
