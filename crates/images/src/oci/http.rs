//! HTTP requests with redirects that are checked: a login is sent to its own host only, and plain
//! http is used for this machine only.

use std::{sync::Arc, time::Duration};

use harvest_proto::redact;
use ureq::{
    Agent, Body, Proxy,
    http::{Response, Uri, header},
    tls::{RootCerts, TlsConfig},
};

use super::{PullError, PullOptions, reference::is_loopback};

// Registries redirect blobs once, rarely twice.
const MAX_REDIRECTS: usize = 5;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

// The deadline of a whole layer: one byte a minute would pass all other timeouts.
const BODY_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);

/// An HTTP client with the host's certificates and proxies.
pub(super) struct Client {
    agent: Agent,
    /// Without a proxy, for this machine.
    loopback: Agent,
}

/// Why a request failed.
pub(super) enum RequestError {
    /// The connection broke; another attempt may succeed.
    Interrupted(Box<dyn std::error::Error + Send + Sync>),
    /// The server answered with a temporary error.
    Busy { path: String, status: u16 },
    /// The answer is final.
    Refused(PullError),
}

impl From<PullError> for RequestError {
    fn from(error: PullError) -> Self {
        Self::Refused(error)
    }
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
                .timeout_resolve(Some(CONNECT_TIMEOUT))
                .timeout_connect(Some(CONNECT_TIMEOUT))
                .timeout_recv_response(Some(options.idle_timeout))
                .timeout_per_read(Some(options.idle_timeout))
                .timeout_per_write(Some(options.idle_timeout))
                .timeout_recv_body(Some(BODY_TIMEOUT));
            config.build().new_agent()
        };
        Self { agent: agent(Proxy::try_from_env()), loopback: agent(None) }
    }

    /// Sends a GET request and follows redirects. `authorization` is only sent to the first host.
    pub(super) fn get(
        &self,
        url: &str,
        accept: &str,
        authorization: Option<&str>,
    ) -> Result<Response<Body>, RequestError> {
        let first = origin(url).ok_or_else(|| refused(url, url))?;
        let mut current = url.to_owned();
        for _ in 0..=MAX_REDIRECTS {
            let (scheme, host) = origin(&current).ok_or_else(|| refused(url, &current))?;
            let loopback = is_loopback(host);
            if scheme == "http" && !loopback {
                return Err(refused(url, &current));
            }
            let agent = if loopback { &self.loopback } else { &self.agent };
            let mut request = agent.get(&current).header(header::ACCEPT, accept);
            if let Some(value) = authorization.filter(|_| (scheme, host) == first) {
                request = request.header(header::AUTHORIZATION, value);
            }
            let response = request.call().map_err(|error| classify(error, host))?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(response);
            }
            let location =
                response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = location.and_then(|location| resolve_location(&current, location));
            current = next.ok_or_else(|| refused(url, location.unwrap_or("no location")))?;
        }
        Err(refused(url, "too many redirects"))
    }
}

// Certificate errors are permanent.
fn classify(error: ureq::Error, host: &str) -> RequestError {
    let source = match error {
        ureq::Error::Io(error)
            if error.get_ref().is_some_and(|inner| inner.is::<rustls::Error>()) =>
        {
            error.into()
        }
        ureq::Error::Rustls(error) => error.into(),
        other => return RequestError::Interrupted(other.into()),
    };
    PullError::Certificate { host: host.to_owned(), source }.into()
}

fn refused(url: &str, to: &str) -> RequestError {
    let host = origin(url).map_or("the registry", |(_, host)| host).to_owned();
    // Secrets in a URL: a signature in the query, or a login before the host.
    let to = to.split('?').next().unwrap_or_default();
    let to = redact::redact(to).chars().take(200).collect();
    RequestError::Refused(PullError::Redirect { host, to })
}

/// Scheme and host of a URL.
pub(super) fn origin(url: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = url.split_once("://")?;
    let host = rest.split(['/', '?', '#']).next()?;
    let good = matches!(scheme, "http" | "https") && !host.is_empty() && !host.contains('@');
    good.then_some((scheme, host))
}

fn resolve_location(base: &str, location: &str) -> Option<String> {
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
    fn redirect_errors_contain_no_login() {
        for (url, to) in [
            ("https://r.test/v2/a", "http://user:hidden@s.test/x?signature=hidden"),
            (
                "https://user:hidden@s.test/token?x=hidden",
                "https://user:hidden@s.test/token?x=hidden",
            ),
        ] {
            let RequestError::Refused(error) = refused(url, to) else { panic!("not refused") };
            let error = error.to_string();
            assert!(!error.contains("hidden") && error.contains("s.test"), "{error}");
        }
    }

    #[test]
    fn location_is_a_path_or_a_url() {
        let base = "https://r.test:5000/v2/a";
        assert_eq!(resolve_location(base, "/x?y").as_deref(), Some("https://r.test:5000/x?y"));
        assert_eq!(resolve_location(base, "//s.test/x").as_deref(), Some("https://s.test/x"));
        assert_eq!(resolve_location(base, "http://s.test/x").as_deref(), Some("http://s.test/x"));
        assert_eq!(origin("https://user@r.test/x"), None);
        assert_eq!(origin("file:///etc/passwd"), None);
    }
}
