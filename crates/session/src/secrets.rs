//! Secrets and tokens: a secret is sealed before it is stored and read by the gateway only; of a
//! token only a hash is kept.

use harvest_gateway::vault::SecretName;
use harvest_proto::{Secret, Timestamp, bridge::Author};
use harvest_store::{Claim, TokenRecord};
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

    /// Makes a token. Its value is shown this once.
    ///
    /// # Errors
    /// When one has this name.
    pub async fn token_create(&self, name: &str, user: Author) -> Result<Secret<String>, SessionError> {
        let mut bytes = [0u8; 32];
        getrandom::fill(&mut bytes).expect("the kernel's random source is there on every Linux we support");
        let value = format!("hvt_{}", hex(&bytes));
        let record = TokenRecord { name: name.to_owned(), user, created_at: now() };
        self.shared.store.token_insert(&hash(&value), &record).await?;
        Ok(Secret::new(value))
    }

    /// Whose token this is, if it is one of ours.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_check(&self, value: &str) -> Result<Option<Author>, SessionError> {
        Ok(self.shared.store.token_find(&hash(value)).await?.map(|token| token.user))
    }

    /// All tokens, by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_list(&self) -> Result<Vec<TokenRecord>, SessionError> {
        Ok(self.shared.store.token_list().await?)
    }

    /// Forgets a token.
    ///
    /// # Errors
    /// When there is none of this name.
    pub async fn token_delete(&self, name: &str) -> Result<(), SessionError> {
        if self.shared.store.token_remove(name).await? {
            return Ok(());
        }
        Err(SessionError::missing(format!("token `{name}`")))
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

fn hash(value: &str) -> String {
    hex(digest(&SHA256, value.as_bytes()).as_ref())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
