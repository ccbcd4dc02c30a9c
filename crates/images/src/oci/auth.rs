//! Registry authentication: challenges of registries, and logins from the user's Docker
//! configuration. Runs no credential helper.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use harvest_proto::Secret;
use serde::Deserialize;

/// A user name and password, joined by `:`.
#[derive(Debug, Clone)]
pub(super) struct Login(Secret<String>);

impl Login {
    /// The value of the `Authorization` header.
    pub(super) fn header(&self) -> String {
        format!("Basic {}", BASE64_STANDARD.encode(self.0.expose()))
    }
}

/// The authentication that a registry requires.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Challenge {
    Basic,
    Bearer { realm: String, service: Option<String>, scope: Option<String> },
}

impl Challenge {
    /// Parses a `WWW-Authenticate` header.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let (scheme, rest) = header.trim().split_once(' ').unwrap_or((header.trim(), ""));
        match scheme.to_ascii_lowercase().as_str() {
            "basic" => Some(Self::Basic),
            "bearer" => {
                let mut fields = parameters(rest);
                let (service, scope) = (fields.remove("service"), fields.remove("scope"));
                Some(Self::Bearer { realm: fields.remove("realm")?, service, scope })
            }
            _ => None,
        }
    }
}

// `key="value, with commas",key=token`
fn parameters(mut text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    while let Some((key, rest)) = text.split_once('=') {
        let key = key.trim_matches([' ', ',']).to_ascii_lowercase();
        let (value, after) = match rest.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => rest.split_once(',').unwrap_or((rest, "")),
        };
        found.insert(key, value.trim().to_owned());
        text = after;
    }
    found
}

#[derive(Deserialize, Default)]
struct DockerConfig {
    #[serde(default)]
    auths: BTreeMap<String, DockerAuth>,
    #[serde(rename = "credsStore")]
    store: Option<String>,
    #[serde(rename = "credHelpers", default)]
    helpers: BTreeMap<String, String>,
}

#[derive(Deserialize, Default)]
struct DockerAuth {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
}

/// The login for a host.
#[derive(Debug)]
pub(super) struct Credentials {
    pub(super) login: Option<Login>,
    /// What to do when the registry refuses the login or there is none.
    pub(super) advice: &'static str,
}

/// Reads the login for a host from the user's Docker configuration.
pub(super) fn credentials(host: &str, folder: Option<&Path>) -> Credentials {
    let own = || env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let usual = || env::var_os("HOME").map(|home| Path::new(&home).join(".docker"));
    let folder = folder.map(Path::to_owned).or_else(own).or_else(usual);
    // An unreadable file counts as no login; the registry then answers that it needs one.
    let text = folder.and_then(|folder| fs::read_to_string(folder.join("config.json")).ok());
    parse_credentials(&text.unwrap_or_default(), host)
}

fn parse_credentials(text: &str, host: &str) -> Credentials {
    let config: DockerConfig = serde_json::from_str(text).unwrap_or_default();
    let login = config
        .auths
        .iter()
        .find(|(key, _)| host_of(key) == host)
        .and_then(|(_, entry)| entry.login());
    let advice = match (&login, config.store.is_some() || config.helpers.contains_key(host)) {
        (Some(_), _) => "the one in ~/.docker/config.json was refused",
        (None, true) => {
            "credential helpers are not supported: add it to `auths` of ~/.docker/config.json"
        }
        (None, false) => {
            "add it to `auths` of ~/.docker/config.json with `docker login` or `skopeo login`"
        }
    };
    Credentials { login, advice }
}

// Keys are hosts, or URLs in old files.
fn host_of(key: &str) -> &str {
    let rest = key.split_once("://").map_or(key, |(_, rest)| rest);
    rest.split('/').next().unwrap_or_default()
}

impl DockerAuth {
    fn login(&self) -> Option<Login> {
        let both = || Some(format!("{}:{}", self.username.as_ref()?, self.password.as_ref()?));
        let decoded = || {
            let bytes = BASE64_STANDARD
                .decode(self.auth.as_ref().filter(|auth| !auth.is_empty())?.trim())
                .ok()?;
            String::from_utf8(bytes).ok().map(|text| text.trim_end_matches('\0').to_owned())
        };
        decoded()
            .or_else(both)
            .filter(|text| text.contains(':'))
            .map(|text| Login(Secret::new(text)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn challenges_are_parsed() {
        let header = r#"Bearer realm="https://a.test/token",service="r.test", scope="repository:a:pull,push",x=y"#;
        let expected = Challenge::Bearer {
            realm: "https://a.test/token".to_owned(),
            service: Some("r.test".to_owned()),
            scope: Some("repository:a:pull,push".to_owned()),
        };
        assert_eq!(Challenge::parse(header), Some(expected));
        assert_eq!(Challenge::parse("Basic realm=\"x\""), Some(Challenge::Basic));
        assert_eq!(Challenge::parse("Negotiate"), None);
        assert_eq!(Challenge::parse("Bearer service=\"x\""), None);
    }

    #[test]
    fn logins_are_read_from_docker_configuration() {
        let text = r#"{"auths": {"https://r.test/v1/": {"auth": "dXNlcjpwYTpzcw=="}, "s.test": {"username": "u", "password": "p"}, "t.test": {}},
            "credHelpers": {"v.test": "x"}}"#;
        let header = |host| parse_credentials(text, host).login.map(|login| login.header());
        assert_eq!(header("r.test").as_deref(), Some("Basic dXNlcjpwYTpzcw=="));
        assert_eq!(header("s.test").as_deref(), Some("Basic dTpw"));
        assert_eq!([header("t.test"), header("u.test")], [None, None]);
        assert!(parse_credentials(text, "v.test").advice.contains("helpers"));
        assert!(parse_credentials("no json", "r.test").login.is_none());
        let shown = format!("{:?}", parse_credentials(text, "r.test").login);
        assert!(!shown.contains("pa:ss"), "{shown}");
    }
}
