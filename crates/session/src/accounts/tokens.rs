//! Access tokens: created, checked, revoked. Only a hash of a token's value is stored.
//! Authorization is the server's job.

use std::time::Duration;

use harvest_proto::{
    Secret,
    api::{Role, Token},
    bridge::Author,
};
use ring::digest::{SHA256, digest};

use super::Accounts;
use crate::{error::SessionError, hex::hex, wall_clock::now};

/// How stale `last_used` may get, so that not every request causes a write.
const LAST_USED_PRECISION: Duration = Duration::from_secs(600);

impl Accounts {
    /// Creates a token. Its value cannot be read again later.
    ///
    /// # Errors
    /// When the name is taken or invalid.
    pub async fn token_create(
        &self,
        name: &str,
        user: Author,
        role: Role,
    ) -> Result<(Token, Secret<String>), SessionError> {
        let (token, value) = new(name, user, role)?;
        self.store.token_insert(&hash(value.expose()), &token).await?;
        Ok((token, value))
    }

    /// Creates a token, replacing one of the same name.
    ///
    /// # Errors
    /// When the name is invalid.
    pub async fn token_replace(
        &self,
        name: &str,
        user: Author,
        role: Role,
    ) -> Result<Secret<String>, SessionError> {
        let (token, value) = new(name, user, role)?;
        self.store.token_replace(&hash(value.expose()), &token).await?;
        Ok(value)
    }

    /// Sets the user of a token that was created without a known one.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_set_user(&self, name: &str, user: &Author) -> Result<(), SessionError> {
        Ok(self.store.token_set_user(name, user).await?)
    }

    /// Returns the token with this value, if there is one.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_check(&self, value: &str) -> Result<Option<Token>, SessionError> {
        let found = self.store.token_find(&hash(value)).await?;
        if let Some(token) = &found {
            self.record_use(token);
        }
        Ok(found)
    }

    /// Updates `last_used` in the background: a full disk must not lock users out.
    fn record_use(&self, token: &Token) {
        let at = now();
        if token.last_used.is_some_and(|last| at.since(last) < LAST_USED_PRECISION) {
            return;
        }
        let (store, name) = (self.store.clone(), token.name.clone());
        self.tasks.spawn(async move {
            if let Err(error) = store.token_used(&name, at).await {
                tracing::debug!(name, %error, "cannot store the last use of a token");
            }
        });
    }

    /// # Errors
    /// When the token does not exist.
    pub async fn token_get(&self, name: &str) -> Result<Token, SessionError> {
        Ok(self.store.token_get(name).await?)
    }

    /// Lists all tokens by name.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn token_list(&self) -> Result<Vec<Token>, SessionError> {
        Ok(self.store.token_list().await?)
    }

    /// Revokes a token.
    ///
    /// # Errors
    /// When the token does not exist or is the only admin token.
    pub async fn token_delete(&self, name: &str) -> Result<(), SessionError> {
        if self.store.token_remove(name).await? {
            return Ok(());
        }
        self.store.token_get(name).await?;
        Err(SessionError::conflict(
            "last_admin",
            format!("`{name}` is the only admin token"),
            "create another one first: `harvest token create NAME --role admin`",
        ))
    }
}

fn new(name: &str, user: Author, role: Role) -> Result<(Token, Secret<String>), SessionError> {
    if !is_name(name) {
        let what = "token names are 1 to 64 letters, digits, `.`, `_` or `-`, starting with a letter or digit";
        return Err(SessionError::invalid("invalid_name", what));
    }
    let mut bytes = [0u8; 20];
    getrandom::fill(&mut bytes).expect("getrandom works on every supported Linux");
    let token = Token { name: name.to_owned(), user, role, created_at: now(), last_used: None };
    Ok((token, Secret::new(format!("hvt_{}", hex(&bytes)))))
}

fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric)
        && text.len() <= 64
        && text.bytes().all(is_allowed)
}

fn hash(value: &str) -> String {
    hex(digest(&SHA256, value.as_bytes()).as_ref())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_names_are_safe_in_paths() {
        for good in ["laptop", "ci-2.main_x", "7"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", ".", "-x", "a/b", "a b", "ä", &"x".repeat(65)] {
            assert!(!is_name(bad), "{bad}");
        }
    }
}
