//! Secrets: sealed before they are stored, read only by the gateway.

use harvest_gateway::{
    HeaderTemplate, normalize_host,
    vault::{SecretName, SecretNameError, Vault},
};
use harvest_proto::{
    Secret, SecretOwner,
    api::{SecretUse, StoredSecret},
};
use harvest_store::{SealedSecret, SecretBinding};

use super::Accounts;
use crate::{error::SessionError, wall_clock::now};

const MAX_HOSTS: usize = 16;

impl Accounts {
    /// Stores a secret, replacing that of the same owner and name.
    ///
    /// # Errors
    /// When the name is invalid or the owner does not exist.
    pub async fn secret_set(
        &self,
        owner: &SecretOwner,
        name: &str,
        value: Secret<String>,
        binding: Option<SecretBinding>,
    ) -> Result<(), SessionError> {
        match owner {
            SecretOwner::Session(session) => drop(self.store.session_get(session).await?),
            SecretOwner::Repository(name) => drop(self.store.repository_get(name).await?),
            SecretOwner::User(_) | SecretOwner::Global => {}
        }
        let sealed = SealedSecret { binding, ..seal(&self.vault, owner, name, &value)? };
        let stored = self.store.secret_set(sealed).await;
        self.vault.mark_change();
        Ok(stored?)
    }

    /// All secrets by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn secret_list(&self) -> Result<Vec<(SecretOwner, StoredSecret)>, SessionError> {
        Ok(self.store.secret_list().await?.into_iter().map(describe).collect())
    }

    /// The requests to which a secret with this name was added, newest first.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn secret_uses(&self, name: &str) -> Result<Vec<SecretUse>, SessionError> {
        Ok(self.store.secret_uses(name).await?)
    }

    /// # Errors
    /// When the secret does not exist.
    pub async fn secret_delete(&self, owner: &SecretOwner, name: &str) -> Result<(), SessionError> {
        if self.store.secret_remove(owner, name).await? {
            return Ok(());
        }
        Err(SessionError::missing(format!("secret `{name}` ({owner})")))
    }
}

fn describe(secret: SealedSecret) -> (SecretOwner, StoredSecret) {
    let hosts = secret.hosts().to_vec();
    let stored = StoredSecret {
        name: secret.name,
        scope: secret.owner.scope(),
        owner: secret.owner.name(),
        header: secret.binding.map(|binding| binding.header).filter(|_| !hosts.is_empty()),
        hosts,
        updated_at: secret.updated_at,
    };
    (secret.owner, stored)
}

/// A secret that is added for no host.
pub(crate) fn seal(
    vault: &Vault,
    owner: &SecretOwner,
    name: &str,
    value: &Secret<String>,
) -> Result<SealedSecret, SessionError> {
    let parsed: SecretName = name.parse().map_err(|error: SecretNameError| {
        SessionError::invalid("invalid_name", error.to_string())
    })?;
    let sealed = vault.seal(owner, &parsed, value)?;
    let (owner, name) = (owner.clone(), name.to_owned());
    Ok(SealedSecret { owner, name, sealed, binding: None, updated_at: now() })
}

/// To which requests a secret is added, and how; the names in their usual form.
///
/// # Errors
/// When a host is no whole name, or the header has another form.
pub fn secret_binding(
    hosts: &[String],
    header: Option<&str>,
) -> Result<SecretBinding, SessionError> {
    if hosts.len() > MAX_HOSTS {
        let what = format!("a secret has at most {MAX_HOSTS} hosts");
        return Err(SessionError::invalid("invalid_host", what));
    }
    let host = |text: &String| {
        normalize_host(text).ok_or_else(|| {
            let what = format!("`{text}` is not the name of a host");
            SessionError::invalid("invalid_host", what)
                .with_hint("give the whole name of each host, such as `api.example.com`")
        })
    };
    let hosts = hosts.iter().map(host).collect::<Result<_, _>>()?;
    let header: HeaderTemplate = header.unwrap_or(HeaderTemplate::DEFAULT).parse().map_err(
        |error: harvest_gateway::HeaderTemplateError| {
            SessionError::invalid("invalid_header", error.to_string())
        },
    )?;
    Ok(SecretBinding { hosts, header: header.to_string() })
}
