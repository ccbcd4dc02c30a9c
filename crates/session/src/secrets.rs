//! Secrets, sealed before they are stored and read by the gateway only.

use harvest_gateway::vault::SecretName;
use harvest_proto::{Secret, Timestamp};

use crate::{Sessions, error::SessionError, wiring::now};

impl Sessions {
    /// Keeps a secret under its name, in place of an older one.
    ///
    /// # Errors
    /// When the name makes no sense.
    pub async fn secret_set(&self, name: &str, value: Secret<String>) -> Result<(), SessionError> {
        let parsed: SecretName =
            name.parse().map_err(|error: harvest_gateway::vault::SecretNameError| {
                SessionError::invalid("invalid_name", error.to_string())
            })?;
        let sealed = self.shared.vault.seal(&parsed, &value)?;
        Ok(self.shared.store.secret_set(name, &sealed, now()).await?)
    }

    /// The names of all secrets.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn secret_list(&self) -> Result<Vec<String>, SessionError> {
        Ok(self.shared.store.secret_list().await?)
    }

    /// Forgets a secret.
    ///
    /// # Errors
    /// When there is none of this name.
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
