//! Splits URLs for comparison and for moving them to another base.

#[derive(Debug, PartialEq, Eq)]
pub(super) struct SplitUrl {
    pub(super) scheme: String,
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) path: String,
}

pub(super) fn split_url(url: &str) -> Option<SplitUrl> {
    let url: axum::http::Uri = url.parse().ok()?;
    let scheme = url.scheme_str()?.to_owned();
    let default_port = if scheme == "https" { 443 } else { 80 };
    Some(SplitUrl {
        host: url.host()?.trim_matches(['[', ']']).to_ascii_lowercase(),
        port: url.port_u16().unwrap_or(default_port),
        path: url.path().trim_end_matches('/').to_owned(),
        scheme,
    })
}

/// The part of `url` after `base`, if it lies below it.
pub(super) fn strip_base<'a>(url: &'a str, base: &str) -> Option<&'a str> {
    url.strip_prefix(base).filter(|rest| rest.starts_with('/'))
}

pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost"
        || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}
