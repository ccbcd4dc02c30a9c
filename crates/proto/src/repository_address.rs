//! Addresses of repositories as people write them: `OWNER/NAME`, `git@HOST:OWNER/NAME`,
//! `ssh://git@HOST/OWNER/NAME`. Harvest reaches all of them over HTTPS.

use crate::repository_name::{LOCAL_OWNER, RepositoryName};

/// The forms that [`https_url`] and an HTTPS URL cover, for error messages.
pub const ADDRESS_FORMS: &str =
    "OWNER/NAME at GitHub, https://HOST/PATH, git@HOST:OWNER/NAME or ssh://git@HOST/PATH";

/// The HTTPS URL that a short or an SSH address means; `None` for any other text, URLs included.
/// Names are at the GitHub with this base URL: only the server knows which one that is.
#[must_use]
pub fn https_url(address: &str, github: &str) -> Option<String> {
    of_ssh(address).or_else(|| of_name(&address.parse().ok()?, github))
}

/// Whether a text is an `OWNER/NAME` that [`https_url`] takes.
#[must_use]
pub fn is_short(address: &str) -> bool {
    address.parse().is_ok_and(|name: RepositoryName| name.owner() != LOCAL_OWNER)
}

/// The HTTPS URL of an SSH address.
#[must_use]
pub fn of_ssh(address: &str) -> Option<String> {
    let (host, path) = match address.strip_prefix("ssh://") {
        Some(rest) => {
            let (host, path) = rest.split_once('/')?;
            let host = host.strip_prefix("git@").unwrap_or(host);
            // The port of SSH is not that of HTTPS.
            let host = match host.rsplit_once(':') {
                Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
                _ => host,
            };
            (host, path)
        }
        None => address.strip_prefix("git@")?.split_once(':')?,
    };
    let path = path.trim_start_matches('/');
    (is_host(host) && !path.is_empty()).then(|| format!("https://{host}/{path}"))
}

// Names of the local forge have no URL.
fn of_name(name: &RepositoryName, github: &str) -> Option<String> {
    let base = github.trim_end_matches('/');
    (name.owner() != LOCAL_OWNER).then(|| format!("{base}/{name}"))
}

fn is_host(text: &str) -> bool {
    !text.is_empty()
        && !text.starts_with(['-', '.'])
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.".contains(&byte))
}

/// Whether two URLs are of the same repository: a trailing `.git` or `/` makes no difference.
#[must_use]
pub fn is_same_url(one: &str, other: &str) -> bool {
    let plain = |url: &str| url.trim_end_matches('/').trim_end_matches(".git").to_owned();
    plain(one) == plain(other)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GITHUB: &str = "https://github.com";

    #[test]
    fn short_and_ssh_addresses_become_https() {
        for (address, url) in [
            ("acme/app", "https://github.com/acme/app"),
            ("git@github.com:acme/app.git", "https://github.com/acme/app.git"),
            ("git@git.corp.example:group/sub/app", "https://git.corp.example/group/sub/app"),
            ("git@host:/acme/app", "https://host/acme/app"),
            ("ssh://git@host/acme/app.git", "https://host/acme/app.git"),
            ("ssh://git@host:2222/acme/app", "https://host/acme/app"),
            ("ssh://host/acme/app", "https://host/acme/app"),
        ] {
            assert_eq!(https_url(address, GITHUB).as_deref(), Some(url), "{address}");
        }
    }

    #[test]
    fn names_are_at_the_configured_github() {
        for base in ["https://git.corp.example/ghe", "https://git.corp.example/ghe/"] {
            let url = https_url("acme/app", base);
            assert_eq!(url.as_deref(), Some("https://git.corp.example/ghe/acme/app"));
        }
        assert!(is_short("acme/app") && !is_short("local/app") && !is_short("git@h:a/b"));
    }

    #[test]
    fn other_text_is_no_address() {
        for other in [
            "",
            "app",
            "local/app",
            "a/b/c",
            "https://host/acme/app",
            "file:///etc",
            "host:acme/app",
            "ada@host:acme/app",
            "ssh://ada@host/app",
            "ssh://git:secret@host/app",
            "git@:acme/app",
            "git@host:",
            "git@-oProxyCommand=x:acme/app",
            "git@ho st:acme/app",
            "ssh://git@host",
        ] {
            assert_eq!(https_url(other, GITHUB), None, "{other}");
        }
    }

    #[test]
    fn suffix_makes_no_other_url() {
        assert!(is_same_url("http://h/a.git", "http://h/a/"));
        assert!(!is_same_url("http://h/a", "http://h/b"));
    }

    proptest! {
        #[test]
        fn rewritten_address_has_no_user(text in "(git@|ssh://(git@)?|)[a-z@:/.-]{1,20}") {
            if let Some(url) = https_url(&text, GITHUB) {
                prop_assert!(url.starts_with("https://"));
                let host = url["https://".len()..].split('/').next().unwrap();
                prop_assert!(!host.is_empty() && !host.contains(['@', ':']));
            }
        }
    }
}
