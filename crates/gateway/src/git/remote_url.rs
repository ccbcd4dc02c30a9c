//! URLs of git remotes: parsed, normalized and judged before anything is registered or dialled. The
//! gateway dials from this machine's position in the network, so a remote is at a public address
//! unless the setting `private_hosts` names its host. What a name resolves to is judged when it is
//! dialled (`egress::resolve`).

use reqwest::Url;
use url::Host;

use crate::{PrivateHosts, egress::address, policy};

/// Why a URL cannot be the remote of a repository.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RemoteUrlError {
    #[error("{0}")]
    Invalid(&'static str),
    #[error(
        "a repository cannot be at the private address `{host}`; an admin allows it with \
         `private_hosts = [\"{host}\"]` in harvest.toml"
    )]
    Private { host: String },
}

/// The normal form of a remote's URL.
///
/// # Errors
/// When the URL is not a plain http or https URL, or its host is private.
pub fn normalize_remote_url(
    text: &str,
    private_hosts: &PrivateHosts,
) -> Result<String, RemoteUrlError> {
    let url = parse(text)?;
    check_host(&url, private_hosts)?;
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

pub(crate) fn parse(text: &str) -> Result<Url, RemoteUrlError> {
    let invalid = RemoteUrlError::Invalid;
    // The parser would drop tabs and line ends, and read a backslash as a slash.
    if text.chars().any(|letter| letter.is_whitespace() || letter.is_control()) {
        return Err(invalid("invalid repository URL"));
    }
    // Git remotes need none of these, tokens could hide in them, and URLs are stored in plain text.
    if text.contains(['?', '#', '\\']) {
        return Err(invalid("a repository URL cannot contain `?`, `#` or a backslash"));
    }
    let url = Url::parse(text).map_err(|_| invalid("invalid repository URL"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(invalid("a repository URL must start with http:// or https://"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(invalid(
            "a repository URL cannot contain credentials: store a secret and name it instead",
        ));
    }
    Ok(url)
}

pub(crate) fn check_host(url: &Url, private_hosts: &PrivateHosts) -> Result<(), RemoteUrlError> {
    let allowed = match url.host() {
        None => return Err(RemoteUrlError::Invalid("invalid repository URL")),
        Some(Host::Ipv4(ip)) => is_allowed(ip.into(), private_hosts),
        Some(Host::Ipv6(ip)) => is_allowed(ip.into(), private_hosts),
        Some(Host::Domain(name)) => private_hosts.allows_name(name) || is_public_name(name),
    };
    let host = url.host_str().unwrap_or_default().to_owned();
    if allowed { Ok(()) } else { Err(RemoteUrlError::Private { host }) }
}

fn is_allowed(ip: std::net::IpAddr, private_hosts: &PrivateHosts) -> bool {
    address::is_public(ip) || private_hosts.allows_address(ip)
}

// RFC 6761: `localhost` and the names below it are this machine, whatever a resolver says.
fn is_public_name(name: &str) -> bool {
    let Some(name) = policy::normalize(name) else { return false };
    !(name == "localhost" || name.ends_with(".localhost") || policy::is_own_name(&name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn judge(url: &str) -> Result<String, RemoteUrlError> {
        normalize_remote_url(url, &PrivateHosts::default())
    }

    #[test]
    fn url_with_credentials_is_refused() {
        for url in [
            "https://user:token@example.org/a.git",
            "https://token@example.org/a.git",
            "https://example.org/a.git?access_token=secret",
            "https://example.org/a.git#secret",
            "file:///etc",
            "https://example.org/a b",
            "https://exam\tple.org/a",
            "https:///a b",
            "ssh://example.org/a",
            "nonsense",
        ] {
            assert!(matches!(judge(url), Err(RemoteUrlError::Invalid(_))), "{url}");
        }
    }

    #[test]
    fn public_url_is_normalized() {
        for (url, normal) in [
            ("https://github.com/a/b", "https://github.com/a/b"),
            ("HTTPS://GitHub.com:443/a/b/", "https://github.com/a/b"),
            ("https://b\u{fc}cher.example/a", "https://xn--bcher-kva.example/a"),
            ("http://gitlab/a.git", "http://gitlab/a.git"),
            ("https://git.example.org:8443/a", "https://git.example.org:8443/a"),
            ("https://1.1.1.1/a", "https://1.1.1.1/a"),
        ] {
            assert_eq!(judge(url).as_deref(), Ok(normal), "{url}");
        }
    }

    #[test]
    fn every_spelling_of_this_machine_is_refused() {
        for host in [
            "127.0.0.1",
            "127.1",
            "2130706433",
            "0x7f000001",
            "0177.0.0.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "[fd00::a]:80",
            "localhost",
            "LOCALHOST.:80",
            "x.localhost",
            "loc%61lhost",
            "lo\u{ad}calhost",
            "\u{ff4c}\u{ff4f}\u{ff43}\u{ff41}\u{ff4c}\u{ff48}\u{ff4f}\u{ff53}\u{ff54}",
            "\u{ff11}\u{ff12}\u{ff17}.0.0.1",
            "127\u{3002}0\u{3002}0\u{3002}1",
            "%31%32%37.0.0.1",
            "169.254.169.254",
            "10.0.0.1",
            "0.0.0.0",
            "git.harvest.internal",
        ] {
            for url in [format!("http://{host}/a"), format!("https://{host}/a")] {
                assert!(matches!(judge(&url), Err(RemoteUrlError::Private { .. })), "{url}");
            }
        }
    }

    #[test]
    fn setting_allows_private_hosts_it_names() {
        let hosts = ["10.0.0.5", "*.corp.example", "localhost"].map(str::to_owned).to_vec();
        let hosts = PrivateHosts::new(hosts);
        for (url, allowed) in [
            ("http://10.0.0.5/a", true),
            ("http://10.0.0.6/a", false),
            ("http://LOCALHOST:3000/a", true),
            ("http://127.0.0.1:3000/a", false),
            ("https://git.corp.example/a", true),
        ] {
            assert_eq!(normalize_remote_url(url, &hosts).is_ok(), allowed, "{url}");
        }
    }

    proptest! {
        #[test]
        fn accepted_url_is_stable_and_not_private(host in "\\PC{1,30}", path in "[a-z/.]{0,10}") {
            if let Ok(normal) = judge(&format!("http://{host}/{path}")) {
                prop_assert_eq!(judge(&normal), Ok(normal.clone()));
                let url = Url::parse(&normal).unwrap();
                let name = url.host_str().unwrap();
                prop_assert!(!name.contains("localhost.") && name != "localhost");
                let literal = name.trim_matches(['[', ']']).parse();
                prop_assert!(literal.map_or(true, address::is_public));
            }
        }

        #[test]
        fn escaped_and_mixed_case_loopback_is_refused(
            escape in prop::collection::vec(any::<bool>(), 9),
            upper in prop::collection::vec(any::<bool>(), 9),
        ) {
            let letters = "localhost".chars().zip(escape).zip(upper).map(|((letter, escape), upper)| {
                let letter = if upper { letter.to_ascii_uppercase() } else { letter };
                if escape { format!("%{:02X}", letter as u32) } else { letter.to_string() }
            });
            let host: String = letters.collect();
            let refused = matches!(judge(&format!("http://{host}/a")), Err(RemoteUrlError::Private { .. }));
            prop_assert!(refused, "{}", host);
        }
    }
}
