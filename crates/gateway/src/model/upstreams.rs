//! The upstreams as data: kind, URL and the secret with the key of each. Knows no request.

use std::{collections::BTreeMap, net::IpAddr};

use harvest_proto::{
    Secret, SecretOwner, UpstreamKind, UpstreamName,
    api::{KeySource, ModelService},
    upstreams::BUILT_IN_UPSTREAMS,
};
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use reqwest::Url;

use crate::{PrivateHosts, egress::address::is_public, ledger::Ledger};

pub(super) const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
pub(super) const X_GOOG_API_KEY: HeaderName = HeaderName::from_static("x-goog-api-key");
const BETA: HeaderName = HeaderName::from_static("anthropic-beta");
// The API accepts tokens of subscriptions only with this feature.
const OAUTH_BETA: &str = "oauth-2025-04-20";

/// A service for model calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstream {
    pub kind: UpstreamKind,
    /// Base URL, as the service's SDKs take it: with `/v1` for the kinds of OpenAI, without a
    /// version for Anthropic and Gemini. Empty for the scripted model.
    pub url: String,
    /// Name of the secret with the API key; none when the service needs none.
    pub secret: Option<String>,
    /// Name of the secret with a token of a subscription, for when there is no API key.
    pub oauth_secret: Option<String>,
}

/// All upstreams by name: the built-in ones and those of the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Upstreams(BTreeMap<UpstreamName, Upstream>);

/// Why an upstream cannot be used as configured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UpstreamError {
    #[error("`url` is `{0}`, which is not an http or https URL")]
    InvalidUrl(String),
    #[error("`url` is plain http to `{0}`, which is not known to be a private host")]
    PlainHttp(String),
}

impl Default for Upstreams {
    fn default() -> Self {
        let parsed = |name: &str| name.parse().expect("a built-in name is valid");
        Self(
            BUILT_IN_UPSTREAMS
                .iter()
                .map(|(name, kind)| (parsed(name), Upstream::built_in(*kind)))
                .collect(),
        )
    }
}

impl Upstreams {
    /// Adds an upstream, or replaces the one of that name.
    #[must_use]
    pub fn with(mut self, name: UpstreamName, upstream: Upstream) -> Self {
        self.0.insert(name, upstream);
        self
    }

    #[must_use]
    pub fn get(&self, name: &UpstreamName) -> Option<&Upstream> {
        self.0.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&UpstreamName, &Upstream)> {
        self.0.iter()
    }
}

impl Upstream {
    fn built_in(kind: UpstreamKind) -> Self {
        let (url, secret) = match kind {
            UpstreamKind::Anthropic => ("https://api.anthropic.com", Some("ANTHROPIC_API_KEY")),
            UpstreamKind::Openai | UpstreamKind::OpenaiChat => {
                ("https://api.openai.com/v1", Some("OPENAI_API_KEY"))
            }
            UpstreamKind::Gemini => {
                ("https://generativelanguage.googleapis.com", Some("GEMINI_API_KEY"))
            }
            UpstreamKind::Scripted => ("", None),
        };
        let secret = secret.map(str::to_owned);
        let oauth_secret = kind.subscription_secret().map(str::to_owned);
        Self { kind, url: url.to_owned(), secret, oauth_secret }
    }

    /// Names of the secrets that the server's environment may provide instead of the vault.
    pub fn secret_names(&self) -> impl Iterator<Item = &str> {
        [&self.secret, &self.oauth_secret].into_iter().flatten().map(String::as_str)
    }

    /// Checks the URL. Keys and prompts travel unencrypted only to this machine and to private
    /// hosts.
    ///
    /// # Errors
    /// When the URL is invalid, or plain http to a host that may be public.
    pub fn check_url(&self, private_hosts: &PrivateHosts) -> Result<(), UpstreamError> {
        check_service_url(&self.url, private_hosts)
    }

    /// The URL of a path that follows the version at the model door.
    pub(super) fn url_of(&self, target: &str) -> String {
        let base = self.url.trim_end_matches('/');
        let version = match self.kind {
            UpstreamKind::Anthropic => "/v1",
            UpstreamKind::Gemini => "/v1beta",
            _ => "",
        };
        format!("{base}{version}{target}")
    }

    /// The service as the API lists it.
    pub(crate) async fn service(
        &self,
        name: &UpstreamName,
        ledger: &dyn Ledger,
        owners: &[SecretOwner],
    ) -> ModelService {
        let mut key = match self.secret_names().next() {
            Some(_) => KeySource::Missing,
            None => KeySource::NotNeeded,
        };
        let mut secret = self.secret.clone();
        for candidate in self.secret_names() {
            let source = ledger.secret_source(owners, candidate).await;
            if source != KeySource::Missing {
                (key, secret) = (source, Some(candidate.to_owned()));
                break;
            }
        }
        ModelService { name: name.clone(), kind: self.kind, secret, key, agents: Vec::new() }
    }

    /// The credential to send. An API key takes precedence over a token of a subscription.
    pub(super) async fn credential(
        &self,
        ledger: &dyn Ledger,
        owners: &[SecretOwner],
    ) -> Result<Credential, MissingKey> {
        let Some(secret) = &self.secret else { return Ok(Credential::None) };
        if let Some(key) = ledger.secret(owners, secret).await {
            return Ok(match self.kind {
                UpstreamKind::Anthropic => Credential::ApiKey(key),
                UpstreamKind::Gemini => Credential::GoogleKey(key),
                _ => Credential::Bearer(key),
            });
        }
        if let Some(name) = &self.oauth_secret
            && let Some(token) = ledger.secret(owners, name).await
        {
            return Ok(Credential::OAuth(token));
        }
        Err(MissingKey(secret.clone()))
    }
}

/// Checks the URL of a service that gets a key.
pub fn check_service_url(text: &str, private_hosts: &PrivateHosts) -> Result<(), UpstreamError> {
    let invalid = || UpstreamError::InvalidUrl(text.to_owned());
    let url = Url::parse(text).map_err(|_| invalid())?;
    let host = url.host_str().ok_or_else(invalid)?.trim_matches(['[', ']']);
    let private = match host.parse::<IpAddr>() {
        Ok(address) => !is_public(address) || private_hosts.allows_address(address),
        Err(_) => host == "localhost" || private_hosts.allows_name(host),
    };
    match url.scheme() {
        "https" => Ok(()),
        "http" if private => Ok(()),
        "http" => Err(UpstreamError::PlainHttp(host.to_owned())),
        _ => Err(invalid()),
    }
}

/// Names the secret that is not stored.
#[derive(Debug)]
pub(super) struct MissingKey(pub(super) String);

/// What identifies this installation to an upstream.
#[derive(Debug)]
pub(super) enum Credential {
    None,
    /// Anthropic's `x-api-key`.
    ApiKey(Secret<String>),
    /// Google's `x-goog-api-key`.
    GoogleKey(Secret<String>),
    Bearer(Secret<String>),
    /// A bearer token of a subscription at Anthropic.
    OAuth(Secret<String>),
}

impl Credential {
    /// The secret, to be masked in responses.
    pub(super) fn secret(&self) -> Option<&Secret<String>> {
        match self {
            Self::None => None,
            Self::ApiKey(key) | Self::GoogleKey(key) => Some(key),
            Self::Bearer(key) | Self::OAuth(key) => Some(key),
        }
    }

    /// Adds the headers. Fails when the secret contains characters that no header can have.
    pub(super) fn add_to(&self, headers: &mut HeaderMap) -> Result<(), header::InvalidHeaderValue> {
        let Some(secret) = self.secret() else { return Ok(()) };
        let secret = secret.expose().trim();
        let (name, text) = match self {
            Self::ApiKey(_) => (X_API_KEY, secret.to_owned()),
            Self::GoogleKey(_) => (X_GOOG_API_KEY, secret.to_owned()),
            _ => (header::AUTHORIZATION, format!("Bearer {secret}")),
        };
        let mut value = HeaderValue::from_str(&text)?;
        value.set_sensitive(true);
        headers.insert(name, value);
        if matches!(self, Self::OAuth(_)) {
            headers.append(BETA, HeaderValue::from_static(OAUTH_BETA));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_http_is_only_for_private_hosts() {
        let check = |url: &str| {
            let upstream =
                Upstream { url: url.to_owned(), ..Upstream::built_in(UpstreamKind::Openai) };
            let known = PrivateHosts::new(vec!["gpu.corp.example".to_owned()]);
            upstream.check_url(&known).map_err(|error| error.to_string())
        };
        for good in [
            "https://models.example/v1",
            "http://localhost:11434/v1",
            "http://127.0.0.1:8000/v1",
            "http://[::1]:8000/v1",
            "http://10.0.0.5/v1",
            "http://192.168.1.2:8000/v1",
            "http://gpu.corp.example:8000/v1",
        ] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["http://models.example/v1", "http://8.8.8.8/v1"] {
            assert!(check(bad).unwrap_err().contains("plain http"), "{bad}");
        }
        for bad in ["", "models.example/v1", "ftp://10.0.0.5/", "unix:/run/x"] {
            assert!(check(bad).unwrap_err().contains("not an http"), "{bad}");
        }
    }

    #[test]
    fn subscription_token_keeps_betas_of_agent() {
        let mut headers = HeaderMap::new();
        headers.insert(BETA, HeaderValue::from_static("some-beta"));
        let token = Credential::OAuth(Secret::new(" tok \n".to_owned()));
        token.add_to(&mut headers).unwrap();
        assert_eq!(headers["authorization"], "Bearer tok");
        let betas: Vec<_> = headers.get_all(BETA).iter().collect();
        assert_eq!(betas, ["some-beta", OAUTH_BETA]);
    }
}
