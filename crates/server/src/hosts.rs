//! Where a request was sent, and which page sent it.
//!
//! The host check is against DNS rebinding: a page in somebody's browser can make its own name point
//! at 127.0.0.1, but it cannot make the browser send another name than its own. The origin check is
//! against pages that ask openly: only our own, and those of configured names, may.

use std::net::IpAddr;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, StatusCode, header},
    middleware::Next,
    response::{IntoResponse, Response},
};

use crate::{ServerState, problem::ApiError};

/// Lets only requests pass that were sent to a name of this machine, and not by another site's page.
pub(crate) async fn require_host(
    State(state): State<ServerState>,
    request: Request,
    next: Next,
) -> Response {
    match check(&state.hosts, request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check(hosts: &Hosts, headers: &HeaderMap) -> Result<(), ApiError> {
    let host = text(headers, header::HOST).unwrap_or("");
    if !hosts.allow(host) {
        let detail = format!("`{host}` is not a name of this server");
        return Err(ApiError::new(StatusCode::MISDIRECTED_REQUEST, "host_not_allowed", detail)
            .hint("use 127.0.0.1 or localhost, or start the server with `--host NAME`"));
    }
    let Some(origin) = headers.get(header::ORIGIN) else { return Ok(()) };
    let origin = origin.to_str().unwrap_or("");
    if hosts.is_ours(origin, host) {
        return Ok(());
    }
    let detail = format!("a page of `{origin}` may not use this server");
    Err(ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", detail)
        .hint("if the page is yours, start the server with `--host NAME` of its site"))
}

fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// The names this server answers to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hosts(Vec<String>);

impl Hosts {
    pub(crate) fn new(names: &[String]) -> Self {
        Self(names.iter().map(|name| name.to_ascii_lowercase()).collect())
    }

    /// Addresses always pass: rebinding works with names only.
    fn allow(&self, host: &str) -> bool {
        let name = without_port(host).to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']');
        name == "localhost"
            || name.ends_with(".localhost")
            || address.parse::<IpAddr>().is_ok()
            || self.0.contains(&name)
    }

    /// The page came from where the request goes to, or from a site of a configured name. An address is
    /// no proof here: any page can be at one.
    fn is_ours(&self, origin: &str, host: &str) -> bool {
        let Some((scheme, site)) = origin.split_once("://") else { return false };
        let (site, host) = (site.to_ascii_lowercase(), host.to_ascii_lowercase());
        ["http", "https"].contains(&scheme)
            && (site == host || self.0.iter().any(|name| name == without_port(&site)))
    }
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        // The colons of a bare `[::1]` are not a port's.
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
    fn only_addresses_loopback_names_and_configured_names_pass() {
        let hosts = Hosts::new(&["Agents.Example.org".into()]);
        for good in [
            "localhost:7070",
            "127.0.0.1",
            "[::1]:80",
            "[::1]",
            "10.0.0.5:7070",
            "agents.example.org:443",
        ] {
            assert!(hosts.allow(good), "{good}");
        }
        for bad in
            ["", "evil.example", "127.0.0.1.evil.example", "localhost.evil.example:7070", ":7070"]
        {
            assert!(!hosts.allow(bad), "{bad}");
        }
    }

    #[test]
    fn a_page_may_ask_where_it_came_from_and_for_a_configured_name() {
        let hosts = Hosts::new(&["agents.example.org".into()]);
        let ours = |origin| hosts.is_ours(origin, "127.0.0.1:7070");
        assert!(
            ours("http://127.0.0.1:7070")
                && ours("https://Agents.example.org")
                && ours("https://agents.example.org:8443")
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
            assert!(!ours(bad), "{bad}");
        }
    }
}
