//! Which GitHub, and how Harvest signs in to it.

use std::{fmt, sync::Arc};

use harvest_proto::Secret;
use reqwest::Url;
use ring::{rand::SystemRandom, rsa::KeyPair, signature::RSA_PKCS1_SHA256};

use crate::pem::{InvalidKey, private_key};

/// The settings of one GitHub.
#[derive(Debug)]
pub struct GitHubSettings {
    /// The base URL of its pages: `https://github.com` or an Enterprise server.
    pub url: String,
    /// The base URL of its REST API; found from `url` when absent.
    pub api: Option<String>,
    /// A certificate (PEM) to trust besides those of the host.
    pub certificate: Option<Vec<u8>>,
    pub sign_in: SignIn,
    /// The secret that signs its webhooks; without one they are not accepted.
    pub webhook_secret: Option<Secret<String>>,
}

impl GitHubSettings {
    /// No sign-in, and no webhooks.
    #[must_use]
    pub fn new(url: &str) -> Self {
        let (api, certificate, webhook_secret) = (None, None, None);
        Self { url: url.to_owned(), api, certificate, sign_in: SignIn::None, webhook_secret }
    }
}

/// How Harvest signs in. Repositories and authors may have tokens of their own besides.
#[derive(Debug)]
pub enum SignIn {
    None,
    /// A token that stands for one account, for all repositories.
    Token(Secret<String>),
    App {
        id: u64,
        key: AppKey,
        /// Looked up for each repository when absent.
        installation: Option<u64>,
    },
}

/// The private key of a GitHub App.
#[derive(Clone)]
pub struct AppKey(Arc<KeyPair>);

impl AppKey {
    /// Reads a PEM file, PKCS#8 or PKCS#1. Line breaks may be written as `\n`, as in variables.
    ///
    /// # Errors
    /// When the text is not a private RSA key. The error does not quote it.
    pub fn parse(pem: &Secret<String>) -> Result<Self, InvalidKey> {
        let text = pem.expose().replace("\\n", "\n");
        private_key(&text).map(|key| Self(Arc::new(key)))
    }

    pub(super) fn sign(&self, text: &[u8]) -> Option<Vec<u8>> {
        let mut signature = vec![0; self.0.public().modulus_len()];
        self.0.sign(&RSA_PKCS1_SHA256, &SystemRandom::new(), text, &mut signature).ok()?;
        Some(signature)
    }
}

impl fmt::Debug for AppKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("***")
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{url}` is not the base URL of a GitHub: {why}")]
pub struct InvalidGitHubUrl {
    url: String,
    why: &'static str,
}

/// Owner and name of a repository, as in URLs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct RepositoryPath {
    pub(super) owner: String,
    pub(super) name: String,
}

impl fmt::Display for RepositoryPath {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}/{}", self.owner, self.name)
    }
}

/// The base of all pages and remotes.
#[derive(Debug, Clone)]
pub(super) struct Site {
    base: Url,
}

impl Site {
    pub(super) fn parse(url: &str) -> Result<Self, InvalidGitHubUrl> {
        let invalid = |why| InvalidGitHubUrl { url: url.to_owned(), why };
        let base: Url = url.trim_end_matches('/').parse().map_err(|_| invalid("it is no URL"))?;
        if !matches!(base.scheme(), "https" | "http") || base.host_str().is_none() {
            return Err(invalid("it must be an https URL"));
        }
        if !base.username().is_empty() || base.password().is_some() {
            // Without a quotation: it may be a token.
            let url = "that URL".to_owned();
            return Err(InvalidGitHubUrl { url, why: "it contains a user name or password" });
        }
        if base.query().is_some() || base.fragment().is_some() {
            return Err(invalid("it has a query or a fragment"));
        }
        Ok(Self { base })
    }

    pub(super) fn base(&self) -> &str {
        self.base.as_str()
    }

    /// The base URL of the REST API: GitHub.com and its tenants have a host for it.
    pub(super) fn api(&self) -> String {
        let host = self.base.host_str().unwrap_or_default();
        match host == "github.com" || host.ends_with(".ghe.com") {
            true => format!("{}://api.{host}", self.base.scheme()),
            false => format!("{}/api/v3", self.base.as_str().trim_end_matches('/')),
        }
    }

    /// The page of a pull request: as the server says, unless that is another host.
    pub(super) fn page(&self, path: &RepositoryPath, number: u64, said: &str) -> String {
        match said.parse::<Url>() {
            Ok(url) if self.is_same_origin(&url) => url.into(),
            _ => {
                let base = self.base.as_str().trim_end_matches('/');
                format!("{base}/{path}/pull/{number}")
            }
        }
    }

    fn is_same_origin(&self, url: &Url) -> bool {
        let origin = |url: &Url| {
            (
                url.scheme().to_owned(),
                url.host_str().map(str::to_owned),
                url.port_or_known_default(),
            )
        };
        let has_user = !url.username().is_empty() || url.password().is_some();
        origin(url) == origin(&self.base) && !has_user
    }

    /// The repository that a remote's URL names, if it lives here.
    pub(super) fn repository(&self, url: &str) -> Option<RepositoryPath> {
        let url: Url = url.parse().ok()?;
        if !self.is_same_origin(&url) {
            return None;
        }
        let base = self.base.path().trim_end_matches('/');
        let path = url.path().strip_prefix(base)?.strip_prefix('/')?.trim_end_matches('/');
        let (owner, name) = path.strip_suffix(".git").unwrap_or(path).split_once('/')?;
        // Both become segments of the API's paths.
        let plain = |part: &str| {
            let fits = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
            !part.is_empty() && part != "." && part != ".." && part.bytes().all(fits)
        };
        (plain(owner) && plain(name))
            .then(|| RepositoryPath { owner: owner.to_owned(), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn api_of_each_kind_of_github_is_found() {
        for (url, api) in [
            ("https://github.com", "https://api.github.com"),
            ("https://github.com/", "https://api.github.com"),
            ("https://acme.ghe.com", "https://api.acme.ghe.com"),
            ("https://git.corp.example", "https://git.corp.example/api/v3"),
            ("http://127.0.0.1:7070/forge/", "http://127.0.0.1:7070/forge/api/v3"),
        ] {
            assert_eq!(Site::parse(url).unwrap().api(), api, "{url}");
        }
    }

    #[test]
    fn unusable_base_urls_are_refused_without_password() {
        for url in ["github.com", "ssh://git@github.com", "https://x?y", "https://u:s3cret@h"] {
            let error = Site::parse(url).unwrap_err().to_string();
            assert!(!error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn only_plain_repositories_of_this_site_are_owned() {
        let site = Site::parse("https://git.corp.example/base").unwrap();
        let path = |url: &str| site.repository(url).map(|path| path.to_string());
        let shop = Some("acme/shop".to_owned());
        assert_eq!(path("https://git.corp.example/base/acme/shop.git"), shop);
        assert_eq!(path("https://GIT.corp.example:443/base/acme/shop/"), shop);
        for other in [
            "https://git.corp.example/acme/shop",
            "http://git.corp.example/base/acme/shop",
            "https://git.corp.example.evil.org/base/acme/shop",
            "https://git.corp.example:8443/base/acme/shop",
            "https://git.corp.example/base/acme/shop/pulls",
            "https://git.corp.example/base/acme/..",
            "https://git.corp.example/base/acme/%2e%2e",
            "https://git.corp.example/base/acme",
            "git@git.corp.example:acme/shop",
        ] {
            assert_eq!(path(other), None, "{other}");
        }
    }

    #[test]
    fn page_of_another_host_is_not_shown() {
        let site = Site::parse("https://git.corp.example/ghe").unwrap();
        let path = RepositoryPath { owner: "acme".into(), name: "shop".into() };
        let own = "https://git.corp.example/ghe/acme/shop/pull/7";
        assert_eq!(site.page(&path, 7, own), own);
        for other in [
            "https://git.corp.example.evil.org/ghe/acme/shop/pull/7",
            "https://git.corp.example@evil.org/7",
            "https://ada:s3cret@git.corp.example/7",
            "http://git.corp.example/ghe/acme/shop/pull/7",
            "javascript:alert(1)",
            "",
        ] {
            assert_eq!(site.page(&path, 7, other), own, "{other}");
        }
    }

    #[test]
    fn key_is_never_printed() {
        let error = AppKey::parse(&Secret::new("s3cret".to_owned())).unwrap_err();
        assert!(!format!("{error:?} {error}").contains("s3cret"));
    }
}
