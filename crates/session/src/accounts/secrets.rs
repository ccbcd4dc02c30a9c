//! Secrets: sealed before they are stored, read only by the gateway.

use harvest_gateway::vault::SecretName;
use harvest_proto::Secret;

use super::Accounts;
use crate::{error::SessionError, wall_clock::now};

impl Accounts {
    /// Stores a secret, replacing one of the same name.
    ///
    /// # Errors
    /// When the name is invalid.
    pub async fn secret_set(&self, name: &str, value: Secret<String>) -> Result<(), SessionError> {
        let parsed: SecretName =
            name.parse().map_err(|error: harvest_gateway::vault::SecretNameError| {
                SessionError::invalid("invalid_name", error.to_string())
            })?;
        let sealed = self.vault.seal(&parsed, &value)?;
        Ok(self.store.secret_set(name, &sealed, now()).await?)
    }

    /// # Errors
    /// When the store fails.
    pub async fn secret_list(&self) -> Result<Vec<String>, SessionError> {
        Ok(self.store.secret_list().await?)
    }

    /// # Errors
    /// When the secret does not exist.
    pub async fn secret_delete(&self, name: &str) -> Result<(), SessionError> {
        if self.store.secret_remove(name).await? {
            return Ok(());
        }
        Err(SessionError::missing(format!("secret `{name}`")))
    }
}
