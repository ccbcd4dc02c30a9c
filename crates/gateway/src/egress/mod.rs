//! Connections to allowed names: resolves the name on the machine, connects to public addresses
//! only, or through the host's proxy, and forwards what names the same host: a TLS connection by
//! its hello, plain HTTP on port 80 by every request. Other protocols, on ports that a rule allows,
//! name no host. TLS is ended only for the hosts that secrets are for (`intercept`).

pub(crate) mod address;
pub(crate) mod hello;
mod intercept;
mod lookups;
mod plain_http;
mod proxy;
mod resolver;

use std::{
    borrow::Cow,
    io,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use tokio::{
    io::{
        AsyncBufRead, AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt,
        copy_bidirectional,
    },
    net::TcpStream,
    time::timeout,
};

pub(crate) use intercept::{Interception, UpstreamTls};
pub(crate) use lookups::Lookups;
use plain_http::SendMode;
pub use proxy::HostProxies;
use proxy::Proxy;
pub(crate) use resolver::{PrivateAddress, PublicResolver};

use crate::{GatewayConfig, policy};

// A host whose names only its proxy resolves may have no resolver that answers.
const PROXIED_LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
// For the complete TLS hello or request head, from the open connection.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_secs(30);

// The type of a TLS record that begins a connection (RFC 8446, 5.1).
const HANDSHAKE: u8 = 0x16;

pub(crate) const PRIVATE_ADDRESS: &str = "the name resolves to a private address";

/// Why a connection was refused.
pub(crate) type RefusalReason = Cow<'static, str>;

/// An open connection to a name, or to a proxy that takes requests for it.
pub(crate) struct OpenConnection {
    stream: TcpStream,
    /// The proxy of plain HTTP, which gets each request in absolute form.
    http_proxy: Option<Proxy>,
}

pub(crate) async fn connect(
    config: &GatewayConfig,
    lookups: &Lookups,
    name: &str,
    port: u16,
    private: bool,
) -> Result<OpenConnection, RefusalReason> {
    let name = policy::normalize(name).ok_or("not a valid host name")?;
    match config.proxies.of(&name, port) {
        Some(proxy) => connect_through(proxy, config, lookups, &name, port, private).await,
        None => {
            let stream = connect_directly(config, lookups, &name, port, private).await?;
            Ok(OpenConnection { stream, http_proxy: None })
        }
    }
}

/// Connects through a proxy, which resolves the name. A name that is known to be private here is
/// refused nevertheless; one that is unknown here is judged by the proxy alone.
async fn connect_through(
    proxy: &Proxy,
    config: &GatewayConfig,
    lookups: &Lookups,
    name: &str,
    port: u16,
    private: bool,
) -> Result<OpenConnection, RefusalReason> {
    refuse_known_private(config, lookups, name, port, private).await?;
    Ok(match port {
        80 => OpenConnection { stream: proxy.dial().await?, http_proxy: Some(proxy.clone()) },
        _ => OpenConnection { stream: proxy.tunnel(name, port).await?, http_proxy: None },
    })
}

/// Refuses a name that a proxy would resolve, if it is known here and private.
async fn refuse_known_private(
    config: &GatewayConfig,
    lookups: &Lookups,
    name: &str,
    port: u16,
    private: bool,
) -> Result<(), RefusalReason> {
    match timeout(PROXIED_LOOKUP_TIMEOUT, known_addresses(config, lookups, name, port)).await {
        Ok(Ok(known)) => refuse_any_private(&known, |ip| may_dial(config, name, private, ip)),
        _ => Ok(()),
    }
}

/// The proxy may dial any of the addresses, so that each must be allowed.
fn refuse_any_private(
    known: &[SocketAddr],
    may_dial: impl Fn(IpAddr) -> bool,
) -> Result<(), RefusalReason> {
    match known.iter().all(|known| may_dial(known.ip())) {
        true => Ok(()),
        false => Err(PRIVATE_ADDRESS.into()),
    }
}

async fn connect_directly(
    config: &GatewayConfig,
    lookups: &Lookups,
    name: &str,
    port: u16,
    private: bool,
) -> Result<TcpStream, RefusalReason> {
    for address in resolve(config, lookups, name, port, private).await? {
        if let Ok(Ok(stream)) = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            // Small packets of a handshake must not be delayed.
            let _ = stream.set_nodelay(true);
            return Ok(stream);
        }
    }
    Err("cannot connect to the server".into())
}

/// The addresses of a normalized name that may be dialled. The caller dials one of them, without
/// another look-up. Private ones may be if `private` says so, or the operator.
pub(crate) async fn resolve(
    config: &GatewayConfig,
    lookups: &Lookups,
    name: &str,
    port: u16,
    private: bool,
) -> Result<Vec<SocketAddr>, RefusalReason> {
    let mut found = known_addresses(config, lookups, name, port).await?;
    found.retain(|found| may_dial(config, name, private, found.ip()));
    if found.is_empty() { Err(PRIVATE_ADDRESS.into()) } else { Ok(found) }
}

fn may_dial(config: &GatewayConfig, name: &str, private: bool, address: IpAddr) -> bool {
    config.private_hosts.allows_name(name)
        || address::is_public(address)
        || private && address::is_private(address)
}

async fn known_addresses(
    config: &GatewayConfig,
    lookups: &Lookups,
    name: &str,
    port: u16,
) -> Result<Vec<SocketAddr>, RefusalReason> {
    match config.pinned.get(name) {
        Some(address) => Ok(vec![*address]),
        None => lookups.look_up(name, port).await,
    }
}

/// Forwards a connection until both ends are done, as far as it names the expected host.
pub(crate) async fn forward(
    mut inside: impl AsyncBufRead + AsyncWrite + Unpin,
    upstream: OpenConnection,
    name: &str,
    port: u16,
    interception: Option<Interception<'_>>,
) -> Result<(), RefusalReason> {
    let OpenConnection { stream: mut outside, http_proxy } = upstream;
    if port == 80 {
        let mode = http_proxy.as_ref().map_or(SendMode::Direct, SendMode::Proxied);
        return plain_http::forward(inside, outside, name, port, mode).await;
    }
    let first = match port == 443 || is_tls(&mut inside, &outside).await {
        true => timeout(FIRST_BYTES_TIMEOUT, first_bytes(&mut inside, name))
            .await
            .map_err(|_| "the connection did not name its host in time")??,
        false => Vec::new(),
    };
    if let Some(interception) = interception.filter(|_| !first.is_empty()) {
        return interception.forward(first, inside, outside).await;
    }
    // Either end may close the connection at any time; that is not an error to report.
    let copied: io::Result<_> = async {
        outside.write_all(&first).await?;
        copy_bidirectional(&mut inside, &mut outside).await
    }
    .await;
    if let Err(error) = copied {
        tracing::trace!(name, %error, "a forwarded connection ended early");
    }
    Ok(())
}

/// Whether the client begins with a TLS handshake. False as soon as the server speaks first, as in
/// SSH or SMTP.
async fn is_tls(inside: &mut (impl AsyncBufRead + Unpin), outside: &TcpStream) -> bool {
    tokio::select! {
        first = inside.fill_buf() => first.is_ok_and(|bytes| bytes.first() == Some(&HANDSHAKE)),
        _ = outside.readable() => false,
    }
}

async fn first_bytes(
    inside: &mut (impl AsyncRead + Unpin),
    name: &str,
) -> Result<Vec<u8>, RefusalReason> {
    let mut bytes = Vec::new();
    loop {
        match hello::read(&bytes)? {
            Some(named) if policy::normalize(&named) == policy::normalize(name) => {
                return Ok(bytes);
            }
            Some(_) => {
                return Err("the connection names another host than the one looked up".into());
            }
            None => {}
        }
        if inside.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            // A connection without any bytes is harmless; probes do that.
            return if bytes.is_empty() {
                Ok(bytes)
            } else {
                Err("the connection ended early".into())
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixed_addresses_are_refused_behind_proxy() {
        let config = GatewayConfig {
            private_hosts: crate::PrivateHosts::new(vec!["allowed.example".to_owned()]),
            ..GatewayConfig::default()
        };
        let refused = |name: &str, private: bool, known: &[&str]| {
            let known: Vec<_> =
                known.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 443)).collect();
            refuse_any_private(&known, |ip| may_dial(&config, name, private, ip)).is_err()
        };
        let (public, private, metadata) = ("203.0.113.7", "10.0.0.1", "169.254.169.254");
        assert!(!refused("name.example", false, &[public, "2001:db8::1"]));
        assert!(refused("name.example", false, &[public, private]));
        assert!(refused("name.example", false, &[private]));
        assert!(!refused("name.example", true, &[public, private]), "a rule allows it");
        assert!(refused("name.example", true, &[public, private, metadata]));
        assert!(!refused("allowed.example", false, &[public, private]));
    }
}
