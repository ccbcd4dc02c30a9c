//! The host's own proxies (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`) for connections
//! that are relayed. A relayed connection becomes a tunnel (CONNECT); plain HTTP on port 80 is sent
//! in absolute form, because many proxies allow no tunnel there. The proxy resolves names; its
//! credentials stay here.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use harvest_proto::Secret;
use hyper::header::HeaderValue;
use reqwest::Url;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use url::Host;

use super::RefusalReason;
use crate::policy;

// A proxy resolves the name and connects before it answers.
const TUNNEL_TIMEOUT: Duration = Duration::from_secs(30);
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// The proxies of the host, and the names that are reached without them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostProxies {
    http: Option<Proxy>,
    https: Option<Proxy>,
    direct: Vec<DirectName>,
    direct_networks: Vec<DirectNetwork>,
}

/// An entry of `NO_PROXY`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DirectName {
    /// A normalized name, which includes the names below it; empty for all.
    name: String,
    port: Option<u16>,
}

/// An address or a network in `NO_PROXY`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct DirectNetwork {
    base: IpAddr,
    bits: u32,
}

/// One proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Proxy {
    host: String,
    port: u16,
    /// `None` for `http`, the only kind that is supported here.
    unsupported: Option<String>,
    authorization: Option<Secret<String>>,
    /// With its credentials.
    url: Secret<String>,
}

impl HostProxies {
    /// Reads the variables of an environment; lower case wins, as with curl.
    pub fn from_variables(get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| {
            let value = get(name).or_else(|| get(&name.to_ascii_uppercase()))?;
            Some(value.trim().to_owned()).filter(|value| !value.is_empty())
        };
        let proxy = |name: &str| Proxy::parse(&get(name).or_else(|| get("all_proxy"))?);
        let direct = get("no_proxy").unwrap_or_default();
        Self {
            http: proxy("http_proxy"),
            https: proxy("https_proxy"),
            direct: direct.split([',', ' ']).filter_map(DirectName::parse).collect(),
            direct_networks: direct.split([',', ' ']).filter_map(DirectNetwork::parse).collect(),
        }
    }

    /// The proxy for a connection to a normalized name.
    pub(crate) fn of(&self, name: &str, port: u16) -> Option<&Proxy> {
        let proxy = if port == 80 { self.http.as_ref() } else { self.https.as_ref() };
        proxy.filter(|_| !self.is_direct(name, port))
    }

    /// The URL of the proxy for an HTTP request, with its credentials.
    pub(crate) fn of_url(&self, url: &Url) -> Option<String> {
        let port = url.port_or_known_default()?;
        let direct = match url.host()? {
            Host::Domain(name) => self.is_direct(&policy::normalize(name)?, port),
            Host::Ipv4(address) => self.is_direct_address(address.into(), port),
            Host::Ipv6(address) => self.is_direct_address(address.into(), port),
        };
        let proxy = if url.scheme() == "http" { &self.http } else { &self.https };
        proxy.as_ref().filter(|_| !direct).map(|proxy| proxy.url.expose().clone())
    }

    fn is_direct(&self, name: &str, port: u16) -> bool {
        self.direct.iter().any(|direct| direct.covers(name, port))
    }

    fn is_direct_address(&self, address: IpAddr, port: u16) -> bool {
        // No name is empty; an entry for all names covers it.
        self.is_direct("", port) || self.direct_networks.iter().any(|one| one.covers(address))
    }

    /// The normalized names of the proxies.
    pub(crate) fn names(&self) -> BTreeSet<String> {
        let proxies = self.http.iter().chain(&self.https);
        proxies.filter_map(|proxy| policy::normalize(&proxy.host)).collect()
    }
}

impl DirectName {
    fn parse(entry: &str) -> Option<Self> {
        let (name, port) = match entry.rsplit_once(':') {
            Some((name, port)) => (name, Some(port.parse().ok()?)),
            None => (entry, None),
        };
        if name == "*" {
            return Some(Self { name: String::new(), port });
        }
        let name = name.strip_prefix('*').unwrap_or(name);
        // Addresses are no names.
        policy::normalize(name.strip_prefix('.').unwrap_or(name)).map(|name| Self { name, port })
    }

    fn covers(&self, name: &str, port: u16) -> bool {
        let below = name.strip_suffix(&self.name).is_some_and(|rest| rest.ends_with('.'));
        (self.name.is_empty() || name == self.name || below)
            && self.port.is_none_or(|only| only == port)
    }
}

impl DirectNetwork {
    fn parse(entry: &str) -> Option<Self> {
        let (base, bits) = entry.split_once('/').unwrap_or((entry, ""));
        let base: IpAddr = base.parse().ok()?;
        let longest = if base.is_ipv4() { 32 } else { 128 };
        let bits = if bits.is_empty() { longest } else { bits.parse().ok()? };
        (bits <= longest).then_some(Self { base, bits })
    }

    fn covers(&self, address: IpAddr) -> bool {
        let (difference, length) = match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(other)) => {
                (u128::from(base.to_bits() ^ other.to_bits()), 32)
            }
            (IpAddr::V6(base), IpAddr::V6(other)) => (base.to_bits() ^ other.to_bits(), 128),
            _ => return false,
        };
        difference.checked_shr(length - self.bits).unwrap_or(0) == 0
    }
}

impl Proxy {
    fn parse(text: &str) -> Option<Self> {
        let with_scheme =
            if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
        let url = Url::parse(&with_scheme).ok()?;
        let host = url.host_str()?.trim_matches(['[', ']']).to_owned();
        let authorization = (!url.username().is_empty()).then(|| {
            let mut login = percent_decoded(url.username());
            login.push(b':');
            login.extend(percent_decoded(url.password().unwrap_or_default()));
            Secret::new(format!("Basic {}", BASE64_STANDARD.encode(login)))
        });
        let port = url.port_or_known_default()?;
        let unsupported = (url.scheme() != "http").then(|| url.scheme().to_owned());
        let url = Secret::new(with_scheme);
        Some(Self { host, port, unsupported, authorization, url })
    }

    /// The value of `Proxy-Authorization`.
    pub(crate) fn authorization(&self) -> Option<HeaderValue> {
        let mut value = HeaderValue::from_str(self.authorization.as_ref()?.expose()).ok()?;
        value.set_sensitive(true);
        Some(value)
    }

    /// Connects to the proxy.
    pub(crate) async fn dial(&self) -> Result<TcpStream, RefusalReason> {
        if let Some(scheme) = &self.unsupported {
            let reason =
                format!("the host's proxy uses `{scheme}`; only `http` proxies are supported");
            return Err(reason.into());
        }
        let connected =
            timeout(super::CONNECT_TIMEOUT, TcpStream::connect((&*self.host, self.port)));
        match connected.await {
            Ok(Ok(stream)) => {
                let _ = stream.set_nodelay(true);
                Ok(stream)
            }
            _ => Err("cannot connect to the host's proxy".into()),
        }
    }

    /// Opens a tunnel to a name.
    pub(crate) async fn tunnel(&self, name: &str, port: u16) -> Result<TcpStream, RefusalReason> {
        let mut stream = self.dial().await?;
        let authorization = self.authorization.as_ref().map_or_else(String::new, |value| {
            format!("Proxy-Authorization: {}\r\n", value.expose())
        });
        let request =
            format!("CONNECT {name}:{port} HTTP/1.1\r\nHost: {name}:{port}\r\n{authorization}\r\n");
        let asked = async {
            stream.write_all(request.as_bytes()).await?;
            read_head(&mut stream).await
        };
        let head = match timeout(TUNNEL_TIMEOUT, asked).await {
            Ok(Ok(head)) => head,
            Ok(Err(_)) => return Err("the host's proxy closed the connection".into()),
            Err(_) => return Err("the host's proxy did not answer".into()),
        };
        match status(&head) {
            Some(200..=299) => Ok(stream),
            Some(407) => Err("the host's proxy asks for other credentials".into()),
            Some(status) => {
                Err(format!("the host's proxy refused the connection ({status})").into())
            }
            None => Err("the host's proxy gave no HTTP response".into()),
        }
    }
}

fn percent_decoded(text: &str) -> Vec<u8> {
    let mut parts = text.split('%');
    let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
    for part in parts {
        match part.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                bytes.extend(&part.as_bytes()[2..]);
            }
            None => bytes.extend([b"%", part.as_bytes()].concat()),
        }
    }
    bytes
}

/// Reads a response's head and no byte more: those after it belong to the tunnel.
async fn read_head(stream: &mut TcpStream) -> std::io::Result<Vec<u8>> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        if head.len() >= MAX_HEAD_BYTES {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        head.push(stream.read_u8().await?);
    }
    Ok(head)
}

fn status(head: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(head.split(|byte| *byte == b'\r').next()?).ok()?;
    let (version, rest) = line.split_once(' ')?;
    version.starts_with("HTTP/1.").then(|| rest.get(..3)?.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> HostProxies {
        let get = |wanted: &str| {
            let found = variables.iter().find(|(name, _)| *name == wanted);
            found.map(|(_, value)| (*value).to_owned())
        };
        HostProxies::from_variables(get)
    }

    fn host(proxies: &HostProxies, name: &str, port: u16) -> Option<String> {
        proxies.of(name, port).map(|proxy| format!("{}:{}", proxy.host, proxy.port))
    }

    #[test]
    fn variables_choose_the_proxy_of_a_name() {
        let proxies = proxies(&[
            ("HTTPS_PROXY", "http://secure.corp:3128/"),
            ("https_proxy", "lower.corp:3128"),
            ("HTTP_PROXY", "http://plain.corp"),
            ("NO_PROXY", "10.0.0.0/8, .internal.corp,exact.corp:8443 *.wild.corp"),
        ]);
        assert_eq!(host(&proxies, "example.org", 443).as_deref(), Some("lower.corp:3128"));
        assert_eq!(host(&proxies, "example.org", 80).as_deref(), Some("plain.corp:80"));
        for (name, port) in [
            ("internal.corp", 443),
            ("a.internal.corp", 80),
            ("exact.corp", 8443),
            ("a.exact.corp", 8443),
            ("a.wild.corp", 443),
        ] {
            assert_eq!(host(&proxies, name, port), None, "{name}");
        }
        assert!(host(&proxies, "exact.corp", 443).is_some());
        assert!(host(&proxies, "notinternal.corp", 443).is_some());
        assert_eq!(proxies.names(), ["lower.corp", "plain.corp"].map(str::to_owned).into());
    }

    #[test]
    fn requests_choose_the_proxy_by_scheme() {
        let proxies = proxies(&[
            ("http_proxy", "http://user:pw@plain.corp:3128"),
            ("no_proxy", "10.0.0.0/8,fd00::/8,203.0.113.7 .internal.corp"),
        ]);
        let of = |url: &str| proxies.of_url(&Url::parse(url).unwrap());
        for url in ["http://a.org/x.git", "http://a.org:8080/x.git", "http://203.0.113.8/x.git"] {
            assert_eq!(of(url).as_deref(), Some("http://user:pw@plain.corp:3128"), "{url}");
        }
        for url in [
            "https://a.org/x.git",
            "http://a.internal.corp/x.git",
            "http://10.9.8.7/x.git",
            "http://203.0.113.7:3000/x.git",
            "http://[fd12::1]/x.git",
        ] {
            assert_eq!(of(url), None, "{url}");
        }
        assert!(!format!("{proxies:?}").contains("pw@"));
    }

    #[test]
    fn every_name_can_be_direct() {
        let proxies = proxies(&[("ALL_PROXY", "http://proxy.corp:1"), ("NO_PROXY", "*")]);
        assert_eq!(host(&proxies, "example.org", 443), None);
        assert_eq!(proxies.of_url(&Url::parse("http://203.0.113.7/").unwrap()), None);
        assert!(host(&HostProxies::default(), "example.org", 443).is_none());
    }

    #[test]
    fn credentials_are_decoded_and_never_printed() {
        let proxy = Proxy::parse("http://us%65r:p%40ss%@proxy.corp:3128").unwrap();
        let value = proxy.authorization().unwrap();
        let expected = format!("Basic {}", BASE64_STANDARD.encode("user:p@ss%"));
        assert_eq!(value.to_str().unwrap(), expected);
        assert!(!format!("{proxy:?}").contains(&expected));
        assert_eq!(Proxy::parse("http://proxy.corp").unwrap().authorization(), None);
    }

    #[test]
    fn status_of_response_is_read() {
        assert_eq!(status(b"HTTP/1.1 200 Connection established\r\n\r\n"), Some(200));
        assert_eq!(status(b"HTTP/1.0 407 Auth\r\nX: y\r\n\r\n"), Some(407));
        for other in [&b"SSH-2.0-x\r\n\r\n"[..], b"HTTP/1.1 2\r\n\r\n", b"", b"\xff \r\n"] {
            assert_eq!(status(other), None);
        }
    }
}
