//! Secrets: sealed before they are stored, read only by the gateway.

use harvest_gateway::vault::SecretName;
use harvest_proto::{Secret, Timestamp};

use crate::{Sessions, context::now, error::SessionError};

impl Sessions {
    /// Stores a secret, replacing one of the same name.
    ///
    /// # Errors
    /// When the name is invalid.
    pub async fn secret_set(&self, name: &str, value: Secret<String>) -> Result<(), SessionError> {
        let parsed: SecretName =
            name.parse().map_err(|error: harvest_gateway::vault::SecretNameError| {
                SessionError::invalid("invalid_name", error.to_string())
            })?;
        let sealed = self.shared.vault.seal(&parsed, &value)?;
        Ok(self.shared.store.secret_set(name, &sealed, now()).await?)
    }

    /// # Errors
    /// When the store fails.
    pub async fn secret_list(&self) -> Result<Vec<String>, SessionError> {
        Ok(self.shared.store.secret_list().await?)
    }

    /// # Errors
    /// When the secret does not exist.
    pub async fn secret_delete(&self, name: &str) -> Result<(), SessionError> {
        if self.shared.store.secret_remove(name).await? {
            return Ok(());
        }
        Err(SessionError::missing(format!("secret `{name}`")))
    }

    /// The time by the server's clock.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        now()
    }
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
