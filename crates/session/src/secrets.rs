//! Secrets, sealed before they are stored and read by the gateway only; and the keys by which a request
//! is told from its repetition.

use harvest_gateway::vault::SecretName;
use harvest_proto::{Secret, Timestamp};
use harvest_store::Claim;
use ring::digest::{SHA256, digest};

use crate::{Sessions, error::SessionError, wiring::now};

impl Sessions {
    /// Keeps a secret under its name, in place of an older one.
    ///
    /// # Errors
    /// When the name makes no sense.
    pub async fn secret_set(&self, name: &str, value: Secret<String>) -> Result<(), SessionError> {
        let parsed: SecretName = name.parse().map_err(|error: harvest_gateway::vault::SecretNameError| {
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

    /// Claims an idempotency key for a request, told apart by what it says. Keys are kept for 24 hours.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_claim(&self, key: &str, request: &[u8]) -> Result<Claim, SessionError> {
        let request = hex(digest(&SHA256, request).as_ref());
        Ok(self.shared.store.idempotency_claim(key, &request, now()).await?)
    }

    /// The work of a claimed key is done; this was the answer.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_finish(&self, key: &str, answer: &str) -> Result<(), SessionError> {
        Ok(self.shared.store.idempotency_finish(key, answer).await?)
    }

    /// The work of a claimed key was not done; it may be claimed again.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn idempotency_release(&self, key: &str) -> Result<(), SessionError> {
        Ok(self.shared.store.idempotency_release(key).await?)
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
