//! References to images in registries: `registry/name:tag`, `registry/name@sha256:…` or both. Pure.

use std::{fmt, ops::Range, str::FromStr};

use super::PullError;

/// A reference to an image in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Reference {
    /// `https` or `http`.
    pub(crate) scheme: &'static str,
    /// The registry, with its port.
    pub(crate) host: String,
    /// The repository in the registry.
    pub(crate) name: String,
    /// Used when there is no digest.
    pub(crate) tag: String,
    /// The digest of the manifest.
    pub(crate) digest: Option<Digest>,
}

/// A SHA-256 digest, as `sha256:` and 64 hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Digest(String);

impl Digest {
    /// The digest with its `sha256:` prefix.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self::from_hash(ring::digest::digest(&ring::digest::SHA256, bytes))
    }

    pub(crate) fn from_hash(hash: ring::digest::Digest) -> Self {
        Self(format!("sha256:{}", crate::stream::hex(hash.as_ref())))
    }

    /// The digits without the prefix.
    pub(crate) fn hex(&self) -> &str {
        &self.0[7..]
    }

    /// The first 12 digits, for messages.
    pub(crate) fn short(&self) -> &str {
        &self.hex()[..12]
    }
}

impl FromStr for Digest {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let hex = text.strip_prefix("sha256:").ok_or("only sha256 digests are supported")?;
        let plain = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let good = hex.len() == 64 && hex.bytes().all(plain);
        good.then(|| Self(text.to_owned())).ok_or("a sha256 digest has 64 digits of 0-9 and a-f")
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.0)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}:{}", self.host, self.name, self.tag)?;
        self.digest.as_ref().map_or(Ok(()), |digest| write!(out, "@{digest}"))
    }
}

impl Reference {
    /// The default name of the pulled image.
    pub(crate) fn short_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or_default()
    }

    /// The digest or tag to request.
    pub(crate) fn tag_or_digest(&self) -> &str {
        self.digest.as_ref().map_or(&self.tag, |digest| digest.as_str())
    }
}

impl FromStr for Reference {
    type Err = PullError;

    fn from_str(text: &str) -> Result<Self, PullError> {
        parse(text).map_err(|reason| PullError::Reference { text: shown(text), reason })
    }
}

/// A reference for messages: without a login, and of limited length.
pub(crate) fn shown(text: &str) -> String {
    let shown = match login(text) {
        Some(login) => format!("{}***{}", &text[..login.start], &text[login.end..]),
        None => text.to_owned(),
    };
    shown.chars().take(200).collect()
}

// The range of a login, as in `user:password@host`.
fn login(text: &str) -> Option<Range<usize>> {
    let start = text.find("://").map_or(0, |at| at + 3);
    let (host, _) = text[start..].split_once('/').unwrap_or((&text[start..], ""));
    let (login, host) = host.rsplit_once('@')?;
    // In a name without a registry, `@` precedes the digest.
    (!host.starts_with("sha256:")).then(|| start..start + login.len())
}

fn parse(text: &str) -> Result<Reference, &'static str> {
    let (scheme, rest) = match text.split_once("://") {
        Some(("https", rest)) => (Some("https"), rest),
        Some(("http", rest)) => (Some("http"), rest),
        Some(_) => return Err("only http and https are supported"),
        None => (None, text),
    };
    if login(text).is_some() {
        return Err("it contains a login; logins belong in `auths` of ~/.docker/config.json");
    }
    let (rest, digest) = match rest.split_once('@') {
        Some((rest, digest)) => (rest, Some(digest.parse::<Digest>()?)),
        None => (rest, None),
    };
    let no_host = "it must begin with a registry, as in `docker.io/library/debian:12` for Docker Hub's `debian:12`";
    let (host, path) = rest.split_once('/').ok_or(no_host)?;
    if !is_host(host) {
        return Err(no_host);
    }
    let (name, tag) = match path.rsplit_once(':') {
        Some((name, tag)) if !tag.contains('/') => (name, tag),
        _ => (path, "latest"),
    };
    let loopback = is_loopback(host);
    let scheme = scheme.unwrap_or(if loopback { "http" } else { "https" });
    if scheme == "http" && !loopback {
        return Err("plain http is only allowed for this machine");
    }
    if name.len() > 255 || !name.split('/').all(is_name) {
        return Err(
            "its name must consist of lower-case letters, digits, `.`, `-` and `_`, separated by `/`",
        );
    }
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'-');
    if tag.is_empty() || tag.len() > 128 || !tag.bytes().all(plain) || tag.starts_with(['.', '-']) {
        return Err("its tag must consist of letters, digits, `.`, `-` and `_`");
    }
    Ok(Reference {
        scheme,
        host: host.to_owned(),
        name: name.to_owned(),
        tag: tag.to_owned(),
        digest,
    })
}

// Without a dot or a port the first component is a repository of a default registry, as in
// `library/debian`.
fn is_host(host: &str) -> bool {
    let plain =
        |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b':' | b'[' | b']');
    host.bytes().all(plain) && (host == "localhost" || host.contains(['.', ':']))
}

fn is_name(part: &str) -> bool {
    let alphanumeric = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let plain = |byte: u8| alphanumeric(byte) || matches!(byte, b'.' | b'-' | b'_');
    part.bytes().all(plain)
        && part.bytes().next().is_some_and(alphanumeric)
        && part.bytes().last().is_some_and(alphanumeric)
}

/// Whether a host, with or without a port, is this machine.
pub(super) fn is_loopback(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None => host.split(':').next().unwrap_or_default(),
    };
    name == "localhost"
        || name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_parsed_in_all_forms() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (text, shown) in [
            ("r.test/debian", "r.test/debian:latest"),
            ("r.test:5000/a/b-c/d:12", "r.test:5000/a/b-c/d:12"),
            ("localhost/a", "localhost/a:latest"),
            ("https://r.test/a:1", "r.test/a:1"),
            (&format!("r.test/a@{digest}"), &format!("r.test/a:latest@{digest}")),
            (&format!("r.test/a:1@{digest}"), &format!("r.test/a:1@{digest}")),
        ] {
            assert_eq!(text.parse::<Reference>().unwrap().to_string(), shown);
        }
        let scheme = |text: &str| text.parse::<Reference>().unwrap().scheme;
        assert_eq!(
            [scheme("127.0.0.1:5000/a"), scheme("[::1]:5000/a"), scheme("r.test/a")],
            ["http", "http", "https"]
        );
    }

    #[test]
    fn invalid_references_are_refused() {
        for text in [
            "",
            "debian",
            "debian:12",
            "library/debian",
            "r.test/",
            "r.test/A",
            "r.test/a:",
            "r.test/../a",
            "r.test/a//b",
            "http://r.test/a",
            "ftp://r.test/a",
            "r.test/a@sha256:12",
            "r.test/a@md5:00",
            "r.test/a:b c",
            "user@r.test/a",
            "127.0.0.1.evil.test/a b",
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text}");
        }
        // A host name that only begins like a loopback address is remote.
        assert_eq!("127.0.0.1.test/a".parse::<Reference>().unwrap().scheme, "https");
        let unnamed = format!("debian@sha256:{}", "0a".repeat(32));
        let error = unnamed.parse::<Reference>().unwrap_err().to_string();
        assert!(
            error.contains("`debian@sha256") && error.contains("begin with a registry"),
            "{error}"
        );
    }

    #[test]
    fn login_in_reference_is_refused_and_masked() {
        for text in [
            "https://user:hid@den@r.test/a",
            "https://user:hidden@r.test/a@sha256:12",
            "user:hidden@r.test/a",
            "u:hidden@r.test",
        ] {
            let error = text.parse::<Reference>().unwrap_err().to_string();
            assert!(!error.contains("den") && error.contains("~/.docker/config.json"), "{error}");
        }
    }
}
