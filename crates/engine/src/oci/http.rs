//! One request over HTTP, redirects followed by hand: a login goes to the host it is for and to no other,
//! and nothing but this machine is spoken to without TLS.

use std::{sync::Arc, time::Duration};

use harvest_proto::redact;
use ureq::{
    Agent, Body, Proxy,
    http::{Response, Uri, header},
    tls::{RootCerts, TlsConfig},
};

use super::{PullError, PullOptions, reference::is_loopback};

// Registries send blobs to one other place, seldom two.
const MAX_REDIRECTS: usize = 5;

const CONNECT: Duration = Duration::from_secs(15);

// A layer that takes longer is not coming; one byte a minute would pass every other clock.
const LONGEST_BODY: Duration = Duration::from_secs(2 * 60 * 60);

/// Speaks HTTP with the host's certificates and proxies.
pub(super) struct Client {
    agent: Agent,
    /// For this machine, which no proxy reaches.
    near: Agent,
}

/// How one request failed.
pub(super) enum Fault {
    /// Another attempt may do better.
    Broken(ureq::Error),
    Refused(PullError),
}

impl Client {
    pub(super) fn new(options: &PullOptions) -> Self {
        let agent = |proxy: Option<Proxy>| {
            let provider = Arc::new(rustls::crypto::ring::default_provider());
            let tls = TlsConfig::builder()
                .root_certs(RootCerts::PlatformVerifier)
                .unversioned_rustls_crypto_provider(provider)
                .build();
            let config = Agent::config_builder()
                .tls_config(tls)
                .proxy(proxy)
                .http_status_as_error(false)
                .max_redirects(0)
                .max_redirects_will_error(false)
                .user_agent(concat!("harvest/", env!("CARGO_PKG_VERSION")))
                .accept_encoding("identity")
                .timeout_resolve(Some(CONNECT))
                .timeout_connect(Some(CONNECT))
                .timeout_recv_response(Some(options.silence))
                .timeout_per_read(Some(options.silence))
                .timeout_per_write(Some(options.silence))
                .timeout_recv_body(Some(LONGEST_BODY));
            config.build().new_agent()
        };
        Self { agent: agent(Proxy::try_from_env()), near: agent(None) }
    }

    /// Asks for something. `authorization` goes no further than the first host.
    pub(super) fn get(
        &self,
        url: &str,
        accept: &str,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, Fault> {
        let first = origin(url).ok_or_else(|| refused(url, url))?;
        let mut at = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let here = origin(&at).ok_or_else(|| refused(url, &at))?;
            let near = is_loopback(here.1);
            if here.0 == "http" && !near {
                return Err(refused(url, &at));
            }
            let agent = if near { &self.near } else { &self.agent };
            let mut request = agent.get(&at).header(header::ACCEPT, accept);
            if let Some(value) = authorization.filter(|_| here == first) {
                request = request.header(header::AUTHORIZATION, value);
            }
            let response = request.call().map_err(|error| fault(error, here.1))?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location =
                response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| joined(&at, location));
            at = next.ok_or_else(|| refused(url, location.unwrap_or("nothing")))?;
        }
        Err(refused(url, "too many places in a row"))
    }
}

// What is wrong with a certificate stays wrong.
fn fault(error: ureq::Error, host: &str) -> Fault {
    match error {
        ureq::Error::Io(error)
            if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) =>
        {
            Fault::Refused(PullError::Certificate { host: host.to_owned(), source: error.into() })
        }
        ureq::Error::Rustls(error) => {
            Fault::Refused(PullError::Certificate { host: host.to_owned(), source: error.into() })
        }
        other => Fault::Broken(other),
    }
}

fn refused(url: &str, to: &str) -> Fault {
    let host = origin(url).map_or("the registry", |(_, host)| host).to_owned();
    // A query may carry a signature, which is a login; some URLs have one before their host.
    let to = to.split('?').next().unwrap_or_default();
    let to = redact::cover(to).chars().take(200).collect();
    Fault::Refused(PullError::Redirect { host, to })
}

/// Scheme and host of a URL.
pub(super) fn origin(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    let good = matches!(scheme, "http" | "https") && !host.is_empty() && !host.contains('@');
    good.then_some((scheme, host))
}

fn joined(base: &str, location: &str) -> Option<String> {
    let (scheme, host) = origin(base)?;
    let url = match location {
        _ if location.starts_with("//") => format!("{scheme}:{location}"),
        _ if location.starts_with('/') => format!("{scheme}://{host}{location}"),
        _ => location.to_owned(),
    };
    url.parse::<Uri>().ok().and(Some(url))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_registry_sends_us_is_told_without_any_login() {
        for (url, to) in [
            ("https://r.test/v2/a", "http://user:hidden@s.test/x?signature=hidden"),
            (
                "https://user:hidden@s.test/token?x=hidden",
                "https://user:hidden@s.test/token?x=hidden",
            ),
        ] {
            let Fault::Refused(error) = refused(url, to) else { panic!("not refused") };
            let error = error.to_string();
            assert!(!error.contains("hidden") && error.contains("s.test"), "{error}");
        }
    }

    #[test]
    fn a_location_is_a_path_or_a_whole_url() {
        let base = "https://r.test:5000/v2/a";
        assert_eq!(joined(base, "/x?y").as_deref(), Some("https://r.test:5000/x?y"));
        assert_eq!(joined(base, "//s.test/x").as_deref(), Some("https://s.test/x"));
        assert_eq!(joined(base, "http://s.test/x").as_deref(), Some("http://s.test/x"));
        assert_eq!(origin("https://user@r.test/x"), None);
        assert_eq!(origin("file:///etc/passwd"), None);
    }
}
