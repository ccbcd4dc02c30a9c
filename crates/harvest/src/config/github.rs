//! GitHub in the configuration: the table `github`, and the variables that GitHub's own programs
//! use. The values of secrets stay in variables: the file may be readable for others.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use harvest_forge::{AppKey, GitHub, GitHubSettings, SignIn};
use harvest_gateway::{PrivateHosts, check_service_url};
use harvest_proto::Secret;

use super::{Env, HAS_DEFAULT, keys::GithubTable, upstreams::unusable_url};
use crate::printer::Advice;

const APP_ID: &str = "GITHUB_APP_ID";
const PRIVATE_KEY: &str = "GITHUB_APP_PRIVATE_KEY";
const INSTALLATION_ID: &str = "GITHUB_APP_INSTALLATION_ID";
const WEBHOOK_SECRET: &str = "GITHUB_WEBHOOK_SECRET";
const TOKEN: &str = "GITHUB_TOKEN";

// A key of 8192 bits has 6.4 KB.
const MAX_KEY_BYTES: u64 = 64 * 1024;

/// Where GitHub is, and how the server signs in. Only a server looks at the variables: other verbs
/// work when they are wrong.
#[derive(Debug, Clone)]
pub(crate) struct GitHubConfig {
    url: String,
    app_id: Option<String>,
    private_key: Option<Secret<String>>,
    installation_id: Option<String>,
    token: Option<Secret<String>>,
    /// Whether the token signs in for all users.
    shared_token: bool,
    webhook_secret: Option<Secret<String>>,
}

pub(super) fn github(
    table: GithubTable,
    private_hosts: &[String],
    env: Env,
) -> Result<GitHubConfig> {
    let url = table.url.expect(HAS_DEFAULT);
    let private_hosts = PrivateHosts::new(private_hosts.to_vec());
    check_service_url(&url, &private_hosts)
        .map_err(unusable_url)
        .context("`[github]` cannot be used")?;
    let shared_token = table.shared_token.expect(HAS_DEFAULT);
    Ok(GitHubConfig {
        url,
        app_id: env(APP_ID),
        private_key: env(PRIVATE_KEY).map(Secret::new),
        installation_id: env(INSTALLATION_ID),
        token: env(TOKEN).filter(|_| shared_token).map(Secret::new),
        shared_token,
        webhook_secret: env(WEBHOOK_SECRET).map(Secret::new),
    })
}

fn number(name: &str, text: &str) -> Result<u64> {
    text.trim().parse().map_err(|_| {
        let hint = "it is the number that the settings of the App or its installation show";
        anyhow::Error::new(Advice::new(format!("{name} is not a number"), hint))
    })
}

impl GitHubConfig {
    /// The values that must appear in no log.
    pub(crate) fn secrets(&self) -> impl Iterator<Item = &Secret<String>> {
        // The path of a file is no secret.
        let key = self.private_key.iter().filter(|key| is_pem(key));
        key.chain(&self.token).chain(&self.webhook_secret)
    }

    /// The client. Reads the file of the App's key, and makes no request.
    pub(crate) fn client(&self) -> Result<GitHub> {
        let sign_in = match (self.app()?, &self.token) {
            (Some(app), _) => app,
            (None, Some(token)) => SignIn::Token(token.clone()),
            (None, None) if self.shared_token => {
                let hint = "set it in the environment of `harvest up`, or remove `shared_token`";
                bail!(Advice::new(format!("`shared_token` is set, and {TOKEN} is not"), hint))
            }
            (None, None) => SignIn::None,
        };
        let webhook_secret = self.webhook_secret.clone();
        let settings = GitHubSettings { sign_in, webhook_secret, ..GitHubSettings::new(&self.url) };
        GitHub::new(settings).with_context(|| {
            Advice::new("cannot use the key `github.url`", "such as `https://github.com`")
        })
    }

    fn app(&self) -> Result<Option<SignIn>> {
        let (id, key) = match (&self.app_id, &self.private_key) {
            (None, None) => return Ok(None),
            (Some(id), Some(key)) => (number(APP_ID, id)?, key),
            (id, _) => {
                let (set, missing) =
                    if id.is_some() { (APP_ID, PRIVATE_KEY) } else { (PRIVATE_KEY, APP_ID) };
                let hint = format!("set both, or remove {set}");
                bail!(Advice::new(format!("{set} is set, and {missing} is not"), hint))
            }
        };
        let key = app_key(key).with_context(|| {
            let hint = "give the private key that the App's settings created, as PEM or as the \
                        path of its file";
            Advice::new(format!("cannot use {PRIVATE_KEY}"), hint)
        })?;
        let installation = self.installation_id.as_deref();
        let installation = installation.map(|id| number(INSTALLATION_ID, id)).transpose()?;
        Ok(Some(SignIn::App { id, key, installation }))
    }
}

fn is_pem(text: &Secret<String>) -> bool {
    text.expose().contains("-----BEGIN")
}

fn app_key(given: &Secret<String>) -> Result<AppKey> {
    if is_pem(given) {
        return Ok(AppKey::parse(given)?);
    }
    let path: PathBuf = given.expose().trim().into();
    // The path is not printed: it may be a key in another form.
    let pem = read_key(&path).context("it is neither PEM nor the path of a readable file")?;
    Ok(AppKey::parse(&pem)?)
}

fn read_key(path: &Path) -> Result<Secret<String>> {
    let length = std::fs::metadata(path)?.len();
    if length > MAX_KEY_BYTES {
        bail!("the file is too long for a key");
    }
    Ok(Secret::new(std::fs::read_to_string(path)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> Result<GitHubConfig> {
        let env = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        let table = GithubTable::default().resolve("github", &env)?;
        github(table, &[], &env)
    }

    #[test]
    fn shared_token_is_used_only_when_asked_for() {
        let token = |extra: &[(&str, &str)]| {
            config(&[&[("GITHUB_TOKEN", "t0ken")], extra].concat()).unwrap().token
        };
        assert_eq!(token(&[]), None);
        let shared = token(&[("HARVEST_GITHUB_SHARED_TOKEN", "true")]);
        assert_eq!(shared, Some(Secret::new("t0ken".to_owned())));
    }

    #[test]
    fn half_an_app_is_refused_without_its_key() {
        for (variables, expected) in [
            (&[("GITHUB_APP_ID", "7")][..], "GITHUB_APP_PRIVATE_KEY is not"),
            (&[("GITHUB_APP_PRIVATE_KEY", "s3cret")], "GITHUB_APP_ID is not"),
            (
                &[("GITHUB_APP_ID", "Iv1.x"), ("GITHUB_APP_PRIVATE_KEY", "s3cret")],
                "GITHUB_APP_ID is not a number",
            ),
        ] {
            let config = config(variables).unwrap();
            let error = format!("{:#} {config:?}", config.client().unwrap_err());
            assert!(error.contains(expected) && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn unusable_key_is_not_quoted() {
        for key in ["/nowhere/s3cret", "czNjcmV0s3cret", "-----BEGIN RSA PRIVATE KEY-----\ns3cret"]
        {
            let config = config(&[("GITHUB_APP_ID", "7"), ("GITHUB_APP_PRIVATE_KEY", key)]);
            let config = config.unwrap();
            let error = format!("{:#} {config:?}", config.client().unwrap_err());
            assert!(error.contains("cannot use GITHUB_APP_PRIVATE_KEY"), "{error}");
            assert!(!error.contains("s3cret"), "{error}");
        }
    }
}
