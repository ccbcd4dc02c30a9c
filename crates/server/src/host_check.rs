//! Checks the `Host` and `Origin` headers.
//!
//! The host check prevents DNS rebinding: a web page can point its own name at 127.0.0.1, but its
//! browser still sends that name as `Host`. The origin check prevents cross-origin requests: only
//! pages of this server and of configured names are allowed.

use std::net::IpAddr;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::Next,
    response::Response,
};

use crate::{ServerState, problem::ApiError};

/// Rejects requests to unknown host names and from pages of other origins.
pub(crate) async fn require_host(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    check(&state.hosts, request.headers())?;
    Ok(next.run(request).await)
}

/// Whether a request names this server, and comes from a page that may use it.
pub(crate) fn check(hosts: &AllowedHosts, headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| headers.get(name).map(|value| value.to_str().unwrap_or(""));
    let host = text(header::HOST).unwrap_or("");
    if !hosts.allow_host(host) {
        let detail = format!("`{host}` is not a name of this server");
        return Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, "host_not_allowed", detail)
            .hint("use 127.0.0.1 or localhost, or start the server with `--host NAME`"));
    }
    let Some(origin) = text(header::ORIGIN) else { return Ok(()) };
    if hosts.allow_origin(origin, host) {
        return Ok(());
    }
    let detail = format!("pages of `{origin}` may not use this server");
    Err(ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", detail)
        .hint("to allow the page's site, start the server with `--host NAME`"))
}

/// The configured names of this server.
#[derive(Debug, Clone, Default)]
pub(crate) struct AllowedHosts(Vec<String>);

impl AllowedHosts {
    pub(crate) fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// IP addresses are always allowed: rebinding needs a name.
    fn allow_host(&self, host: &str) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost"
            || name.ends_with(".localhost")
            || address.parse::<IpAddr>().is_ok()
            || self.0.contains(&name)
    }

    /// Allows the request's own origin and configured names. IP addresses are not allowed in
    /// general, because any page can be served from one.
    fn allow_origin(&self, origin: &str, host: &str) -> bool {
        let Some((scheme, site)) = origin.split_once("://") else { return false };
        let (site, host) = (site.to_ascii_lowercase(), host.to_ascii_lowercase());
        ["http", "https"].contains(&scheme)
            && (site == host || self.0.iter().any(|name| name == without_port(&site)))
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // Not a port: the last part of a bare `[::1]`.
        Some((name, port))
            if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.is_empty() =>
        {
            name
        }
        _ => host,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_addresses_loopback_and_configured_names_are_allowed() {
        let hosts = AllowedHosts::new(&["Agents.Example.org".into()]);
        for good in [
            "localhost:7070",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "10.0.0.5:7070",
            "agents.example.org:443",
        ] {
            assert!(hosts.allow_host(good), "{good}");
        }
        for bad in
            ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7070", ":7070"]
        {
            assert!(!hosts.allow_host(bad), "{bad}");
        }
    }

    #[test]
    fn only_own_and_configured_origins_are_allowed() {
        let hosts = AllowedHosts::new(&["agents.example.org".into()]);
        let allowed = |origin| hosts.allow_origin(origin, "127.0.0.1:7070");
        assert!(
            allowed("http://127.0.0.1:7070")
                && allowed("https://Agents.example.org")
                && allowed("https://agents.example.org:8443")
        );
        for bad in [
            "null",
            "",
            "http://evil.example",
            "http://203.0.113.9",
            "http://127.0.0.1:3000",
            "http://localhost:7070",
            "https://agents.example.org.evil.example",
            "file://127.0.0.1:7070",
        ] {
            assert!(!allowed(bad), "{bad}");
        }
    }
}
